// Attention on a cache: where the keys of each sequence lie, and the line of work that the CTAs
// share (core/key_splits.h).
//
// A slot counts the places of a sequence in the cache from 0. Its keys have the slots [first_slot,
// first_slot + len.k); masks count keys from first_slot on. K tiles begin at multiples of tile_n
// slots, so that they agree with pages.
//
// INVARIANT: lengths come from the device and may be nonsense there. They are clamped, so that no
// key lies outside the capacity and no query outside the tensor.
#pragma once

#include "core/block_range.h"
#include "core/key_splits.h"
#include "core/packed_tiles.h"

namespace fa3 {

// Pointers lead to device memory; nullptr: not given.
struct CacheLengths {
  PackedLengths packed;             // cu_k: k and v are packed sequences, no cache
  int const* held = nullptr;        // keys in the cache before those that are appended
  int const* leftpad = nullptr;     // slots before the first key
  int const* new_starts = nullptr;  // where the appended keys of each begin, batch + 1
  int const* entry_of = nullptr;    // entry of a dense cache
  int held_by_all = 0;              // without `held`
  int held_step = 0;                // without `held`: each sequence has so many keys fewer than the
                                    // one before; more than the capacity count as the capacity
  int appended = 0;                 // without `new_starts`
  int first_slot = 0;               // without `leftpad`
  int capacity = 0;                 // slots of a sequence; packed k: all rows
  int seqlen_q = 0;                 // without packed.cu_q
  int total_q = 0;                  // with it
};

// Keys of one copy: those that pages and K tiles have in common; 0: too few for the swizzle of
// shared memory, which repeats every 8 rows.
constexpr int boxed_keys(int page_size, int tile_n) {
  int keys = tile_n;
  while (page_size % keys != 0 || tile_n % keys != 0) {
    --keys;
  }
  return keys % 8 == 0 ? keys : 0;
}

struct CacheSequence {
  int q_begin;  // row of packed queries
  SeqlenPair len;
  int first_slot;
  int first_row;  // row of slot 0: packed k
  int entry;      // the row of a dense cache

  FA3_HD bool operator==(CacheSequence const& s) const {
    return q_begin == s.q_begin && len.q == s.len.q && len.k == s.len.k &&
           first_slot == s.first_slot && first_row == s.first_row && entry == s.entry;
  }
};

FA3_HD CacheSequence cache_sequence(CacheLengths const& lengths, int b) {
  CacheSequence s{0, {lengths.seqlen_q, 0}, 0, 0, 0};
  if (lengths.packed.cu_q != nullptr) {
    PackedRows const q =
        packed_rows(lengths.packed.cu_q, lengths.packed.used_q, b, lengths.total_q);
    s.q_begin = q.begin;
    s.len.q = q.length;
  }
  if (lengths.packed.cu_k != nullptr) {
    PackedRows const k =
        packed_rows(lengths.packed.cu_k, lengths.packed.used_k, b, lengths.capacity);
    s.first_row = k.begin;
    s.len.k = k.length;
    return s;
  }
  int const most = lengths.capacity;
  int const held = lengths.held != nullptr ? read_now(lengths.held + b)
                                           : lengths.held_by_all - b * lengths.held_step;
  int const appended = lengths.new_starts != nullptr
                           ? read_now(lengths.new_starts + b + 1) - read_now(lengths.new_starts + b)
                           : lengths.appended;
  int const end = min_of(most, clamp(held, 0, most) + clamp(appended, 0, most));
  int const first = lengths.leftpad != nullptr ? read_now(lengths.leftpad + b) : lengths.first_slot;
  s.first_slot = clamp(first, 0, end);
  s.len.k = end - s.first_slot;
  s.entry = lengths.entry_of != nullptr ? read_now(lengths.entry_of + b) : b;
  return s;
}

// A sequence as a kernel's tile sees it; the members of AnyLocation for its queries, and its keys.
struct CacheLocation {
  int batch;
  SeqlenPair len;
  int q_row;
  int q_end;
  int sequence;  // row of the page table
  int entry;
  int slot;  // first_slot
  int row;   // first_row
  KeyPart part;

