// Integer helpers, exact for negative numerators too, and division by a number known only at
// launch.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace fa3 {

FA3_HD constexpr int min_of(int a, int b) { return a < b ? a : b; }
FA3_HD constexpr int max_of(int a, int b) { return a > b ? a : b; }
FA3_HD constexpr int clamp(int x, int low, int high) { return max_of(low, min_of(x, high)); }

// Rounds towards plus infinity; b > 0.
FA3_HD constexpr int ceil_div(int a, int b) { return a / b + (a % b > 0 ? 1 : 0); }

FA3_HD constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

// The largest divisor of n that is less than `end`; 1 < end, n > 0.
constexpr int largest_divisor_below(int n, int end) {
  int d = end - 1;
  while (n % d != 0) {
    --d;
  }
  return d;
}

// Division of 0 <= n < 2^31 by a divisor 1 <= d < 2^31, as one multiplication and a shift.
// With s = ceil(log2 d) and multiplier = ceil(2^(31+s) / d) the quotient is exact for every such n
// (Granlund & Montgomery 1994, theorem 4.2 with N = 31: the multiplier fits in 32 bits).
struct FastDiv {
  uint32_t divisor = 1;
  uint32_t multiplier = 1u << 31;
  uint32_t shift = 0;

  FastDiv() = default;

  explicit FastDiv(int d) : divisor(uint32_t(d)), multiplier(0), shift(0) {
    while ((uint64_t(1) << shift) < divisor) {
      ++shift;
    }
    multiplier = uint32_t(((uint64_t(1) << (31 + shift)) + divisor - 1) / divisor);
  }

  FA3_HD constexpr int div(int n) const {
    return int((uint64_t(uint32_t(n)) * multiplier) >> (31 + shift));
  }

  FA3_HD constexpr int mod(int n) const { return n - div(n) * int(divisor); }
};

}  // namespace fa3
