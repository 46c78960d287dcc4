// The K tiles of a latent cache (absorbed MLA), whose latent columns are also V: S and PV read them
// from the same stages. The two consumer warpgroups take K tiles in turn, each with all columns of
// O, so that one computes while the other waits for keys. At the end of a tile they add up O.
//
// WHY not both on each K tile, as with K and V: 4096 x 2048 chosen keys of 16 heads take 2119 us
// instead of 1543 (H200, 2026-11-28).
#pragma once

#include "decode/operands.h"
#include "decode/scores.h"
#include "decode/softmax.h"

namespace fa3 {

template <class Traits, int kRows>
struct LatentTiles {
  using Work = FwdWork<Traits>;
  using Gemms = DecodeGemms<Traits, kRows>;
  using Sums = typename Gemms::Sums;
  using Keys = SharedKeys<Traits, kRows>;
  static constexpr int kSlices = Traits::kStageColumns / 64;  // slices of 64 columns per stage
  static constexpr int kBlocks = Traits::kHeadDimV / 64;

  // O^T in blocks of 64 latent columns. The V of block i is slice i + 1 of the K tile, because
  // slice 0 holds the rotary columns.
  using Blocks = Sums[kBlocks];

  DecodeStorage<Traits>& shared;
  DecodeScores<Traits> const& score_ops;
  int warpgroup;
  int thread;
  int q_stage;
  RingState<Traits::kStages>& ring;
  int& turn;  // which warpgroup computes the next K tile

  template <class Softmax>
  CUTE_DEVICE void visit(Work const& work, Softmax& softmax, Sums (&output)[Traits::kPartsV]) {
    Blocks blocks;
    CUTE_UNROLL
    for (int i = 0; i < kBlocks; ++i) {
      cute::clear(blocks[i]);
    }
    KeyRange<Traits> const keys = work.keys;
    CUTE_NO_UNROLL
    for (int n = keys.first(); n >= keys.last(); keys.advance(n)) {
      if (turn == warpgroup) {
        compute(work, n, softmax, blocks);
      } else {
        CUTE_UNROLL
        for (int part = 0; part < Traits::kParts; ++part) {
          ring.advance();
        }
      }
      turn ^= 1;
    }
    sync_consumers();
    softmax.refer_to_common(blocks);
    exchange(blocks, output);
    if (warpgroup == 0 && thread < kRows) {
      shared.most[thread] = max(shared.most[thread], shared.most[kRows + thread]);
    }
  }

 private:
  CUTE_DEVICE void sync_own_warpgroup() const {
    named_sync(NamedBarrier(int(NamedBarrier::kWarpgroupFirst) + 1 + warpgroup), kWarpgroupThreads);
  }

  // S, P and O of a K tile.
  template <class Softmax>
  CUTE_DEVICE void compute(Work const& work, int n, Softmax& softmax, Blocks& blocks) {
    KeyRange<Traits> const keys = work.keys;
    int stages[Traits::kParts];
    Sums scores;
    issue_scores<0>(scores, stages);
    wait_gemm<0>(scores);
    bool const is_masked = (n >= keys.free_end) | (n < keys.free_begin);
    score_ops.transform(scores, work, keys.tile(n), is_masked);
    softmax.raise_maxima(scores);
    sync_own_warpgroup();
    softmax.update(scores, blocks, 1.f);
    softmax.store(scores);
    fence_shared_for_async_proxy();
    sync_own_warpgroup();
    CUTE_UNROLL
    for (int i = 0; i < kBlocks; ++i) {
      Keys::issue_output(shared.keys[stages[(i + 1) / kSlices]], shared.p[warpgroup],
                         (i + 1) % kSlices, thread, blocks[i], [] {});
    }
    release<0>(stages, blocks);
  }

  template <int kPart>
  CUTE_DEVICE void issue_scores(Sums& scores, int (&stages)[Traits::kParts]) {
    stages[kPart] = ring.stage;
    shared.full[ring.stage].wait(ring.phase);
    ring.advance();
    Keys::fence();
    Keys::template issue_scores<kPart>(shared.keys[stages[kPart]], shared.q[q_stage], 0, thread,
                                       scores, [] {});
    if constexpr (kPart + 1 < Traits::kParts) {
      issue_scores<kPart + 1>(scores, stages);
    }
  }

  // Releases each stage once PV of its blocks is complete.
  template <int kPart>
  CUTE_DEVICE void release(int const (&stages)[Traits::kParts], Blocks& blocks) {
    cute::warpgroup_wait<(Traits::kParts - 1 - kPart) * kSlices>();
    CUTE_UNROLL
    for (int i = max_of(0, kPart * kSlices - 1); i < (kPart + 1) * kSlices - 1; ++i) {
      cute::warpgroup_fence_operand(blocks[i]);
    }
    Keys::release_after_gemm(thread, [&] { shared.empty[stages[kPart]].arrive(); });
    if constexpr (kPart + 1 < Traits::kParts) {
      release<kPart + 1>(stages, blocks);
    }
  }

  // Adds up the blocks of both warpgroups. The first one keeps the even blocks and gives away the
  // odd ones, through the buffer of Q, which no S reads any more.
  CUTE_DEVICE void exchange(Blocks const& blocks, Sums (&output)[Traits::kPartsV]) {
    constexpr int kAtOnce = Traits::kPartsV / 2;
    constexpr int kFours = kAtOnce * kRows / 8;  // per thread
    static_assert(2 * kFours * kWarpgroupThreads * sizeof(float4) <= sizeof(shared.q[0]));
    auto* const buffer = reinterpret_cast<float4*>(shared.q[q_stage]);
    auto const four_of = [&](int receiver, int i) -> float4& {
      return buffer[(receiver * kFours + i) * kWarpgroupThreads + thread];
    };
    CUTE_UNROLL
    for (int first = 0; first < Traits::kPartsV; first += kAtOnce) {
      sync_consumers();
      CUTE_UNROLL
      for (int i = 0; i < kFours; ++i) {
        int const part = first + i / (kRows / 8);
        int const at = i % (kRows / 8) * 4;
        auto const given = [&](int j) {
          return warpgroup == 0 ? blocks[2 * part + 1](at + j) : blocks[2 * part](at + j);
        };
        four_of(1 - warpgroup, i) = make_float4(given(0), given(1), given(2), given(3));
      }
      fence_shared_for_async_proxy();  // S of the next tile reads Q there
      sync_consumers();
      CUTE_UNROLL
      for (int i = 0; i < kFours; ++i) {
        int const part = first + i / (kRows / 8);
        int const at = i % (kRows / 8) * 4;
        float4 const four = four_of(warpgroup, i);
        float const other[] = {four.x, four.y, four.z, four.w};
        CUTE_UNROLL
        for (int j = 0; j < 4; ++j) {
          output[part](at + j) =
              other[j] + (warpgroup == 0 ? blocks[2 * part](at + j) : blocks[2 * part + 1](at + j));
        }
      }
    }
  }
};

}  // namespace fa3
