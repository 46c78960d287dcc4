// Counts the (query, key) pairs that a mask lets through, without visiting every query.
#pragma once

#include "core/mask_limits.h"

namespace fa3 {

// The sum of clamp(first + i, 0, most) over 0 <= i < count.
constexpr double sum_of_ramp(int64_t first, int64_t count, int64_t most) {
  auto const sum_to = [](double n) { return n * (n + 1) / 2; };
  auto const up_to = [&](int64_t last) {  // sums over 0 <= i with first + i <= last
    double const rising = double(last < most ? (last < 0 ? 0 : last) : most);
    return sum_to(rising) + double(last > most ? last - most : 0) * double(most);
  };
  return up_to(first + count - 1) - up_to(first - 1);
}

// A window without chunks: of the keys up to its right end, those before its left end are masked.
constexpr double count_in_window(int64_t seqlen_q, int64_t seqlen_k, IntervalMask const& mask) {
  int64_t const own = seqlen_k - seqlen_q;  // the key at the diagonal of query 0
  return sum_of_ramp(own + mask.right + 1, seqlen_q, seqlen_k) -
         sum_of_ramp(own - mask.left, seqlen_q, seqlen_k);
}

// Each chunk is a problem of its own, for the queries whose own key is in it. All chunks between
// the first and the last one are alike.
constexpr double count_in_chunks(int64_t seqlen_q, int64_t seqlen_k, IntervalMask const& mask) {
  int64_t const size = mask.chunk.divisor;
  int64_t const first_own = seqlen_k > seqlen_q ? seqlen_k - seqlen_q : 0;
  auto const count_chunk = [&](int64_t chunk) {
    int64_t const begin = chunk * size;
    int64_t const end = begin + size < seqlen_k ? begin + size : seqlen_k;
    return count_in_window(end - (first_own > begin ? first_own : begin), end - begin, mask);
  };
  int64_t const first = first_own / size;
  int64_t const last = (seqlen_k - 1) / size;
  double const ends = count_chunk(first) + (last > first ? count_chunk(last) : 0);
  return last > first + 1 ? ends + double(last - first - 1) * count_chunk(first + 1) : ends;
}

constexpr double count_visible(SeqlenPair len, IntervalMask const& mask) {
  if (len.q == 0 || len.k == 0) {
    return 0;
  }
  return mask.is_chunked ? count_in_chunks(len.q, len.k, mask)
                         : count_in_window(len.q, len.k, mask);
}

}  // namespace fa3
