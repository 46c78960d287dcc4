// FP8: the scales of q, k and v. By block, of 64 rows of q and 32 of k and v, or per (sequence, KV
// head), whose blocks all have the same one: the stride of a block is 0.
#pragma once

#include "device/math.h"
#include "forward/work.h"

namespace fa3 {

// P is brought into the range of e4m3 by this power of two.
constexpr int kOffsetLog2 = 8;

// No scale counts as smaller: with 0 the maximum of a row would lose its meaning. Twice that far
// from 1 a float still has room.
constexpr float kLeastScale = 1e-30f;

CUTE_DEVICE float scale_at(ScaleView const& scales, int64_t first, int block) {
  float const scale =
      scales.data == nullptr ? 1.f : scales.data[first + block * scales.block_stride];
  return fmaxf(scale, kLeastScale);
}

// Of the K tile at hand.
template <class Traits>
struct KeyScales {
  static constexpr int kBlocks = Traits::kScaleBlocks;

  // In shared memory: there are no registers for them.
  float const (&of_k)[kBlocks];
  float const (&of_v_log2)[kBlocks];
  float const (&over)[kBlocks];

  CUTE_DEVICE explicit KeyScales(float const (&scales)[3][kBlocks])
      : of_k(scales[0]), of_v_log2(scales[1]), over(scales[2]) {}

  CUTE_DEVICE float k(int block) const { return of_k[block]; }
  CUTE_DEVICE float v_log2(int block) const { return of_v_log2[block]; }
  CUTE_DEVICE float over_v(int block) const { return over[block]; }

  // Each of the first lanes of a warp has a block of K tile n.
  CUTE_DEVICE static void write(FwdDeviceParams const& p, TileScales<true> const& at, int n,
                                int lane, float (&scales)[3][kBlocks]) {
    if (lane < kBlocks) {
      int const block = min_of(n * kBlocks + lane, at.last_key_block);
      float const v = scale_at(p.v_scale, at.v, block);
      scales[0][lane] = scale_at(p.k_scale, at.k, block);
      scales[1][lane] = log2_approx(v);
      scales[2][lane] = reciprocal_approx(v) * (1.f / (1 << kOffsetLog2));
    }
  }
};

// Of this thread's two rows.
template <class Traits>
CUTE_DEVICE void read_query_scales(FwdDeviceParams const& p, FwdWork<Traits> const& work,
                                   int thread, float (&scales)[2]) {
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    int const row = fragment_row(thread) + 8 * r;
    int const offset = p.pack.div(row);
    int const head = row - offset * int(p.pack.divisor);
    int const position =
        min_of(work.position_begin + offset, max_of(0, work.place.lengths(p.seqlen).q - 1));
    scales[r] = scale_at(p.q_scale, work.scales.q + head * p.q_scale.head_in_pack_stride,
                         position / kScaleBlockQueries);
  }
}

}  // namespace fa3