  FA3_HD static CacheLocation of(CacheSequence const& s, int sequence, bool is_packed) {
    CacheLocation at{};
    at.batch = is_packed ? kRowsEnd : sequence;
    at.len = s.len;
    at.q_row = is_packed ? kRowsEnd - s.len.q : 0;
    at.q_end = is_packed ? s.q_begin + s.len.q : 0;
    at.sequence = sequence;
    at.entry = s.entry;
    at.slot = s.first_slot;
    at.row = s.first_row;
    return at;
  }

  FA3_HD SeqlenPair lengths(SeqlenPair) const { return len; }
  FA3_HD int first_q() const { return q_row; }
  FA3_HD int end_q() const { return q_end; }
  FA3_HD int end_k() const { return slot + len.k; }
  FA3_HD int first_slot() const { return slot; }
  // A sink enters once: where parts are combined, if there are several.
  FA3_HD bool has_sink() const { return part.parts == 1; }
};

// The most parts of a tile that an even split makes if all sequences have the same length.
constexpr int kMostParts = 64;

// Two launches can share a call: each processes some of its sequences, and both run at the same
// time. This launch processes the sequences with `fewest` to `most` queries.
struct SharedCall {
  bool is_shared = false;
  int fewest = 0;
  int most = 0;
  FastDiv other_positions;    // queries of a tile of the other launch
  int other_weight_log2 = 0;  // its weight_log2 and tile_units
  int other_tile_units = 0;
  float other_cost = 1.f;  // time of one of its units / one of ours

  FA3_HD bool takes(int queries) const {
    return !is_shared || (queries >= fewest && queries <= most);
  }
};

// What all CTAs of a launch share.
struct CacheLine {
  int batch = 0;
  int heads = 1;  // packed heads of a line, each a tile for the same queries
  FastDiv lanes;
  FastDiv positions;    // queries of a tile
  FastDiv ctas;         // that share a line
  FastDiv most_parts;   // kMostParts for each sequence and head
  int weight_log2 = 0;  // that a K tile has if the queries fill more than half of a tile
  int tile_units = 0;   // even split: cost of a tile besides its K tiles
  KeySplits splits;
  SharedCall shared;
  // A launch that starts while an earlier one still runs: the CTAs of a line that start at once,
  // and how many units each computes before the others can start. 0: all start at once.
  int early_ctas = 0;
  int late_units = 0;

  CacheLine() = default;

  CacheLine(int batch_, int heads_, int lanes_, int positions_, int ctas_)
      : batch(batch_),
        heads(heads_),
        lanes(lanes_),
        positions(positions_),
        ctas(ctas_),
        most_parts(kMostParts * clamp(int64_t(batch_) * heads_)) {}

 private:
  static int clamp(int64_t tiles) { return tiles < 1 ? 1 : tiles < 1 << 24 ? int(tiles) : 1 << 24; }
};

// How the CTAs divide a line. kSharedCall: another launch may take a part of the call. kWholeTiles:
// combining parts is expensive, so if all tiles have the same number of units, a CTA gets whole
// tiles, as long as its stretch grows by at most 1 / 16.
enum class LineKind : int { kSharedCall, kWholeTiles };

// The tiles of a CTA. A group is the tiles of one sequence and one range of queries: one for each
// head, with equally many K tiles, at least one.
// kFolds: parts of equal size begin at multiples of it, else at the first K tile of a tile.
template <class Mask, class Lengths = CacheLengths const&, LineKind kKind = LineKind::kSharedCall,
          bool kFolds = true>
struct CacheWalk {
  static constexpr bool kMayShare = kKind == LineKind::kSharedCall;
  static constexpr bool kKeepsTilesWhole = kKind == LineKind::kWholeTiles;

