// Stores the results of a tile. O of a whole tile goes from registers to its rows. O of a part goes
// to a buffer in register order, in fp32, with its LSEs (decode/combine.h).
#pragma once

#include "decode/combine.h"

namespace fa3 {

template <class Traits, class Keys, int kRows>
struct DecodeOutput {
  static constexpr int kEights = kRows / 8;
  // Marks a row without a visible key. WHY not 0: 0 is also the factor if all scales of V are NaN.
  static constexpr float kNothing = -INFINITY;
  using Parts = WarpParts<Traits>;

  DecodeStorage<Traits>& shared;
  DecodeResults<Traits, Keys> results;

  CUTE_DEVICE DecodeOutput(DecodeStorage<Traits>& shared_, typename Traits::Params const& p,
                           FwdWork<Traits> const& work, DecodeThread at)
      : shared(shared_), results{p, work, at} {}

  // Computes the factor and the LSE of each row from its maximum and the sums of the warps, one
  // thread per row. scale: the scale of V.
  CUTE_DEVICE void finish_rows(float scale) const {
    auto const& [p, work, at] = results;
    bool const is_whole = work.location.part.parts == 1;
    int const r = at.warp * 32 + at.lane;
    if (r >= kRows) {
      return;
    }
    float sum = 0.f;
    CUTE_UNROLL
    for (int warp = 0; warp < Traits::kConsumerWarps; ++warp) {
      sum += shared.sums[warp][r];
    }
    float const most = ordered_float(shared.most[r]);
    RowOfTile const row = row_of_tile(p, work.rows, r);
    float const sink = is_whole ? results.sink_of(row) : -INFINITY;
    float const lse = with_sink(
        log_sum_exp(most, sum, p.softmax_scale) - DecodeSoftmax<Traits, kRows>::kOffsetLog2 * kLn2,
        sink);
    float const sink_weight = exp2_approx(sink * kLog2E - finite_max(most) * p.scale_log2 +
                                          DecodeSoftmax<Traits, kRows>::kOffsetLog2);
    shared.factors[r] = sum == 0.f ? kNothing : inverse_sum(sum + sink_weight) * scale;
    shared.lses[r] = lse;
    if (is_whole) {
      results.write_lse(row, lse);
    }
    raise_largest(p, work.rows, r, most * p.softmax_scale);
  }

  template <class Sums>
  CUTE_DEVICE void store(Sums (&output)[Traits::kPartsV]) const {
    auto const& [p, work, at] = results;
    bool const is_whole = work.location.part.parts == 1;
    if (at.warp >= Parts::kWarps) {
      return;
    }
    KeyPart const& part = work.location.part;
    Parts const parts{p, at};
    int const slot = is_whole ? 0 : part.slot_of(part.index);
    CUTE_UNROLL
    for (int i = 0; i < kEights; ++i) {
      float2 const factors = *reinterpret_cast<float2 const*>(&shared.factors[at.row_of(2 * i)]);
      CUTE_UNROLL
      for (int v = 0; v < Traits::kPartsV; ++v) {
        float4 const four = scaled(make_float4(output[v](4 * i), output[v](4 * i + 1),
                                               output[v](4 * i + 2), output[v](4 * i + 3)),
                                   factors);
        if (is_whole) {
          results.write(four, i, v);
        } else {
          parts.fours(slot)[Parts::four_of(i, v)] = four;
        }
      }
    }
    for (int r = at.lane; !is_whole && r < kRows; r += 32) {
      parts.lses(p.part_lses, slot)[r] = shared.lses[r];
    }
  }

 private:
  // O of a row without a visible key is 0, even if V holds NaN.
  CUTE_DEVICE static float4 scaled(float4 const& o, float2 const& factors) {
    return make_float4(factors.x == kNothing ? 0.f : o.x * factors.x,
                       factors.y == kNothing ? 0.f : o.y * factors.y,
                       factors.x == kNothing ? 0.f : o.z * factors.x,
                       factors.y == kNothing ? 0.f : o.w * factors.y);
  }
};

}  // namespace fa3
