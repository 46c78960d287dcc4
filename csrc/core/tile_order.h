// The order in which CTAs begin tiles: the tile of each number. In the forward a CTA draws numbers
// (forward/work.h); in the backward a tile is one of keys (backward/work.h).
//
// Full attention: all tiles cost the same. The order is m, head, batch, so that the CTAs that run
// read the K and V of few heads.
//
// Causal: the cost of a tile grows with m. (head, batch) pairs form sections; inside a section the
// longest tiles come first, over all its heads. The short tiles of the last section balance its
// long ones; those of the others are followed by the next section.
//
// A window: the same order, because the first tiles cost less than a window.
#pragma once

#include "core/int_math.h"

namespace fa3 {

struct TileCoord {
  int m;
  int head;
  int batch;
};

struct TileOrder {
  bool longest_first = false;
  int m_tiles = 0;
  int pairs = 0;          // (head, batch)
  int section_pairs = 1;  // in every section but the last
  int sections = 0;
  FastDiv by_m_tiles;
  FastDiv by_section_tiles;
  FastDiv by_heads;
  FastDiv by_section_pairs;
  FastDiv by_last_section_pairs;

  TileOrder() = default;

  // least_last_pairs: the fewest pairs of the last section.
  TileOrder(bool causal, int m_tiles_, int heads, int batch, int section_pairs_,
            int least_last_pairs)
      : longest_first(causal),
        m_tiles(m_tiles_),
        pairs(heads * batch),
        section_pairs(causal ? clamp(section_pairs_, 1, max_of(1, pairs)) : max_of(1, pairs)),
        sections(m_tiles > 0 && pairs > 0 ? 1 + max_of(0, pairs - least_last_pairs) / section_pairs
                                          : 0),
        by_m_tiles(max_of(1, m_tiles)),
        by_section_tiles(max_of(1, m_tiles * section_pairs)),
        by_heads(max_of(1, heads)),
        by_section_pairs(section_pairs),
        by_last_section_pairs(max_of(1, pairs - (sections - 1) * section_pairs)) {}

  // The tile of a number, 0 <= number < m_tiles * pairs.
  FA3_HD TileCoord coord(int number) const {
    int pair;
    int m;
    if (longest_first) {
      int const section = min_of(by_section_tiles.div(number), sections - 1);
      int const position = number - section * int(by_section_tiles.divisor);
      FastDiv const& by_pairs = section == sections - 1 ? by_last_section_pairs : by_section_pairs;
      int const m_from_end = by_pairs.div(position);
      m = m_tiles - 1 - m_from_end;
      pair = section * section_pairs + position - m_from_end * int(by_pairs.divisor);
    } else {
      pair = by_m_tiles.div(number);
      m = number - pair * m_tiles;
    }
    int const batch = by_heads.div(pair);
    return TileCoord{m, pair - batch * int(by_heads.divisor), batch};
  }
};

// The order of tiles with lists (core/key_list.h): m is the rank of the tile among those of its
// pair, the longest first. `order`, which is longest_first, gives all pairs of a section their
// tiles of one rank before those of the next. Where the first `outliers` of a pair are far longer
// than the others, those of all pairs come first, then the others of one pair after the other: a
// window of 1024 keys and 128 sinks, 32k, backward 440 TFLOP/s instead of 282 (H200, 2026-11-28).
FA3_HD TileCoord listed_tile(TileOrder const& order, int outliers, int number) {
  if (outliers == 0) {
    TileCoord tile = order.coord(number);
    tile.m = order.m_tiles - 1 - tile.m;
    return tile;
  }
  int const after = number - outliers * order.pairs;
  int const others = order.m_tiles - outliers;
  int const pair = after < 0 ? number % order.pairs : after / others;
  int const m = after < 0 ? number / order.pairs : outliers + after % others;
  int const batch = order.by_heads.div(pair);
  return TileCoord{m, pair - batch * int(order.by_heads.divisor), batch};
}

}  // namespace fa3