  CacheLine const& line;
  Lengths lengths;
  Mask mask;
  int tile_n;
  KeySplits splits;
  Lane lane;
  int total = 0;   // units of the line
  int others = 0;  // units per head of the other launch (SharedCall), summed by units_of()
  // kWholeTiles: the fewest and the most units of a tile that units_of() has seen.
  int fewest = kMostUnits;
  int most = 0;
  int unit = 0;   // where the next part begins
  int end = 0;    // where the CTA's stretch ends
  int first = 0;  // unit of the group
  int b = 0;
  int m = 0;
  CacheSequence sequence = {};
  BlockRange keys = {};  // K tiles of the group, by slots
  int units = 0;         // that each tile of the group has
  int head = 0;
  KeyPart part = {};  // the last one that next() found

  FA3_HD CacheWalk(CacheLine const& line_, Lengths lengths_, Mask const& mask_, int tile_n_)
      : line(line_), lengths(lengths_), mask(mask_), tile_n(tile_n_), splits(line_.splits) {}

  // Whether there may be a part.
  FA3_HD bool valid() const { return unit < end; }

  FA3_HD int tiles_of(CacheSequence const& s) const {
    bool const is_taken = !kMayShare || line.shared.takes(s.len.q);
    return is_taken ? ceil_of(s.len.q, line.positions) : 0;
  }

  // Units of the sequences [from, to); more than kMostUnits count as one more. Leaves `sequence`,
  // `keys` and `units` at the last of them.
  FA3_HD int units_of(int from, int to) {
    int64_t sum = 0;
    for (int i = from; i < to; ++i) {
      sequence = cache_sequence(lengths, i);
      int const tiles = tiles_of(sequence);
      if (kMayShare && line.shared.is_shared && tiles == 0 && sequence.len.q > 0) {
        others = min_of(others + other_units(), kMostUnits);
      }
      for (int tile = 0; tile < tiles; ++tile) {
        take_tile(tile);
        sum += units;
        if constexpr (kKeepsTilesWhole) {
          fewest = min_of(fewest, units);
          most = max_of(most, units);
        }
      }
    }
    sum *= line.heads;
    return sum > kMostUnits ? kMostUnits + 1 : int(sum);
  }

  // The stretch of a CTA of all lines. Only nonsense lengths give more units than there are slots
  // for: then nothing is computed. other_units: those of the other launch (SharedCall), all heads.
  FA3_HD void take_stretch(int units_of_line, int cta, float other_units = 0.f) {
    int const lanes = int(line.lanes.divisor);
    bool const has_slots = int64_t(units_of_line) * lanes <= splits.most;
    total = has_slots && units_of_line <= kMostUnits ? units_of_line : 0;
    lane = Lane{line.lanes.mod(cta), lanes, line.lanes.div(cta)};
    splits.per_cta = ceil_of(total, line.ctas);
    if (kMayShare && other_units > 0.f) {
      float const own = float(total) * float(lanes);
      float const all = own + other_units * line.shared.other_cost;
      int const ctas = int(float(line.ctas.divisor) * (own / all));
      splits.per_cta = ceil_div(total, max_of(1, ctas));
    }
    if (kMayShare && line.early_ctas > 0) {  // these alone, if all together end later
      int const by_early = ceil_div(total, line.early_ctas);
      splits.per_cta = by_early <= splits.per_cta + line.late_units ? by_early : splits.per_cta;
    }
    if (splits.is_even()) {
      splits.per_cta = max_of(splits.per_cta, ceil_of(total, line.most_parts));
      splits.per_cta = max_of(splits.per_cta, splits.units(1, line.weight_log2));
    }
    if (kKeepsTilesWhole && splits.is_even() && fewest == most) {
      int const whole = ceil_div(splits.per_cta, most) * most;
      splits.per_cta = whole <= splits.per_cta + splits.per_cta / 16 ? whole : splits.per_cta;
    }
    int64_t const begin = int64_t(splits.per_cta) * lane.cta;
    unit = begin < total ? int(begin) : total;
    end = min_of(unit + splits.per_cta, total);
  }

