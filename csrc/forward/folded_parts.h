// OutputKind::kFolded: the keys of a tile in parts, which begin at multiples of split_size. A part
// begins with an O of zero and no maximum, and is folded into the total of the parts before it: O,
// maximum and sum in fp32, not divided. A row's bits then depend on its own keys alone, however
// many CTAs compute its parts (cache/combine_parts.h folds those in the same order).
//
// The total of a tile lies in global memory, which L2 holds. Each thread reads what it has written
// itself.
#pragma once

#include "core/softmax_math.h"
#include "device/fragments.h"
#include "forward/results.h"

namespace fa3 {

// The factors of a total and of the next part, and the maximum of both.
struct FoldFactors {
  float most;
  float total;
  float part;

  CUTE_DEVICE static FoldFactors of(float total_max, float part_max, float scale_log2) {
    float const most = fmaxf(total_max, part_max);
    float const used = finite_max(most);
    return FoldFactors{most, exp2_approx((total_max - used) * scale_log2),
                       exp2_approx((part_max - used) * scale_log2)};
  }

  CUTE_DEVICE float fold(float total_value, float part_value) const {
    return __fmaf_rn(part_value, part, __fmul_rn(total_value, total));
  }
};

// The total of a warpgroup's rows, of the parts so far: O of a thread, then maxima and sums of its
// two rows.
template <class Traits>
struct PartTotal {
  static constexpr int kFours = Traits::kHeadDimV / 8;  // float4s of O that a thread has
  static constexpr int kAtOnce = Traits::kWarpgroups == 3 || kFours > 16 ? 4 : 8;

  float4* fours;

  CUTE_DEVICE PartTotal(FoldDeviceParams const& p, int warpgroup, int thread)
      : fours(p.totals +
              (int(blockIdx.x) * Traits::kWarpgroups + warpgroup) *
                  ((kFours + 1) * kWarpgroupThreads) +
              thread) {}

  struct Ahead {
    float4 rows;
    float4 fours[kAtOnce];
  };

  CUTE_DEVICE Ahead load_ahead() const {
    Ahead ahead;
    ahead.rows = __ldcg(fours + kFours * kWarpgroupThreads);
    CUTE_UNROLL
    for (int j = 0; j < kAtOnce; ++j) {
      ahead.fours[j] = __ldcg(fours + j * kWarpgroupThreads);
    }
    return ahead;
  }

  // Folds a part into the total, which replaces it in registers.
  template <class Fragment>
  CUTE_DEVICE void add_to(Ahead ahead, float (&row_max)[2], float (&row_sum)[2], float scale_log2,
                          Fragment& acc) const {
    float4 const rows = ahead.rows;
    FoldFactors const first = FoldFactors::of(rows.x, row_max[0], scale_log2);
    FoldFactors const second = FoldFactors::of(rows.y, row_max[1], scale_log2);
    row_max[0] = first.most;
    row_max[1] = second.most;
    row_sum[0] = first.fold(rows.z, row_sum[0]);
    row_sum[1] = second.fold(rows.w, row_sum[1]);
    CUTE_UNROLL
    for (int n = 0; n < kFours; ++n) {
      float4 const loaded = ahead.fours[n % kAtOnce];
      if (n + kAtOnce < kFours) {
        ahead.fours[n % kAtOnce] = __ldcg(fours + (n + kAtOnce) * kWarpgroupThreads);
      }
      int const i = 4 * n;  // two values of row 0, then two of row 1
      acc(i) = first.fold(loaded.x, acc(i));
      acc(i + 1) = first.fold(loaded.y, acc(i + 1));
      acc(i + 2) = second.fold(loaded.z, acc(i + 2));
      acc(i + 3) = second.fold(loaded.w, acc(i + 3));
    }
  }

  template <class Fragment>
  CUTE_DEVICE void store(float const (&row_max)[2], float const (&row_sum)[2],
                         Fragment const& acc) const {
    CUTE_UNROLL
    for (int i = 0; i < kFours; ++i) {
      __stcg(fours + i * kWarpgroupThreads,
             make_float4(acc(4 * i), acc(4 * i + 1), acc(4 * i + 2), acc(4 * i + 3)));
    }
    __stcg(fours + kFours * kWarpgroupThreads,
           make_float4(row_max[0], row_max[1], row_sum[0], row_sum[1]));
  }
};

}  // namespace fa3
