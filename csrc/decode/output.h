// The end of a tile: O of a whole tile goes from registers to its rows, O of a part to a buffer in
// fp32.
#pragma once

#include "decode/softmax.h"
#include "forward/combine_parts.h"

namespace fa3 {

template <class Traits, class Keys>
struct DecodeOutput {
  typename Traits::Params const& p;
  FwdWork<Traits> const& work;
  DecodeThread at;

  // softmax has the sums of all keys; scale: of V.
  template <class Softmax, class Sums>
  CUTE_DEVICE void store(Softmax const& softmax, Sums (&output)[Traits::kPartsV],
                         float scale) const {
    bool const is_whole = work.location.part.parts == 1;
    int64_t const first_row = is_whole ? 0 : first_row_of_part(p, work);
    CUTE_UNROLL
    for (int c = 0; c < Softmax::kColumns; ++c) {
      int const r = at.row_of(c);
      RowOfTile const row = row_of_tile(p, work.rows, r);
      if (!row.exists) {
        continue;
      }
      float const sink = sink_of(row);
      float const lse = softmax.lse(c, p.softmax_scale);
      float const of_sink =
          sink == -INFINITY
              ? 0.f
              : exp2_approx(sink * kLog2E - finite_max(softmax.most[c]) * softmax.scale_log2 +
                            Softmax::kOffsetLog2);
      bool const is_empty = softmax.sum[c] == 0.f;
      float const factor = inverse_sum(softmax.sum[c] + of_sink) * scale;
      bool const writes_lse = at.warp == 0 && at.lane < 4;
      if (is_whole) {
        ResultRow<Traits> const target = ResultRow<Traits>::of(p, work, row);
        write(output, c, factor, is_empty, [&](int column, float x) {
          if (column < target.columns) {
            target.write_one(column, x);
          }
        });
        if (writes_lse && p.lse != nullptr) {
          p.lse[index_of_row(p, work.rows, row)] = with_sink(lse, sink);
        }
      } else {
        float* const target = p.parts + (first_row + r) * Traits::kHeadDimV;
        write(output, c, factor, is_empty, [&](int column, float x) {
          if (column < Traits::kHeadDimV) {
            target[column] = x;
          }
        });
        if (writes_lse) {
          p.part_lses[first_row + r] = lse;
        }
      }
    }
  }

 private:
  CUTE_DEVICE float sink_of(RowOfTile const& row) const {
    bool const is_used = p.sinks != nullptr && work.location.has_sink();
    return is_used ? p.sinks[work.rows.head + row.head] : -INFINITY;
  }

  // The elements of O of a column c of O^T, a row of O. O of a row without a visible key is 0,
  // whatever V holds.
  template <class Sums, class Write>
  CUTE_DEVICE void write(Sums (&output)[Traits::kPartsV], int c, float factor, bool is_empty,
                         Write const& write_one) const {
    int const warpgroup = at.warp / kWarpgroupWarps;
    if (Traits::kBlocks < Traits::kConsumers && warpgroup > 0) {
      return;
    }
    int const thread = at.warp % kWarpgroupWarps * 32 + at.lane;
    CUTE_UNROLL
    for (int part = 0; part < Traits::kPartsV; ++part) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        int const column =
            part * Traits::kStageColumns + warpgroup * 64 + Keys::column_of(thread, half);
        float const x = output[part](c / 2 * 4 + half * 2 + c % 2);
        write_one(column, is_empty ? 0.f : x * factor);
      }
    }
  }
};

}  // namespace fa3
