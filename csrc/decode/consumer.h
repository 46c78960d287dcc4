// The two consumer warpgroups: S^T = K Q^T, the softmax and O^T = V^T P^T of a tile of up to 64
// rows of Q. Each computes S for half of the keys of a K tile and O for half of the columns of a
// stage. N of both GEMMs is the number of rows, rounded up to 8, 16, 32 or 64.
#pragma once

#include "decode/latents.h"
#include "decode/operands.h"
#include "decode/output.h"
#include "decode/scores.h"
#include "forward/work.h"

namespace fa3 {

template <class Traits>
struct DecodeConsumer {
  using Work = FwdWork<Traits>;
  using Params = typename Traits::Params;

  DecodeStorage<Traits>& shared;
  Params const& p;
  int warpgroup;
  int thread;  // in the warpgroup
  RingState<Traits::kStages> ring;
  RingState<Traits::kQStages> tile_ring;
  int turn = 0;  // a latent cache: LatentTiles::turn
  DecodeScores<Traits> score_ops;

  CUTE_DEVICE DecodeConsumer(DecodeStorage<Traits>& shared_, Params const& p_, int warpgroup_,
                             int thread_)
      : shared(shared_),
        p(p_),
        warpgroup(warpgroup_),
        thread(thread_),
        score_ops(shared_, p_, coordinates()) {}

  CUTE_DEVICE void run() {
    while (true) {
      shared.work_full[tile_ring.stage].wait(tile_ring.phase);
      if (!work().valid()) {
        return;
      }
      compute(work());
      if (work().location.part.parts > 1) {
        DecodeCombiner<Traits, Keys<8>>(shared, p, work(), coordinates()).run();
      }
      __syncwarp();
      if (is_first_lane()) {
        shared.work_empty[tile_ring.stage].arrive();
      }
      tile_ring.advance();
    }
  }

 private:
  template <int kRows>
  using Keys = cute::conditional_t<Traits::kConverts, ConvertedKeys<Traits, kRows>,
                                   SharedKeys<Traits, kRows>>;

  CUTE_DEVICE DecodeThread coordinates() const {
    int const warp = warpgroup * kWarpgroupWarps + thread / 32;
    return DecodeThread{warp, thread % 32, warp % Traits::kKeyWarps};
  }

  // The block of 64 columns of a stage whose O this warpgroup computes. Both compute the only one.
  CUTE_DEVICE int block() const { return Traits::kBlocks == 1 ? 0 : warpgroup; }

  CUTE_DEVICE Work const& work() const { return shared.work[tile_ring.stage]; }
  CUTE_DEVICE typename Traits::Element* queries() const { return shared.q[tile_ring.stage]; }

  // With e4m3 the GEMMs overlap with the softmax: 64 x 4k takes 155 us instead of 165 (H200,
  // 2026-11-27). WHY not elsewhere: 16-bit K and V, or several parts, hold more stages than the
  // ring can spare (64 x 4k takes 273 us instead of 263), and more rows need more registers than
  // there are.
  template <int kRows>
  static constexpr bool kOverlaps =
      Traits::kConverts && Traits::kParts == 1 && Traits::kPartsV == 1 && kRows == 8;

  CUTE_DEVICE void compute(Work const& work) {
    if constexpr (Traits::kIsLatent) {
      compute_tile<Traits::kQRows>(work);
    } else {
      compute_rows(work, rows_of_tile(p, work.rows));
    }
  }

  CUTE_DEVICE void compute_rows(Work const& work, int rows) {
    if (rows <= 8) {
      compute_tile<8>(work);
    } else if (rows <= 16) {
      compute_tile<16>(work);
    } else if (Traits::k.decode_rows() == 32 || rows <= 32) {
      compute_tile<32>(work);
    } else {
      compute_tile<64>(work);
    }
  }

  template <int kRows>
  CUTE_DEVICE void compute_tile(Work const& work) {
    using Sums = typename DecodeGemms<Traits, kRows>::Sums;
    start_rows<kRows>(work);
    DecodeSoftmax<Traits, kRows> softmax(shared, coordinates(), p.scale_log2);
    Sums output[Traits::kPartsV];
    CUTE_UNROLL
    for (int part = 0; part < Traits::kPartsV; ++part) {
      cute::clear(output[part]);
    }
    if constexpr (Traits::kIsLatent) {
      LatentTiles<Traits, kRows>{shared, score_ops, warpgroup, thread, tile_ring.stage, ring, turn}
          .visit(work, softmax, output);
    } else if constexpr (kOverlaps<kRows>) {
      visit_keys_overlapped<kRows>(work.keys, softmax, output);
    } else {
      visit_keys<kRows>(work.keys, softmax, output);
    }
    store<kRows>(work, softmax, output);
  }

