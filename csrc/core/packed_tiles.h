// Sequences of several lengths in one tensor: the coordinates of each, and the order in which their
// tiles are worked on. A small kernel before the main one (schedule/prepare.h) fills the tables.
// The CTAs of the main kernel draw tickets, and two loads lead from a ticket to its tile.
//
// The longest sequences come first. The tiles of a sequence are ordered by sections of heads whose
// K and V fit in L2 together; in a section from the last tile to the first, since under a causal
// mask the last is the longest, and for each tile all heads of the section.
//
// INVARIANT: lengths come from the device and may be nonsense there, but coordinates computed from
// them stay inside the tensors.
#pragma once

#include <type_traits>

#include "core/problem.h"
#include "core/tile_order.h"

namespace fa3 {

struct alignas(16) Sequence {
  int q_begin;  // rows of the tensors
  int k_begin;
  SeqlenPair len;
};

// A sequence and its tiles: `tiles` tiles of one head, after tile_base tiles of the sequences
// before it. In the backward, which schedules tiles of keys, there are also row_tile_base tiles of
// queries before it, in the order of the batch.
struct alignas(32) SequenceTiles {
  Sequence sequence;
  int tile_base;
  int tiles;
  int row_tile_base;
  int index;  // in the batch
};

// A tile of queries of the backward: `rows` rows of the tensors from `row` on; 0 rows: no such
// tile.
struct RowTile {
  int row;
  int rows;
};

// The end of every packed sequence in the coordinates of TMA (RowDims in
// launch/tensor_map.h). No tensor has as many rows.
constexpr int kRowsEnd = 1 << 30;

struct PackedRows {
  int begin;
  int length;
};

// Reads what an earlier launch may just have written, past L1.
FA3_HD int read_now(int const* address) { return *static_cast<int const volatile*>(address); }

// The rows of sequence b that count, in a tensor of `total` rows.
FA3_HD PackedRows packed_rows(int const* cu, int const* used, int b, int total) {
  int const begin = clamp(read_now(cu + b), 0, total);
  int const end = clamp(read_now(cu + b + 1), begin, total);
  int const length = used == nullptr ? end - begin : clamp(read_now(used + b), 0, end - begin);
  return PackedRows{begin, length};
}

FA3_HD Sequence sequence_of(PackedLengths const& lengths, int b, int total_q, int total_k) {
  PackedRows const q = packed_rows(lengths.cu_q, lengths.used_q, b, total_q);
  PackedRows const k = packed_rows(lengths.cu_k, lengths.used_k, b, total_k);
  return Sequence{q.begin, k.begin, SeqlenPair{q.length, k.length}};
}

// Rows of no sequence: after the used length of sequence b, or, with is_last (b = batch), after the
// last sequence.
FA3_HD PackedRows unused_rows(int const* cu, int const* used, int b, bool is_last, int total) {
  if (is_last) {
    int const begin = clamp(cu[b], 0, total);
    return PackedRows{begin, total - begin};
  }
  PackedRows const all = packed_rows(cu, nullptr, b, total);
  int const length = packed_rows(cu, used, b, total).length;
  return PackedRows{all.begin + length, all.length - length};
}

// Unused rows are scheduled too, so that their results are zeros. They are entries after those of
// the batch. Each is scheduled twice, as queries without keys and as keys without queries; the
// returned struct holds both.
FA3_HD Sequence unused_of(PackedLengths const& lengths, int b, bool is_last, int total_q,
                          int total_k) {
  PackedRows const q = unused_rows(lengths.cu_q, lengths.used_q, b, is_last, total_q);
  PackedRows const k = unused_rows(lengths.cu_k, lengths.used_k, b, is_last, total_k);
  return Sequence{q.begin, k.begin, SeqlenPair{q.length, k.length}};
}

// Entry b of the tables: first the sequences of the batch, then the rows after the last one, then
// those after the used lengths.
FA3_HD Sequence entry_of(PackedLengths const& lengths, int b, int batch, int total_q, int total_k) {
  return b < batch    ? sequence_of(lengths, b, total_q, total_k)
         : b == batch ? unused_of(lengths, b, true, total_q, total_k)
                      : unused_of(lengths, b - batch - 1, false, total_q, total_k);
}

// The length of k for rows of no sequence: sinks do not apply to them.
constexpr int kNoSequence = -1;

// The part of an entry that is scheduled: its tiles of queries, or its tiles of keys.
FA3_HD Sequence scheduled_part(Sequence s, bool is_unused, bool schedules_keys) {
  if (is_unused && schedules_keys) {
    s.len.q = 0;
  } else if (is_unused) {
    s.k_begin = 1;
    s.len.k = kNoSequence;
  }
  return s;
}

// Clips a sequence to the tiles of queries that the tables have capacity for. Only nonsense lengths
// exceed it.
FA3_HD Sequence clip_to_capacity(Sequence s, int capacity, int tile_positions) {
  if (ceil_div(s.len.q, tile_positions) > capacity) {
    s.len.q = capacity * tile_positions;
  }
  return s;
}

// A location: the lengths of a sequence, and its rows in the coordinates of TMA. One
// type for kernels of dense batches, one for any batch.

struct DenseLocation {
  int batch;

