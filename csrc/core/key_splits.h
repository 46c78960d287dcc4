// Splits the K tiles of output tiles into parts, so that several CTAs share the keys of one output
// tile. A part gives a partial O and LSE; the parts of an output tile are combined in the order of
// their keys.
//
// EvenSplit lays the K tiles of all output tiles in one line and gives each CTA an equal stretch of
// it. A CTA has at most two output tiles that it shares with others, the first and the last of its
// stretch. FixedSplit depends on the keys of one output tile alone, so that its bits do not depend
// on what else is in the batch.
#pragma once

#include "core/int_math.h"

namespace fa3 {

// K tiles [begin, end) of an output tile.
struct KeyPart {
  int group;
  int head;  // in the group
  int begin;
  int end;
  int index;  // counts the parts of the output tile in the order of their keys
  int parts;  // that the output tile has
};

// The line. A group is the output tiles of one sequence and one range of queries: one for each of
// `heads` KV heads, with equally many K tiles, at least one. starts: groups + 1 numbers, the first
// of which is 0: K tiles before a group.
struct KeyLine {
  int64_t const* starts;
  int groups;
  int heads;

  FA3_HD int64_t total() const { return starts[groups]; }
  FA3_HD int k_tiles(int group) const { return int((starts[group + 1] - starts[group]) / heads); }

  // The group that has K tile `position` of the line; 0 <= position < total().
  FA3_HD int group_at(int64_t position) const {
    int low = 0;
    int high = groups;
    while (high - low > 1) {
      int const middle = (low + high) / 2;
      (starts[middle] <= position ? low : high) = middle;
    }
    return low;
  }
};

struct EvenSplit {
  int64_t total;
  int ctas;  // no more than K tiles: each CTA has some

  FA3_HD EvenSplit(int64_t total_, int most_ctas)
      : total(total_), ctas(int(total_ < most_ctas ? total_ : most_ctas)) {}

  // The stretch of a CTA is [first(cta), first(cta + 1)).
  FA3_HD int64_t first(int cta) const { return total * cta / ctas; }

  // The CTA whose stretch has `position`.
  FA3_HD int cta_at(int64_t position) const { return int(((position + 1) * ctas - 1) / total); }
};

// Goes through the parts of a CTA in the order of the line: part() is the current one as long as
// the walk is valid.
class EvenSplitWalk {
  KeyLine line_;
  EvenSplit split_;
  int cta_;
  int64_t position_;
  int64_t end_;
  int group_ = 0;

 public:
  FA3_HD EvenSplitWalk(KeyLine const& line, EvenSplit const& split, int cta)
      : line_(line),
        split_(split),
        cta_(cta),
        position_(cta < split.ctas ? split.first(cta) : 0),
        end_(cta < split.ctas ? split.first(cta + 1) : 0) {
    if (valid()) {
      group_ = line.group_at(position_);
    }
  }

  FA3_HD bool valid() const { return position_ < end_; }

  FA3_HD KeyPart part() const {
    int const k_tiles = line_.k_tiles(group_);
    int const head = int((position_ - line_.starts[group_]) / k_tiles);
    int64_t const first = line_.starts[group_] + int64_t(head) * k_tiles;
    int64_t const last = first + k_tiles - 1;
    int const first_cta = split_.cta_at(first);
    int64_t const end = end_ <= last ? end_ : last + 1;
    return KeyPart{group_,
                   head,
                   int(position_ - first),
                   int(end - first),
                   cta_ - first_cta,
                   split_.cta_at(last) - first_cta + 1};
  }

  FA3_HD void next() {
    KeyPart const done = part();
    position_ += done.end - done.begin;
    group_ += position_ == line_.starts[group_ + 1];
  }
};

// Parts of `tiles` K tiles; the last one of an output tile may have fewer.
struct FixedSplit {
  int tiles;

  // At most `parts` parts of an output tile of k_tiles.
  FA3_HD static FixedSplit into(int parts, int k_tiles) {
    return FixedSplit{max_of(1, ceil_div(k_tiles, parts))};
  }

  // Parts that begin at multiples of `keys`, rounded up to whole K tiles.
  FA3_HD static FixedSplit of_size(int keys, int tile_n) {
    return FixedSplit{ceil_div(keys, tile_n)};
  }

  FA3_HD int parts(int k_tiles) const { return ceil_div(k_tiles, tiles); }
  FA3_HD int begin(int index) const { return index * tiles; }
  FA3_HD int end(int index, int k_tiles) const { return min_of(k_tiles, (index + 1) * tiles); }
};

}  // namespace fa3
