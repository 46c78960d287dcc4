// Combination of partial results. Each part of the keys has an output and a log-sum-exp (LSE,
// natural logarithm), and the whole output is the sum of the parts' outputs times weight(lse) *
// inverse(). A part with an LSE of -inf has no keys, and its output must not be read. Adding the
// parts in a fixed order gives the same bits on every call.
#pragma once

#include "core/softmax_math.h"
#include "device/math.h"

namespace fa3 {

struct PartWeights {
  float maximum = -INFINITY;  // the largest LSE
  float sum = 0.f;            // sum of weight(lse)

  // The weight of an LSE: 0 for -inf; NaN stays NaN.
  CUTE_DEVICE float weight(float lse) const {
    return exp2_approx((lse - finite_max(maximum)) * kLog2E);
  }

  // The LSE of all parts; -inf without keys.
  CUTE_DEVICE float lse() const {
    return sum == 0.f ? -INFINITY : maximum + log2_approx(sum) * kLn2;
  }

  // The inverse of the sum, or 0 without keys. A Newton step makes it exact for a single part, so
  // that its output keeps its bits.
  CUTE_DEVICE float inverse() const {
    float const inverse = reciprocal_approx(sum);
    return sum == 0.f ? 0.f : fmaf(inverse, fmaf(-sum, inverse, 1.f), inverse);
  }

  // Reduces the LSEs of all parts over a warp; whole warps call this. lse_of(part): the LSE of a
  // part.
  template <class LseOf>
  static CUTE_DEVICE PartWeights reduce(int parts, LseOf const& lse_of) {
    PartWeights found;
    int const lane = lane_of_warp();
    for (int part = lane; part < parts; part += 32) {
      found.maximum = fmaxf(found.maximum, lse_of(part));
    }
    CUTE_UNROLL
    for (int distance = 16; distance > 0; distance /= 2) {
      found.maximum = fmaxf(found.maximum, __shfl_xor_sync(0xffffffffu, found.maximum, distance));
    }
    for (int part = lane; part < parts; part += 32) {
      found.sum += found.weight(lse_of(part));
    }
    found.sum = sum_over_lanes<32>(found.sum);
    return found;
  }
};

}  // namespace fa3