  FA3_HD static DenseLocation dense(int batch, SeqlenPair) { return DenseLocation{batch}; }

  FA3_HD SeqlenPair lengths(SeqlenPair of_all) const { return of_all; }
  FA3_HD static constexpr int first_slot() { return 0; }
  FA3_HD static constexpr bool has_sink() { return true; }

  FA3_HD int first_q() const { return 0; }
  FA3_HD int first_k() const { return 0; }
  FA3_HD int end_q() const { return 0; }
  FA3_HD int end_k() const { return 0; }
};

// Coordinates as RowDims (launch/tensor_map.h) defines them.
struct AnyLocation {
  int batch;
  SeqlenPair len;
  int q_row;  // the first query
  int q_end;
  int k_row;  // the first key
  int k_end;

  FA3_HD static AnyLocation dense(int batch, SeqlenPair len) {
    return AnyLocation{batch, len, 0, 0, 0, 0};
  }

  FA3_HD static AnyLocation packed(Sequence const& s) {
    return AnyLocation{kRowsEnd,           s.len,
                       kRowsEnd - s.len.q, s.q_begin + s.len.q,
                       kRowsEnd - s.len.k, s.k_begin + s.len.k};
  }

  FA3_HD SeqlenPair lengths(SeqlenPair) const { return len; }
  FA3_HD static constexpr int first_slot() { return 0; }
  FA3_HD bool has_sink() const { return len.k != kNoSequence; }

  FA3_HD int first_q() const { return q_row; }
  FA3_HD int first_k() const { return k_row; }
  FA3_HD int end_q() const { return q_end; }
  FA3_HD int end_k() const { return k_end; }
};

template <BatchKind kBatch>
using LocationOf = std::conditional_t<kBatch == BatchKind::kDense, DenseLocation, AnyLocation>;

// An upper bound of the tiles of `rows` rows in `batch` sequences with `total` rows.
constexpr int64_t most_tiles(int64_t total, int64_t batch, int rows) {
  return total / rows + (batch < total ? batch : total);
}

// The tables in the workspace of a launch, in this order.
struct PackedTables {
  int tiles = 0;                       // capacity of sequence_of_tile
  int row_tile_count = 0;              // capacity of row_tiles
  int* header = nullptr;               // kHeaderInts: the next ticket
  int* sequence_of_tile = nullptr;     // kNoTile after the last one
  RowTile* row_tiles = nullptr;        // backward only; in the order of the batch
  SequenceTiles* sequences = nullptr;  // longest first

  static constexpr int kHeaderInts = 8;
  static constexpr int kTicket = 0;
  static constexpr int kNoTile = -1;

  static constexpr int64_t table_ints(int64_t ints) { return (ints + 7) / 8 * 8; }

  static constexpr int64_t row_tile_ints(int64_t row_tiles) {
    return table_ints(row_tiles * int64_t(sizeof(RowTile) / sizeof(int)));
  }

  static constexpr int64_t workspace_ints(int64_t tiles, int64_t batch, int64_t row_tiles = 0) {
    return kHeaderInts + table_ints(tiles) + row_tile_ints(row_tiles) +
           batch * int64_t(sizeof(SequenceTiles) / sizeof(int));
  }

  // workspace: 32-byte aligned.
  static PackedTables in(int* workspace, int tiles, int row_tiles = 0) {
    int* const of_tiles = workspace + kHeaderInts;
    int* const of_rows = of_tiles + table_ints(tiles);
    int* const of_sequences = of_rows + row_tile_ints(row_tiles);
    return PackedTables{tiles,
                        row_tiles,
                        workspace,
                        of_tiles,
                        reinterpret_cast<RowTile*>(of_rows),
                        reinterpret_cast<SequenceTiles*>(of_sequences)};
  }
};

// The order of tickets: heads, and how many of them form a section (a divisor of them).
struct TicketOrder {
  FastDiv heads;
  FastDiv section_heads;

  // The tile and head of a ticket, which belongs to sequence s; batch is the index in the batch.
  FA3_HD TileCoord coord(SequenceTiles const& s, int ticket) const {
    int const in_sequence = ticket - s.tile_base * int(heads.divisor);
    int const per_section = s.tiles * int(section_heads.divisor);
    int const section = in_sequence / per_section;
    int const in_section = in_sequence - section * per_section;
    int const from_end = section_heads.div(in_section);
    int const head = in_section - from_end * int(section_heads.divisor);
    return TileCoord{s.tiles - 1 - from_end, section * int(section_heads.divisor) + head, s.index};
  }
};

}  // namespace fa3
