// Which tiles a CTA of the persistent grid works on, in which order. Pure arithmetic on the CTA's
// index: no counter has to be zeroed, and every launch is the same.
//
// Full attention: all tiles cost the same; they are dealt in the order m, head, batch, so that the
// CTAs of one round read the K and V of few heads.
//
// Causal: the cost of a tile grows with m. (head, batch) pairs form sections whose K and V fit in
// L2 together; inside a section the longest tiles come first, over all its heads. A section is
// dealt in rounds of one tile per CTA, in snake order (left to right, then right to left), which
// evens out what a CTA gets over two rounds: in one section no two CTAs differ by more than its
// longest tile. The next section starts with the CTAs that the last round of this one left out.
//
// A window: the same, for the sake of the first tiles, which cost less than a window. They fill the
// last round.
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
  int section_pairs = 1;  // of every section but the last, which may have fewer
  int sections = 0;
  FastDiv by_m_tiles;
  FastDiv by_heads;
  FastDiv by_section_pairs;
  FastDiv by_last_section_pairs;

  TileOrder() = default;

  TileOrder(bool causal, int m_tiles_, int heads, int batch, int section_pairs_)
      : longest_first(causal),
        m_tiles(m_tiles_),
        pairs(heads * batch),
        section_pairs(causal ? clamp(section_pairs_, 1, max_of(1, pairs)) : max_of(1, pairs)),
        sections(m_tiles > 0 ? ceil_div(pairs, section_pairs) : 0),
        by_m_tiles(max_of(1, m_tiles)),
        by_heads(max_of(1, heads)),
        by_section_pairs(section_pairs),
        by_last_section_pairs(max_of(1, pairs - (sections - 1) * section_pairs)) {}

  FA3_HD int tiles_of(int section) const {
    return m_tiles * min_of(section_pairs, pairs - section * section_pairs);
  }

  // The tile at a position of a section's order of work.
  FA3_HD TileCoord coord(int section, int position) const {
    int pair;
    int m;
    if (longest_first) {
      FastDiv const& by_pairs = section == sections - 1 ? by_last_section_pairs : by_section_pairs;
      int const m_from_end = by_pairs.div(position);
      m = m_tiles - 1 - m_from_end;
      pair = section * section_pairs + position - m_from_end * int(by_pairs.divisor);
    } else {
      pair = by_m_tiles.div(position);
      m = position - pair * m_tiles;
    }
    int const batch = by_heads.div(pair);
    return TileCoord{m, pair - batch * int(by_heads.divisor), batch};
  }
};

// The tiles of one CTA: coord() is the one at hand as long as the walk is valid, next() goes on.
struct TileWalk {
  TileOrder const& order;
  int ctas;
  int seat;  // of this CTA in the rounds of the section
  int section;
  int round;
  int position;

  FA3_HD TileWalk(TileOrder const& order_, int cta, int ctas_)
      : order(order_), ctas(ctas_), seat(cta), section(0), round(0), position(cta) {
    if (order.sections > 0 && position >= order.tiles_of(0)) {
      next_section();
    }
  }

  FA3_HD bool valid() const { return section < order.sections; }

  FA3_HD TileCoord coord() const { return order.coord(section, position); }

  FA3_HD void next() {
    ++round;
    position = round * ctas + (is_backwards() ? ctas - 1 - seat : seat);
    if (position >= order.tiles_of(section)) {
      next_section();
    }
  }

 private:
  FA3_HD bool is_backwards() const { return order.longest_first && (round & 1); }

  // A partial last round that ran forwards was taken by the first seats, which now become the last
  // ones.
  FA3_HD void next_section() {
    do {
      int const tiles = order.tiles_of(section);
      int const full_rounds = tiles / ctas;
      int const left_over = tiles - full_rounds * ctas;
      if ((full_rounds & 1) == 0) {
        seat = seat < left_over ? seat + ctas - left_over : seat - left_over;
      }
      ++section;
      round = 0;
      position = seat;
    } while (section < order.sections && position >= order.tiles_of(section));
  }
};

}  // namespace fa3