  // Computes S, P and O of each K tile in sequence.
  template <int kRows, class Softmax, class Sums>
  CUTE_DEVICE void visit_keys(KeyRange<Traits> const keys, Softmax& softmax,
                              Sums (&output)[Traits::kPartsV]) {
    CUTE_NO_UNROLL
    for (int n = keys.first(); n >= keys.last(); keys.advance(n)) {
      Sums scores;
      add_keys<kRows, 0>(scores);
      score_ops.take(scores, scores);
      bool const is_masked = (n >= keys.free_end) | (n < keys.free_begin);
      score_ops.transform(scores, work(), keys.tile(n), is_masked);
      softmax.raise_maxima(scores);
      sync_consumers();
      make_probabilities(softmax, scores, output, ring);
      fence_shared_for_async_proxy();
      sync_consumers();
      CUTE_UNROLL
      for (int part = 0; part < Traits::kPartsV; ++part) {
        wait_for(ring);
        Keys<kRows>::fence();
        Keys<kRows>::issue_output(shared.keys[ring.stage], shared.p[0], block(), thread,
                                  output[part], releases(ring.stage));
        wait_gemm<0>(output[part]);
        Keys<kRows>::release_after_gemm(thread, releases(ring.stage));
        ring.advance();
      }
    }
  }

  // Accumulates S^T over all parts of K from kPart on.
  template <int kRows, int kPart, class Sums>
  CUTE_DEVICE void add_keys(Sums& scores) {
    wait_for(ring);
    Keys<kRows>::fence();
    issue_scores<kRows, kPart>(scores, ring.stage, true);
    wait_gemm<0>(scores);
    Keys<kRows>::release_after_gemm(thread, releases(ring.stage));
    ring.advance();
    if constexpr (kPart + 1 < Traits::kParts) {
      add_keys<kRows, kPart + 1>(scores);
    }
  }

  // Issues S^T of a part. is_last: no later GEMM reads the stage, so it is released.
  template <int kRows, int kPart, class Sums>
  CUTE_DEVICE void issue_scores(Sums& scores, int stage, bool is_last) {
    if (Traits::kConverts && kPart == 0) {
      score_ops.read_key_scales(stage);
    }
    Keys<kRows>::template issue_scores<kPart>(shared.keys[stage], queries(), warpgroup, thread,
                                              scores, [&] {
                                                if (is_last) {
                                                  shared.empty[stage].arrive();
                                                }
                                              });
  }

  // The softmax of a K tile overlaps with S of the next K tile and PV of the previous one:
  //
  //   tensor cores   S(3)  S(2)  S(1) PV(3)  S(0) PV(2)  PV(1)  PV(0)
  //   softmax              3     2           1           0
  //
  // K and V pass through registers, so only P needs the proxy fence.
  template <int kRows, class Softmax, class Sums>
  CUTE_DEVICE void visit_keys_overlapped(KeyRange<Traits> const keys, Softmax& softmax,
                                         Sums (&output)[1]) {
    Overlap<Sums> at{ring, ring};
    at.v_ring.advance();
    int n = keys.first();
    bool const is_only = n == keys.last();
    Sums scores;
    wait_for(at.k_ring);
    issue_scores<kRows, 0>(at.next, at.k_ring.stage, !is_only);
    wait_gemm<0>(at.next);
    score_ops.take(scores, at.next);
    if (!is_only) {
      advance_by_two(at.k_ring);
      wait_for(at.k_ring);
    }
    // TRAP: ptxas (13.0) serialises GEMMs that are issued under a condition, or whose accumulators
    // are written in between. So if there is only one K tile, its S is computed twice.
    cute::warpgroup_fence_operand(scores);
    cute::warpgroup_fence_operand(output[0]);
    issue_next<kRows>(at);
    CUTE_NO_UNROLL
    for (; keys.next(keys.next(n)) >= keys.last(); keys.advance(n)) {
      step<kRows, true>(keys, n, softmax, scores, output, at);
    }
    CUTE_NO_UNROLL
    for (; n >= keys.last(); keys.advance(n)) {
      step<kRows, false>(keys, n, softmax, scores, output, at);
    }
    wait_gemm<0>(output[0]);
    ring = at.k_ring;
  }

  template <class Sums>
  struct Overlap {
    RingState<Traits::kStages> k_ring;  // stage of the next S
    RingState<Traits::kStages> v_ring;  // stage of the next PV
    Sums next;                          // S of the next K tile
  };

  template <int kRows, class Sums>
  CUTE_DEVICE void issue_next(Overlap<Sums>& at) {
    issue_scores<kRows, 0>(at.next, at.k_ring.stage, true);
    advance_by_two(at.k_ring);
  }