  // Begins at the sequence `start`, before which there are `before` units.
  FA3_HD void begin_at(int start, int before) {
    b = start - 1;
    m = 0;
    first = before;
    units = 0;
    sequence.len.q = 0;
  }

  // Called after begin_at(), if the first sequence and its K tiles are already known and it has
  // only one tile of queries.
  FA3_HD void begin_in(CacheSequence const& of_first, BlockRange const& its_keys, int its_units) {
    ++b;
    sequence = of_first;
    keys = its_keys;
    units = its_units;
  }

  // Goes to the next part, if there is one.
  FA3_HD bool next() {
    while (valid()) {
      seek();
      int const index = line.heads == 1 ? 0 : int(uint32_t(unit - first) / uint32_t(units));
      TileOfLine const tile{first + index * units + tile_units(), keys.count(),
                            weight_of(sequence, m), phase()};
      if constexpr (kMayShare) {
        unit = max_of(unit, tile.first);
        if (unit >= end) {
          return false;
        }
      }
      head = index * lane.count + lane.index;
      part = splits.part_at(unit, end, tile, lane, total);
      if (part.begin < part.end) {
        unit = splits.after(part, tile, unit);
        return true;
      }
      unit = tile.first - tile_units() + units;
    }
    return false;
  }

 private:
  FA3_HD int tile_units() const { return kMayShare ? line.tile_units : 0; }

  // Goes to the group that has `unit`.
  FA3_HD void seek() {
    while (unit - first >= line.heads * units) {
      first += line.heads * units;
      ++m;
      while (m >= tiles_of(sequence)) {
        ++b;
        m = 0;
        sequence = cache_sequence(lengths, b);
      }
      take_tile(m);
    }
  }

  // K tiles and units of a tile of `sequence`.
  FA3_HD void take_tile(int tile) {
    keys = range_of(sequence, tile);
    units = splits.units(keys.count(), weight_of(sequence, tile), phase()) + tile_units();
  }

  FA3_HD int phase() const { return kFolds ? splits.phase_of(keys.begin) : 0; }

  // Estimates the units of `sequence` in the other launch (SharedCall), as if the K tiles of its
  // tiles increased evenly from the first tile to the last.
  FA3_HD int other_units() const {
    int const positions = int(line.shared.other_positions.divisor);
    int const tiles = ceil_of(sequence.len.q, line.shared.other_positions);
    int units_of_two = 0;
    for (int end = 0; end < 2; ++end) {
      BlockRange const range = range_of(sequence, end * (tiles - 1), positions);
      units_of_two +=
          splits.units(range.count(), line.shared.other_weight_log2) + line.shared.other_tile_units;
    }
    return min_of(tiles, kMostUnits / units_of_two) * units_of_two / 2;
  }

  FA3_HD int weight_of(CacheSequence const& s, int tile) const {
    int const positions = int(line.positions.divisor);
    return 2 * (s.len.q - tile * positions) > positions ? line.weight_log2 : 0;
  }

  FA3_HD static int ceil_of(int n, FastDiv const& by) { return by.div(n + int(by.divisor) - 1); }

  FA3_HD BlockRange range_of(CacheSequence const& s, int tile) const {
    return range_of(s, tile, int(line.positions.divisor));
  }

  FA3_HD BlockRange range_of(CacheSequence const& s, int tile, int positions) const {
    int const begin = tile * positions;
    BlockRange range = block_range(begin, begin + positions, s.len, tile_n, mask, s.first_slot);
    range.end = max_of(range.end, range.begin + 1);
    return range;
  }
};

}  // namespace fa3
