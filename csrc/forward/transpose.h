// FP8: 8-bit operands of wgmma have to be contiguous along the dimension that is summed over, which
// for V are the keys, while TMA brings rows of head_dim values. Two warps of the producer warpgroup
// turn each K tile of V round in shared memory, from the ring `v_raw` into the ring `v`.
//
// Sixteen keys and sixteen columns at a time, as two matrices of 8 keys x 8 pairs of columns.
// Transposed by ldmatrix, a thread has the pairs (d, d + 1) of the keys k, k + 1 from one and of
// k + 8, k + 9 from the other; two byte permutes make of them these four keys of d, and of d + 1.
//
//   - Keys then lie in the order k, k + 1, k + 8, k + 9 (k = 0, 2, 4, 6) of each sixteen. In that
//     order a thread's scores are the operand P of PV as they come (pack_probabilities).
//   - Even columns go to the first 8 rows of each sixteen, odd ones to the others: 8 rows that
//     follow each other are 8 different banks for stmatrix. A thread's O has, for four columns of
//     the accumulator, four columns that follow each other (stage_output).
#pragma once

#include "forward/scales.h"
#include "forward/storage.h"

namespace fa3 {

// Tiles of rows in slices of kChunks chunks of 16 bytes, with the swizzle of that width. A lane
// goes from one chunk or row to another by constants: what the swizzle makes of a row depends on
// the row's last bits, which are the lane's own.
template <int kRows, int kChunks>
struct SwizzledTile {
  static_assert(kChunks == 4 || kChunks == 8);
  static constexpr int kRowBytes = kChunks * 16;

  CUTE_DEVICE static int first(int row, int chunk) {
    int const swizzle = kChunks == 8 ? row % 8 : row / 2 % 4;
    return row * kRowBytes + (chunk ^ swizzle) * 16;
  }

  // From `first`: more rows, a multiple of 8; a chunk whose bits that one does not have.
  CUTE_DEVICE static int moved(int first, int rows, int chunk) {
    return (first ^ chunk % kChunks * 16) + (chunk / kChunks * kRows + rows) * kRowBytes;
  }
};

template <class Traits>
struct ValueTransposer {
  using Source = SwizzledTile<Traits::kTileN, Traits::kSlice / 16>;
  using Target = SwizzledTile<Traits::kHeadDimV, Traits::kNarrowV ? 4 : 8>;
  static constexpr int kGroups = Traits::kTileN / 16 / kTransposingWarps;  // of 16 keys, of a warp
  static constexpr int kScaleStages = RawBarriers<Traits>::kScaleStages;
  static_assert(kGroups % 2 == 0 || kGroups == 1);
  static_assert(Traits::kHeadDimV % 32 == 0);

  FwdStorage<Traits>& shared;
  FwdDeviceParams const& p;
  int warp;  // of the transposing ones: every second group of 16 keys is its own
  int lane;
  int source;  // of this lane's first row, in bytes
  int target;
  RingState<Traits::kQStages> q_ring;
  RingState<Traits::kValueStages> raw_ring;
  RingState<Traits::kStages> v_ring;
  RingState<kScaleStages> scale_ring;

  CUTE_DEVICE ValueTransposer(FwdStorage<Traits>& shared_, FwdDeviceParams const& p_, int warp_,
                              int lane_)
      : shared(shared_),
        p(p_),
        warp(warp_),
        lane(lane_),
        source(Source::first(warp_ * 16 + lane_ % 16, lane_ / 16)),
        target(Target::first(lane_, warp_)) {}

  // A tile's `work` is overwritten when its O has gone out, which needs all of its V.
  CUTE_DEVICE void run() {
    while (true) {
      shared.q_full[q_ring.stage][0].wait(q_ring.phase);
      FwdWork<Traits> const& work = shared.work[q_ring.stage][0];
      if (!work.valid()) {
        return;
      }
      CUTE_NO_UNROLL
      for (int n = work.keys.end - 1; n >= work.keys.begin; --n) {
        if (warp == 0) {
          write_scales(work.scales, n);
        }
        transpose_tile();
      }
      q_ring.advance();
    }
  }

 private:
  CUTE_DEVICE void write_scales(TileScales<true> const& at, int n) {
    shared.raw_barriers.scales_empty[scale_ring.stage].wait(scale_ring.phase ^ 1);
    KeyScales<Traits>::write(p, at, n, lane, shared.raw_barriers.scales[scale_ring.stage]);
    __syncwarp();
    if (lane == 0) {
      shared.raw_barriers.scales_full[scale_ring.stage].arrive();
    }
    scale_ring.advance();
  }

  CUTE_DEVICE void transpose_tile() {
    shared.raw_barriers.v_raw_full[raw_ring.stage].wait(raw_ring.phase);
    shared.v_empty[v_ring.stage].wait(v_ring.phase ^ 1);
    char const* const in = reinterpret_cast<char const*>(shared.raw.v_raw[raw_ring.stage]);
    char* const out = reinterpret_cast<char*>(shared.v[v_ring.stage]);
    CUTE_NO_UNROLL
    for (int columns = 0; columns < Traits::kHeadDimV; columns += 32) {
      CUTE_UNROLL
      for (int group = 0; group < kGroups; group += 2) {
        transpose_two(in, out, columns, group);
      }
    }
    fence_shared_for_async_proxy();
    __syncwarp();
    if (lane == 0) {
      shared.raw_barriers.v_raw_empty[raw_ring.stage].arrive();
      shared.v_full[v_ring.stage].arrive();
    }
    raw_ring.advance();
    v_ring.advance();
  }

  // 32 columns of two of this warp's groups of keys.
  CUTE_DEVICE void transpose_two(char const* in, char* out, int columns, int group) const {
    uint32_t pairs[2][4];
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      char const* const row = in + Source::moved(source, 32 * (group + i), columns / 16);
      cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<cute::uint128_t const*>(row), pairs[i][0],
                                    pairs[i][1], pairs[i][2], pairs[i][3]);
    }
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      char* const row = out + Target::moved(target, columns, 2 * (group + i));
      cute::SM90_U32x4_STSM_N::copy(
          even_bytes(pairs[i][0], pairs[i][1]), odd_bytes(pairs[i][0], pairs[i][1]),
          even_bytes(pairs[i][2], pairs[i][3]), odd_bytes(pairs[i][2], pairs[i][3]),
          *reinterpret_cast<cute::uint128_t*>(row));
    }
  }

  CUTE_DEVICE static uint32_t even_bytes(uint32_t a, uint32_t b) {
    return __byte_perm(a, b, 0x6420);
  }
  CUTE_DEVICE static uint32_t odd_bytes(uint32_t a, uint32_t b) {
    return __byte_perm(a, b, 0x7531);
  }
};

}  // namespace fa3
