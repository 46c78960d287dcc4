// Which tiles a CTA of the persistent grid works on, in which order. Pure arithmetic on the CTA's
// index: no counter has to be zeroed, and every launch is the same.
//
// Full attention: all tiles cost the same; they are assigned in the order m, head, batch, so that
// the CTAs of one wave read the K and V of few heads.
//
// Causal: the cost of a tile grows with m. (head, batch) pairs form sections whose K and V fit in
// L2 together; inside a section the longest tiles come first, over all its heads. A section is
// assigned in waves of one tile per CTA, in snake order (left to right, then right to left), which
// balances the load over two waves: in one section no two CTAs differ by more than its longest
// tile. The next section starts with the CTAs that had no tile in the last wave.
//
// A window: the same order, because the first tiles cost less than a window. They fill the last
// wave.
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
  FastDiv by_heads;
  FastDiv by_section_pairs;
  FastDiv by_last_section_pairs;

  TileOrder() = default;

  // least_last_pairs: the last section has at least so many.
  TileOrder(bool causal, int m_tiles_, int heads, int batch, int section_pairs_,
            int least_last_pairs = 1)
      : longest_first(causal),
        m_tiles(m_tiles_),
        pairs(heads * batch),
        section_pairs(causal ? clamp(section_pairs_, 1, max_of(1, pairs)) : max_of(1, pairs)),
        sections(m_tiles > 0 && pairs > 0 ? 1 + max_of(0, pairs - least_last_pairs) / section_pairs
                                          : 0),
        by_m_tiles(max_of(1, m_tiles)),
        by_heads(max_of(1, heads)),
        by_section_pairs(section_pairs),
        by_last_section_pairs(max_of(1, pairs - (sections - 1) * section_pairs)) {}

  FA3_HD int tiles_of(int section) const {
    return m_tiles * (section < sections - 1 ? section_pairs : pairs - section * section_pairs);
  }

  // The tile at a position in the order of a section.
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

// The tiles of one CTA: coord() is the current one while the walk is valid(), next() advances.
struct TileWalk {
  TileOrder const& order;
  int ctas;
  int wave_index;  // this CTA's, in the waves of the section
  int section;
  int wave;
  int position;

  FA3_HD TileWalk(TileOrder const& order_, int cta, int ctas_)
      : order(order_), ctas(ctas_), wave_index(cta), section(0), wave(0), position(cta) {
    if (order.sections > 0 && position >= order.tiles_of(0)) {
      next_section();
    }
  }

  FA3_HD bool valid() const { return section < order.sections; }

  FA3_HD TileCoord coord() const { return order.coord(section, position); }

  FA3_HD void next() {
    ++wave;
    position = wave * ctas + (is_backwards() ? ctas - 1 - wave_index : wave_index);
    if (position >= order.tiles_of(section)) {
      next_section();
    }
  }

 private:
  FA3_HD bool is_backwards() const { return order.longest_first && (wave & 1); }

  // A partial last wave that ran forwards used the first indices, which now become the last ones.
  FA3_HD void next_section() {
    do {
      int const tiles = order.tiles_of(section);
      int const full_waves = tiles / ctas;
      int const remaining = tiles - full_waves * ctas;
      if ((full_waves & 1) == 0) {
        wave_index =
            wave_index < remaining ? wave_index + ctas - remaining : wave_index - remaining;
      }
      ++section;
      wave = 0;
      position = wave_index;
    } while (section < order.sections && position >= order.tiles_of(section));
  }
};

}  // namespace fa3
