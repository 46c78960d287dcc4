// Which keys a query sees, and which queries see a key. Masks are aligned bottom-right: query i of
// seqlen_q has key i + seqlen_k - seqlen_q as its own.
//
// A mask is a type with two functions: keys(position, len) and queries(key, len). Each gives an
// interval; neither of its ends moves up when position or key goes down. It may be empty, and then
// lie outside the sequence.
#pragma once

#include <type_traits>

#include "core/int_math.h"
#include "core/kernel_kind.h"

namespace fa3 {

struct SeqlenPair {
  int q;
  int k;
};

struct Interval {
  int begin;
  int end;
};

// Every query sees every key.
struct FullMask {
  FA3_HD constexpr Interval keys(int, SeqlenPair len) const { return Interval{0, len.k}; }

  FA3_HD constexpr Interval queries(int, SeqlenPair len) const { return Interval{0, len.q}; }
};

// A query sees its own key and those before it.
struct CausalMask {
  FA3_HD constexpr Interval keys(int position, SeqlenPair len) const {
    return Interval{0, min_of(len.k, position + 1 + len.k - len.q)};
  }

  FA3_HD constexpr Interval queries(int key, SeqlenPair len) const {
    return Interval{max_of(0, key + len.q - len.k), len.q};
  }
};

// A window around a query's own key, and chunks of keys, which start at key 0: a query sees only
// keys in the chunk of its own key. The other masks are special cases of this one.
struct IntervalMask {
  static constexpr int kNoLimit = (1 << 30) - 1;  // lengths are at most 2^30

  int left = kNoLimit;   // keys before its own that a query sees
  int right = kNoLimit;  // keys after its own
  bool is_chunked = false;
  FastDiv chunk;

  FA3_HD constexpr Interval keys(int position, SeqlenPair len) const {
    int const own = min_of(position, len.q - 1) + len.k - len.q;
    Interval seen{max_of(0, own - left), min_of(len.k, own + right + 1)};
    if (is_chunked) {
      Interval const in_chunk = chunk_of(own);
      seen = Interval{max_of(seen.begin, in_chunk.begin), min_of(seen.end, in_chunk.end)};
    }
    return seen;
  }

  FA3_HD constexpr Interval queries(int key, SeqlenPair len) const {
    int64_t const first_own = int64_t(len.k) - len.q;
    int64_t begin = int64_t(key) - right;
    int64_t end = int64_t(key) + left + 1;
    if (is_chunked) {
      Interval const in_chunk = chunk_of(key);
      begin = begin > in_chunk.begin ? begin : in_chunk.begin;
      end = end < in_chunk.end ? end : in_chunk.end;
    }
    begin -= first_own;
    end -= first_own;
    return Interval{begin > 0 ? int(begin) : 0, end < len.q ? int(end) : len.q};
  }

 private:
  // No key lies in a chunk before key 0.
  FA3_HD constexpr Interval chunk_of(int key) const {
    if (key < 0) {
      return Interval{0, 0};
    }
    int const begin = key - chunk.mod(key);
    int const size = int(chunk.divisor);
    return Interval{begin, begin > kNoLimit - size ? kNoLimit + 1 : begin + size};
  }
};

// The mask of a kernel. Full and causal masks hold nothing; an interval mask is read at run time.
template <MaskKind kKind>
FA3_HD constexpr auto mask_of(IntervalMask const& mask) {
  if constexpr (kKind == MaskKind::kInterval) {
    return mask;
  } else {
    return std::conditional_t<kKind == MaskKind::kFull, FullMask, CausalMask>{};
  }
}

}  // namespace fa3
