// The tiles of queries that a tile of keys meets in the backward pass. The loop runs upwards: the
// queries of tiles [free_begin, free_end) see every key of the tile; the others of [begin, end)
// need the mask.
#pragma once

#include "core/mask_limits.h"

namespace fa3 {

struct QueryRange {
  int begin;
  int free_begin;  // may be after free_end: then no tile is free
  int free_end;
  int end;

  FA3_HD constexpr bool is_masked(int m) const { return m < free_begin || m >= free_end; }
};

// Keys [key_begin, key_begin + tile_n) against tiles of tile_m queries. A tile of keys that extends
// past the end of the sequence is masked throughout: a key of padding has score 0, and 2^(0 - LSE)
// may be infinite. Queries past the end need no mask: their LSE makes P zero. Where no query sees a
// key, end is begin or less.
template <class Mask>
FA3_HD constexpr QueryRange query_range(int key_begin, SeqlenPair len, int tile_m, int tile_n,
                                        Mask const& mask) {
  int const key_end = key_begin + tile_n;
  Interval const first = mask.queries(key_begin, len);
  Interval const last = mask.queries(min_of(key_end, len.k) - 1, len);
  int const end = ceil_div(max_of(0, last.end), tile_m);
  int const seen_by_all = first.end == len.q ? ceil_div(len.q, tile_m) : first.end / tile_m;
  QueryRange range{first.begin / tile_m, ceil_div(last.begin, tile_m), seen_by_all, end};
  if (key_end > len.k) {
    range.free_begin = range.end;
  }
  return range;
}

}  // namespace fa3
