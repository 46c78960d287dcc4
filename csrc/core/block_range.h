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

// K tiles of a range that a part of its queries does not see: those visited first, at its end, and
// those visited last.
struct HiddenTiles {
  int first;
  int last;
};

// own: of that part; most: counted at either end. If they see no key at all, none: it takes one
// K tile to find that out.
FA3_HD constexpr HiddenTiles hidden_tiles(BlockRange const& all, BlockRange const& own, int most) {
  if (own.begin >= own.end) {
    return HiddenTiles{0, 0};
  }
  return HiddenTiles{min_of(all.end - own.end, most), min_of(own.begin - all.begin, most)};
}

// How many a warpgroup may leave out at either end, with rings of so many K tiles; raw_stages: of
// V on its way to its ring, if it has two. From one tile of queries to the next it leaves out twice
// as many, n, and waits for the K tile behind them while it holds V of the one before, j. The
// producer gets there if V of all up to j + n - 1 finds room beside that of j. And the others have
// to be through with the K tile `stages` before it: they must not need V of j + stages for that,
// which comes where that of j lies.
FA3_HD constexpr int most_hidden_tiles(int stages, int raw_stages) {
  int const of_two_tiles = raw_stages > 0 ? min_of(stages + raw_stages, 2 * stages - 1) : stages;
  return of_two_tiles / 2;
}

}  // namespace fa3
