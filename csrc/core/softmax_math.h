// The scalar form of the online softmax: the state of a row, in base 2 with the scale folded in.
// The kernels apply it to fragments; the host tests compare it with a two-pass softmax.
#pragma once

#include <cmath>

#include "core/host_device.h"

namespace fa3 {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// The maximum to subtract. A row that has seen no key yet has -inf, and -inf - -inf would be NaN.
FA3_HD float finite_max(float row_max) { return row_max == -INFINITY ? 0.f : row_max; }

// Natural-log LSE of a row: maximum of the raw scores, sum of exp2((score - max) * scale_log2).
// A row without a visible key has sum 0 and gives -inf; NaN stays NaN.
FA3_HD float log_sum_exp(float row_max, float row_sum, float softmax_scale) {
  return row_sum == 0.f ? -INFINITY : row_max * softmax_scale + std::log(row_sum);
}

// The LSE of a row with one more score; -inf: no such score.
FA3_HD float with_sink(float lse, float sink) {
  if (sink == -INFINITY) {
    return lse;
  }
  float const larger = lse > sink ? lse : sink;
  float const distance = lse > sink ? lse - sink : sink - lse;
  return larger + std::log(1.f + std::exp(-distance));
}

// The factor of the output row at the end: 0 for a row without a visible key, NaN for a NaN row.
FA3_HD float inverse_sum(float row_sum) { return row_sum == 0.f ? 0.f : 1.f / row_sum; }

}  // namespace fa3
