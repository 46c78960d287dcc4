// The K tiles that a tile of queries visits. The loop runs from the last tile down to the first:
// tiles [free_end, end) need the mask, tiles [0, free_end) are wholly visible to every query of the
// tile.
#pragma once

#include "core/mask_limits.h"

namespace fa3 {

struct BlockRange {
  int free_end;
  int end;
};

// Queries [position_begin, position_end) against K tiles of tile_n keys; the range must hold at
// least one query.
FA3_HD constexpr BlockRange block_range(int position_begin, int position_end, SeqlenPair len,
                                        int tile_n, bool causal) {
  int const seen_by_first = max_of(0, visible_end(position_begin, len, causal));
  int const seen_by_last = max_of(0, visible_end(min_of(position_end, len.q) - 1, len, causal));
  return BlockRange{seen_by_first / tile_n, ceil_div(seen_by_last, tile_n)};
}

}  // namespace fa3