  // One pass of the overlapped loop. kIssues: K tile n - 2 exists, and its S is issued.
  template <int kRows, bool kIssues, class Softmax, class Sums>
  CUTE_DEVICE void step(KeyRange<Traits> const& keys, int n, Softmax& softmax, Sums& scores,
                        Sums (&output)[1], Overlap<Sums>& at) {
    bool const is_masked = n >= keys.free_end || n < keys.free_begin;
    score_ops.transform(scores, work(), keys.tile(n), is_masked);
    softmax.raise_maxima(scores);
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(at.next);
    cute::warpgroup_fence_operand(output[0]);
    sync_consumers();
    make_probabilities(softmax, scores, output, at.v_ring);
    score_ops.take(scores, at.next);
    wait_for(at.v_ring);
    if (kIssues) {
      wait_for(at.k_ring);
    }
    fence_shared_for_async_proxy();
    sync_consumers();
    cute::warpgroup_fence_operand(scores);
    cute::warpgroup_fence_operand(output[0]);
    if constexpr (kIssues) {
      issue_next<kRows>(at);
    }
    int const v_stage = at.v_ring.stage;
    Keys<kRows>::issue_output(shared.keys[v_stage], shared.p[0], block(), thread, output[0],
                              releases(v_stage));
    advance_by_two(at.v_ring);
  }

  CUTE_DEVICE static void advance_by_two(RingState<Traits::kStages>& ring) {
    ring.advance();
    ring.advance();
  }

  CUTE_DEVICE void wait_for(RingState<Traits::kStages> const& at) {
    shared.full[at.stage].wait(at.phase);
  }

  CUTE_DEVICE auto releases(int stage) const {
    return [this, stage] { shared.empty[stage].arrive(); };
  }

  // ------------------------------------------------------------------------------------- rows
  // Sets the state of the rows of a tile. With e4m3 it also converts their Q.
  template <int kRows>
  CUTE_DEVICE void start_rows(Work const& work) {
    int const consumer_thread = warpgroup * kWarpgroupThreads + thread;
    SeqlenPair const len = work.location.len;
    score_ops.tree_begin = work.location.slot + len.k - len.q;
    if (consumer_thread < kRows) {
      RowOfTile const row = row_of_tile(p, work.rows, consumer_thread);
      CacheLocation const& at = work.location;
      int const position = work.position_begin + row.offset;
      Interval const seen = p.mask.keys(position, len);
      int const first_row = p.has_packed_queries() ? at.q_end - len.q : work.entry * p.tree_stride;
      DecodeRow& target = shared.rows[consumer_thread];
      target.begin = at.slot + seen.begin;
      target.end = at.slot + seen.end;
      target.tree_row = first_row + min_of(position, len.q - 1);
      CUTE_UNROLL
      for (int i = 0; i < Traits::kPBuffers; ++i) {
        shared.most[i * kRows + consumer_thread] = ordered_int(-INFINITY);
      }
    }
    if constexpr (Traits::kConverts) {
      wait_for(ring);  // Q and scales arrive with the first part of K
      DecodeScales const& scales = shared.tile_scales[tile_ring.stage];
      float const scale = p.k_scale.data != nullptr ? scales.k : 1.f;
      int const rows = rows_of_tile(p, work.rows);
      QueryConverter<Traits>::run(reinterpret_cast<char*>(queries()), p.is_bf16, rows, scale,
                                  shared.rows, consumer_thread);
      fence_shared_for_async_proxy();
    }
    sync_consumers();
  }

  // ------------------------------------------------------------------------------------ scores
  // Stores P of a K tile in shared memory and rescales O. v_ring: the stage of its V.
  template <class Softmax, class Scores, int kParts>
  CUTE_DEVICE void make_probabilities(Softmax& softmax, Scores& scores, Scores (&output)[kParts],
                                      RingState<Traits::kStages> const& v_ring) {
    if (Traits::kConverts && p.has_page_scales()) {
      wait_for(v_ring);
      softmax.update(scores, output, score_ops.raise_value_scale(v_ring.stage));
      score_ops.scale_probabilities(scores, v_ring.stage);
    } else {
      softmax.update(scores, output, 1.f);
    }
    softmax.store(scores);
  }

  // ------------------------------------------------------------------------------------ results
  template <int kRows, class Softmax, class Sums>
  CUTE_DEVICE void store(Work const& work, Softmax& softmax, Sums (&output)[Traits::kPartsV]) {
    float scale = 1.f;
    if constexpr (Traits::kConverts) {
      scale = p.has_page_scales()         ? score_ops.value_scale
              : p.v_scale.data != nullptr ? shared.tile_scales[tile_ring.stage].v
                                          : 1.f;
      score_ops.value_scale = 0.f;
    }
    softmax.store_sums();
    sync_consumers();
    DecodeOutput<Traits, Keys<kRows>, kRows> const target(shared, p, work, coordinates());
    target.finish_rows(scale);
    sync_consumers();
    target.store(output);
  }
};

}  // namespace fa3
