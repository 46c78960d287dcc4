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
  int const* new_starts = nullptr;  // of appended keys, batch + 1
  int const* entry_of = nullptr;    // entry of a dense cache
  int held_by_all = 0;              // without `held`
  int appended = 0;                 // without `new_starts`
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
  int entry;      // of a dense cache
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
  int const held = lengths.held != nullptr ? lengths.held[b] : lengths.held_by_all;
  int const appended = lengths.new_starts != nullptr
                           ? lengths.new_starts[b + 1] - lengths.new_starts[b]
                           : lengths.appended;
  int const end = min_of(most, clamp(held, 0, most) + clamp(appended, 0, most));
  s.first_slot = lengths.leftpad != nullptr ? clamp(lengths.leftpad[b], 0, end) : 0;
  s.len.k = end - s.first_slot;
  s.entry = lengths.entry_of != nullptr ? lengths.entry_of[b] : b;
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

// What all CTAs of a launch share. heads: packed heads of a line, each a tile for the same queries.
struct CacheLine {
  int batch = 0;
  int heads = 1;
  int lanes = 1;
  int positions = 1;  // queries of a tile
  int ctas = 1;       // of a line
  KeySplits splits;
};

// An even split makes at most so many parts of a tile, if all sequences have the same length.
constexpr int kMostParts = 64;

// The tiles of a CTA. A group is the tiles of one sequence and one range of queries: one for each
// head, with equally many K tiles, at least one.
template <class Mask>
struct CacheWalk {
  CacheLine const& line;
  CacheLengths const& lengths;
  Mask mask;
  int tile_n;
  KeySplits splits;
  Lane lane;
  int64_t total = 0;  // units of the line
  int64_t unit = 0;   // where the next part begins
  int64_t end = 0;    // of the CTA's stretch
  int64_t first = 0;  // unit of the group
  int b = 0;
  int m = 0;
  CacheSequence sequence = {};
  BlockRange keys = {};  // of the group, in slots
  int units = 0;         // of a tile of the group

  FA3_HD CacheWalk(CacheLine const& line_, CacheLengths const& lengths_, Mask const& mask_,
                   int tile_n_)
      : line(line_), lengths(lengths_), mask(mask_), tile_n(tile_n_), splits(line_.splits) {}

  FA3_HD bool valid() const { return unit < end; }

  FA3_HD int k_tiles() const { return keys.end - keys.begin; }
  FA3_HD int head() const { return head_of_line() * lane.count + lane.index; }

  FA3_HD KeyPart part() const {
    int64_t const first_of_tile = first + int64_t(head_of_line()) * units;
    return splits.part_at(unit, end, first_of_tile, k_tiles(), lane, total);
  }

  FA3_HD int tiles_of(CacheSequence const& s) const { return ceil_div(s.len.q, line.positions); }

  // Units of the sequences [begin, end).
  FA3_HD int64_t units_of(int begin, int sequences_end) const {
    int64_t sum = 0;
    for (int i = begin; i < sequences_end; ++i) {
      CacheSequence const s = cache_sequence(lengths, i);
      int const tiles = tiles_of(s);
      for (int tile = 0; tile < tiles; ++tile) {
        BlockRange const range = range_of(s, tile);
        sum += splits.units(range.end - range.begin);
      }
    }
    return sum * line.heads;
  }

  // The stretch of a CTA of all lines. Only nonsense lengths give more units than there are slots
  // for: then nothing is computed.
  FA3_HD void take_stretch(int64_t units_of_line, int cta) {
    total = units_of_line * line.lanes <= splits.most ? units_of_line : 0;
    lane = Lane{cta % line.lanes, line.lanes};
    splits.per_cta = ceil_of(total, line.ctas);
    if (splits.is_even()) {
      int const tiles = clamp(line.batch * line.heads, 1, 1 << 24);
      int64_t const least = ceil_of(total, kMostParts * tiles);
      splits.per_cta = splits.per_cta < least ? least : splits.per_cta;
    }
    unit = splits.per_cta * (cta / line.lanes);
    int64_t const stop = unit + splits.per_cta;
    end = stop < total ? stop : total;
  }

  // Begins at a sequence, before which there are so many units. seek() has to follow.
  FA3_HD void begin_at(int start, int64_t before) {
    b = start;
    m = -1;
    first = before;
    units = 0;
    sequence = cache_sequence(lengths, b);
  }

  // To the end of a part; seek() has to follow while the walk is valid.
  FA3_HD void pass(KeyPart const& done) {
    unit += splits.is_even() ? done.end - done.begin : done.parts > 0;
  }

  // Goes to the group that has `unit`.
  FA3_HD void seek() {
    while (unit >= first + int64_t(line.heads) * units) {
      first += int64_t(line.heads) * units;
      ++m;
      while (m >= tiles_of(sequence)) {
        ++b;
        m = 0;
        sequence = cache_sequence(lengths, b);
      }
      keys = range_of(sequence, m);
      units = splits.units(k_tiles());
    }
  }

 private:
  FA3_HD int head_of_line() const { return int(unit - first) / units; }

  FA3_HD static int64_t ceil_of(int64_t total, int ctas) {
    return (total >> 31) == 0 ? ceil_div(int(total), ctas) : (total + ctas - 1) / ctas;
  }

  FA3_HD BlockRange range_of(CacheSequence const& s, int tile) const {
    int const begin = tile * line.positions;
    BlockRange range =
        block_range(begin, begin + line.positions, s.len, tile_n, mask, s.first_slot);
    range.end = max_of(range.end, range.begin + 1);
    return range;
  }
};

}  // namespace fa3
