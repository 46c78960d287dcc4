// Splits the K tiles of output tiles into parts, so that several CTAs share the keys of one output
// tile. A part gives a partial O and LSE; the parts of an output tile are combined in the order of
// their keys.
//
// The K tiles of all output tiles form a line of units, of which each CTA takes a stretch of equal
// length. In an even split a unit is a K tile, and the units of an output tile that a CTA has are
// one part: at most the first and the last output tile of a stretch are shared with other CTAs. In
// the other splits each unit is a part, which depends on the keys of its output tile alone, so that
// its bits do not depend on what else is in the batch.
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
};

struct KeySplits {
  SplitKind kind = SplitKind::kEven;
  int count = 0;
  int64_t per_cta = 1;              // units of a stretch
  int64_t most = int64_t(1) << 62;  // units of all lines that a launch has slots for

  FA3_HD constexpr bool is_even() const { return kind == SplitKind::kEven; }

  // K tiles of a unit.
  FA3_HD constexpr int unit_tiles(int k_tiles) const {
    return is_even() ? 1 : kind == SplitKind::kParts ? max_of(1, ceil_div(k_tiles, count)) : count;
  }

  FA3_HD constexpr int units(int k_tiles) const { return ceil_div(k_tiles, unit_tiles(k_tiles)); }

  FA3_HD int cta_of(int64_t unit) const {
    // WHY: a division of 64 bits takes some 100 instructions.
    bool const is_short = ((unit | per_cta) >> 32) == 0;
    return is_short ? int(uint32_t(unit) / uint32_t(per_cta)) : int(unit / per_cta);
  }

  // The part that begins at a unit, of an output tile with units from `first` on. end: of the CTA's
  // stretch. total: units of a line.
  FA3_HD KeyPart part_at(int64_t unit, int64_t end, int64_t first, int k_tiles, Lane lane,
                         int64_t total) const {
    int const offset = int(unit - first);
    KeyPart part;
    if (is_even()) {
      int64_t const left = end - unit;
      int const first_cta = cta_of(first);
      int const slots_of_cta = 2 * lane.count;
      part.begin = offset;
      part.end = left < k_tiles - offset ? offset + int(left) : k_tiles;
      part.index = cta_of(unit) - first_cta;
      part.parts = cta_of(first + k_tiles - 1) - first_cta + 1;
      // A CTA has two slots: for the tile that it begins with, and for the one that it ends with.
      part.first_slot = slots_of_cta * first_cta + 2 * lane.index + 1;
      part.second_slot = part.first_slot - 1 + slots_of_cta;
      part.slot_step = slots_of_cta;
    } else {
      int const size = unit_tiles(k_tiles);
      part.begin = offset * size;
      part.end = min_of(k_tiles, (offset + 1) * size);
      part.index = offset;
      part.parts = units(k_tiles);
      part.first_slot = int(lane.index * total + first);
      part.second_slot = part.first_slot + 1;
      part.slot_step = 1;
    }
    return part;
  }
};

}  // namespace fa3
