// The K tiles that a tile of queries visits. The loop runs from the last tile down to the first:
// tiles [free_begin, free_end) are wholly visible to every query of the tile, the others of
// [begin, end) need the mask.
#pragma once

#include "core/mask_limits.h"

namespace fa3 {

struct BlockRange {
  int begin;
  int free_begin;  // may lie behind free_end: then no tile is free
  int free_end;
  int end;
};

// Queries [position_begin, position_end) against K tiles of tile_n keys; the range must hold at
// least one query. Where no query sees a key, end is begin or less.
template <class Mask>
FA3_HD constexpr BlockRange block_range(int position_begin, int position_end, SeqlenPair len,
                                        int tile_n, Mask const& mask) {
  Interval const first = mask.keys(position_begin, len);
  Interval const last = mask.keys(min_of(position_end, len.q) - 1, len);
  return BlockRange{first.begin / tile_n, ceil_div(last.begin, tile_n),
                    max_of(0, first.end) / tile_n, ceil_div(max_of(0, last.end), tile_n)};
}

}  // namespace fa3
