// Splits the K tiles of output tiles into parts, so that several CTAs share the keys of one output
// tile. A part gives a partial O and LSE; the parts of an output tile are combined in the order of
// their keys.
//
// The K tiles of all output tiles form a line of units, of which each CTA takes a stretch of equal
// length. In an even split a unit is a K tile, or several of a huge problem, and the units of an
// output tile that a CTA has are one part: at most the first and the last output tile of a stretch
// are shared with other CTAs. In the other splits each unit is a part, which depends on the keys of
// its output tile alone, so that its bits do not depend on what else is in the batch.
#pragma once

#include "core/int_math.h"

namespace fa3 {

// kParts: at most `count` parts of equal numbers of K tiles. kSize: parts of `count` K tiles; the
// last one of an output tile may have fewer.
enum class SplitKind : int { kEven, kParts, kSize };

// K tiles [begin, end) of an output tile, counted from its first one.
struct KeyPart {
  int begin;
  int end;
  int index;  // counts the parts of the output tile in the order of their keys
  int parts;  // that the output tile has
  // Where the part with index 0, and that with index 1, lies in the buffers of partial results; and
  // the distance of all further ones.
  int first_slot;
  int second_slot;
  int slot_step;

  // INVARIANT: no two parts of a launch have the same slot, unless their tiles are whole.
  FA3_HD constexpr int slot_of(int part) const {
    return part == 0 ? first_slot : second_slot + (part - 1) * slot_step;
  }
};

// A line is one of several with equally many units, each with its own heads. The CTAs with the same
// index in all lines work on the same keys of different heads at about the same time, since these
// lie next to each other in memory.
struct Lane {
  int index = 0;
  int count = 1;
  int cta = 0;  // index of the CTA in its line
};

// The most units of a line. WHY: ints have room for twice as many, and the scan of a warp for sums
// that stop there (forward/cache/cache_batch.h).
constexpr int kMostUnits = 1 << 29;

// An output tile in its line. weight_log2: in an even split a K tile counts as 2^weight_log2 K
// tiles.
struct TileOfLine {
  int first;  // unit where its first K tile begins
  int k_tiles;
  int weight_log2;
  int phase = 0;  // kSize: K tiles of its first part that come before its first K tile
};

struct KeySplits {
  SplitKind kind = SplitKind::kEven;
  int count = 0;                    // kEven: a unit is 2^count K tiles of weight 1
  int per_cta = 1;                  // units of a stretch; kEven: at least those of a K tile
  int64_t most = int64_t(1) << 62;  // units of all lines that a launch has slots for

  FA3_HD constexpr bool is_even() const { return kind == SplitKind::kEven; }

  // K tiles of a part, but for the last one.
  FA3_HD constexpr int part_tiles(int k_tiles) const {
    return kind == SplitKind::kParts ? max_of(1, ceil_div(k_tiles, count)) : count;
  }

  FA3_HD constexpr int units(int k_tiles, int weight_log2 = 0, int phase = 0) const {
    return is_even() ? scaled(k_tiles, weight_log2 - count)
                     : ceil_div(phase + k_tiles, part_tiles(k_tiles));
  }

  // kSize: parts begin at multiples of `count` K tiles, counted from key 0.
  FA3_HD constexpr int phase_of(int first_k_tile) const {
    return kind == SplitKind::kSize ? first_k_tile % count : 0;
  }

  // The part that begins at a unit of the lane's CTA; empty if no K tile begins there or after. The
  // CTA's stretch ends at unit `end`; a line has `total` units.
  FA3_HD KeyPart part_at(int unit, int end, TileOfLine tile, Lane lane, int total) const {
    int const offset = unit - tile.first;
    KeyPart part;
    if (is_even()) {
      int const exponent = tile.weight_log2 - count;
      int const last = tile.first + scaled_down(tile.k_tiles - 1, exponent);
      // WHY the cases: a division takes longer than all the rest, and few tiles need one.
      int const first_cta = offset > 0 ? cta_of(tile.first) : lane.cta;
      int const last_cta = end <= last ? cta_of(last) : lane.cta;
      int const slots_of_cta = 2 * lane.count;
      part.begin = scaled(offset, -exponent);
      part.end = min_of(tile.k_tiles, scaled(end - tile.first, -exponent));
      part.index = lane.cta - first_cta;
      part.parts = last_cta - first_cta + 1;
      // A CTA has two slots: for the tile that it begins with, and for the one that it ends with.
      part.first_slot = slots_of_cta * first_cta + 2 * lane.index + 1;
      part.second_slot = part.first_slot - 1 + slots_of_cta;
      part.slot_step = slots_of_cta;
    } else {
      int const size = part_tiles(tile.k_tiles);
      part.begin = max_of(0, offset * size - tile.phase);
      part.end = min_of(tile.k_tiles, (offset + 1) * size - tile.phase);
      part.index = offset;
      part.parts = ceil_div(tile.phase + tile.k_tiles, size);
      part.first_slot = lane.index * total + tile.first;
      part.second_slot = part.first_slot + 1;
      part.slot_step = 1;
    }
    return part;
  }

  // The unit after a part that begins at `unit`.
  FA3_HD int after(KeyPart const& part, TileOfLine tile, int unit) const {
    return is_even() ? tile.first + scaled(part.end, tile.weight_log2 - count) : unit + 1;
  }

 private:
  // x * 2^exponent, rounded up, or down.
  FA3_HD static constexpr int scaled(int x, int exponent) {
    return exponent >= 0 ? x << exponent : (x + (1 << -exponent) - 1) >> -exponent;
  }
  FA3_HD static constexpr int scaled_down(int x, int exponent) {
    return exponent >= 0 ? x << exponent : x >> -exponent;
  }

  FA3_HD int cta_of(int unit) const { return int(uint32_t(unit) / uint32_t(per_cta)); }
};

}  // namespace fa3
