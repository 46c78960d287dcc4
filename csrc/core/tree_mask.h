// A mask of bits over the last tokens of a sequence, for trees of speculative tokens: query i has a
// row of kTreeColumns bits, of which bit j says whether it sees key seqlen_k - seqlen_q + j. All
// keys before these are visible.
#pragma once

#include <cstdint>

#include "core/int_math.h"

namespace fa3 {

constexpr int kTreeColumns = 128;
constexpr int kTreeWords = kTreeColumns / 32;

struct TreeBits {
  uint64_t low;
  uint64_t high;

  FA3_HD bool test(int column) const {
    return ((column < 64 ? low : high) >> (column % 64) & 1) != 0;
  }

  // The bits from a column on: those before column 0 are set, those after the last one are not.
  FA3_HD TreeBits from(int first) const {
    if (first >= 0) {
      return TreeBits{shifted_down(low, high, first), shifted_down(high, 0, first)};
    }
    // Hidden keys enter as zeros.
    return TreeBits{~shifted_up(~low, 0, -first), ~shifted_up(~high, ~low, -first)};
  }

 private:
  // x >> count, into which the bits of `above` move.
  FA3_HD static uint64_t shifted_down(uint64_t x, uint64_t above, int count) {
    if (count >= 64) {
      return count >= 128 ? 0 : above >> (count - 64);
    }
    return count == 0 ? x : x >> count | above << (64 - count);
  }

  // x << count, into which the bits of `below` move.
  FA3_HD static uint64_t shifted_up(uint64_t x, uint64_t below, int count) {
    if (count >= 64) {
      return count >= 128 ? 0 : below << (count - 64);
    }
    return count == 0 ? x : x << count | below >> (64 - count);
  }
};

}  // namespace fa3
