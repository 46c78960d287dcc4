// The K tiles that a tile of queries visits, and their order.
#pragma once

#include "core/mask_limits.h"

namespace fa3 {

// The K tiles that one warpgroup of a tile skips, because none of its rows sees their keys. `first`
// counts those at the end of the range, which are visited first, `last` those at its beginning.
struct SkippedTiles {
  int first;
  int last;
};

// An interval of K tiles, visited from the last one down to the first. Every query of the tile sees
// all keys of [free_begin, free_end); the other K tiles need the mask.
//
// Producers and consumers visit K tiles by these functions alone, so a list of K tiles can take the
// place of the interval: visits have numbers that fall by one from first() to last(), and tile(n)
// is the K tile of visit n. All members are such numbers.
struct BlockRange {
  int begin;
  int free_begin;  // may be after free_end: then no tile is free
  int free_end;
  int end;

  FA3_HD constexpr int count() const { return end - begin; }
  FA3_HD constexpr int first() const { return end - 1; }
  FA3_HD constexpr int last() const { return begin; }

  // WHY static, and two forms of n - 1: otherwise nvcc (13.0) compiles the producers differently.
  FA3_HD static constexpr int tile(int n) { return n; }
  FA3_HD static constexpr int next(int n) { return n - 1; }
  FA3_HD static constexpr void advance(int& n) { --n; }

  // A copy for those who do not mask. WHY: a copy of all members is loaded as a whole.
  FA3_HD constexpr BlockRange visits() const { return BlockRange{begin, 0, 0, end}; }

  // Without the K tiles that a warpgroup skips.
  FA3_HD constexpr void narrow(SkippedTiles const& skipped) {
    begin += skipped.last;
    end -= skipped.first;
  }

  // The visits of a range that has been narrowed, and their number.
  FA3_HD constexpr BlockRange visits_with(SkippedTiles const& skipped) const {
    return BlockRange{begin - skipped.last, 0, 0, end + skipped.first};
  }
  FA3_HD constexpr int count_with(SkippedTiles const& skipped) const {
    return end + skipped.first - (begin - skipped.last);
  }
};

// Queries [position_begin, position_end) against K tiles of tile_n keys; the range must hold at
// least one query. Where no query sees a key, end is begin or less. first_slot: where key 0 lies,
// counted from the begin of K tile 0.
template <class Mask>
FA3_HD constexpr BlockRange block_range(int position_begin, int position_end, SeqlenPair len,
                                        int tile_n, Mask const& mask, int first_slot = 0) {
  Interval const first = mask.keys(position_begin, len);
  Interval const last = mask.keys(min_of(position_end, len.q) - 1, len);
  return BlockRange{(first_slot + first.begin) / tile_n, ceil_div(first_slot + last.begin, tile_n),
                    (first_slot + max_of(0, first.end)) / tile_n,
                    ceil_div(first_slot + max_of(0, last.end), tile_n)};
}

// A part of a range: the K tiles [begin, end), visited from the last to the first. Parts follow one
// another from the first key on, and end at multiples of `size` K tiles, counted from key 0.
struct KeyTilePart {
  int begin;
  int end;

  FA3_HD static constexpr KeyTilePart first(BlockRange const& all, int size) {
    return KeyTilePart{all.begin, min_of((all.begin / size + 1) * size, all.end)};
  }

  FA3_HD constexpr KeyTilePart next(BlockRange const& all, int size) const {
    return KeyTilePart{end, min_of(end + size, all.end)};
  }
};

// own: the range of the warpgroup; most: the limit at either end. A warpgroup whose rows see no key
// at all skips none: it computes one masked K tile.
FA3_HD constexpr SkippedTiles skipped_tiles(BlockRange const& all, BlockRange const& own,
                                            int most) {
  if (own.begin >= own.end) {
    return SkippedTiles{0, 0};
  }
  return SkippedTiles{min_of(all.end - own.end, most), min_of(own.begin - all.begin, most)};
}

// The most K tiles that a warpgroup may skip at either end without a deadlock, with rings of
// `stages` K tiles; raw_stages: those of a second ring, which V passes first. From one tile of
// queries to the next a warpgroup skips up to twice as many, n, and waits for the K tile after them
// while it still holds V of the K tile before, j. The producer gets there if the rings have
// capacity for V of all K tiles up to j + n - 1 in addition to that of j. The other warpgroups must
// have finished the K tile `stages` before; for that they must not need V of j + stages, which
// would go into the buffer of j.
FA3_HD constexpr int most_skipped_tiles(int stages, int raw_stages) {
  int const of_two_tiles = raw_stages > 0 ? min_of(stages + raw_stages, 2 * stages - 1) : stages;
  return of_two_tiles / 2;
}

}  // namespace fa3
