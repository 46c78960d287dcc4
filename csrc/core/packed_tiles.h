// Sequences of several lengths in one tensor: where each lies, and in which order their tiles are
// worked on. A small kernel before the main one (schedule/prepare.h) makes the tables; the CTAs of
// the main one draw tickets, and a ticket leads to its tile by two loads.
//
// The longest sequences come first. The tiles of a sequence go by sections of heads whose K and V
// fit in L2 together; in a section from the last tile to the first, which under a causal mask is
// the longest first, and for each all heads of the section.
//
// Lengths come from the device and may be nonsense there: what is made of them stays inside the
// tensors.
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

// A sequence and its tiles: `tiles` of one head, of which there are tile_base in the sequences
// before it. In the backward, where tiles of keys are scheduled, there are also row_tile_base tiles
// of queries before it, in the order of the batch.
struct alignas(32) SequenceTiles {
  Sequence sequence;
  int tile_base;
  int tiles;
  int row_tile_base;
  int index;  // in the batch
};

// A tile of queries of the backward: `rows` rows of the tensors from `row`; 0 rows: there is no
// such tile.
struct RowTile {
  int row;
  int rows;
};

// Where rows of packed sequences end for the copy engine (device/tensor_map.h). No tensor has as
// many.
constexpr int kRowsEnd = 1 << 30;

struct PackedRows {
  int begin;
  int length;
};

// Rows of sequence b that count, of a tensor of `total` rows.
FA3_HD PackedRows packed_rows(int const* cu, int const* used, int b, int total) {
  int const begin = clamp(cu[b], 0, total);
  int const end = clamp(cu[b + 1], begin, total);
  int const length = used == nullptr ? end - begin : clamp(used[b], 0, end - begin);
  return PackedRows{begin, length};
}

FA3_HD Sequence sequence_of(PackedLengths const& lengths, int b, int total_q, int total_k) {
  PackedRows const q = packed_rows(lengths.cu_q, lengths.used_q, b, total_q);
  PackedRows const k = packed_rows(lengths.cu_k, lengths.used_k, b, total_k);
  return Sequence{q.begin, k.begin, SeqlenPair{q.length, k.length}};
}

// Rows that no sequence has: behind the used length of sequence b, and, as b = batch, behind the
// last one.
FA3_HD PackedRows unused_rows(int const* cu, int const* used, int b, bool is_last, int total) {
  if (is_last) {
    int const begin = clamp(cu[b], 0, total);
    return PackedRows{begin, total - begin};
  }
  PackedRows const all = packed_rows(cu, nullptr, b, total);
  int const length = packed_rows(cu, used, b, total).length;
  return PackedRows{all.begin + length, all.length - length};
}

// Such rows of q and of k are worked on too, so that their results are zeros: entries behind those
// of the batch, each as two sequences, one without keys and one without queries. Here both in one.
FA3_HD Sequence unused_of(PackedLengths const& lengths, int b, bool is_last, int total_q,
                          int total_k) {
  PackedRows const q = unused_rows(lengths.cu_q, lengths.used_q, b, is_last, total_q);
  PackedRows const k = unused_rows(lengths.cu_k, lengths.used_k, b, is_last, total_k);
  return Sequence{q.begin, k.begin, SeqlenPair{q.length, k.length}};
}

// Entry b of the tables: a sequence of the batch, the rows behind the last one, those behind the
// used lengths.
FA3_HD Sequence entry_of(PackedLengths const& lengths, int b, int batch, int total_q, int total_k) {
  return b < batch    ? sequence_of(lengths, b, total_q, total_k)
         : b == batch ? unused_of(lengths, b, true, total_q, total_k)
                      : unused_of(lengths, b - batch - 1, false, total_q, total_k);
}

// The length of k, where a sequence of queries stands for rows that are none's: no sink counts.
constexpr int kNoSequence = -1;

// An entry as the kernel sees it that schedules tiles of queries, or of keys.
FA3_HD Sequence scheduled_part(Sequence s, bool is_unused, bool schedules_keys) {
  if (is_unused && schedules_keys) {
    s.len.q = 0;
  } else if (is_unused) {
    s.k_begin = 1;
    s.len.k = kNoSequence;
  }
  return s;
}

// A sequence whose tiles of queries have room for so many only, which nonsense alone brings about.
FA3_HD Sequence cut_to_room(Sequence s, int room, int tile_positions) {
  if (ceil_div(s.len.q, tile_positions) > room) {
    s.len.q = room * tile_positions;
  }
  return s;
}

// Where a sequence lies: its lengths, and its rows as the copy engine counts them. One type for
// kernels of dense batches, one for any batch.

struct DenseLocation {
  int batch;

  FA3_HD static DenseLocation dense(int batch, SeqlenPair) { return DenseLocation{batch}; }

  FA3_HD SeqlenPair lengths(SeqlenPair of_all) const { return of_all; }

  FA3_HD int first_q() const { return 0; }
  FA3_HD int first_k() const { return 0; }
  FA3_HD int end_q() const { return 0; }
  FA3_HD int end_k() const { return 0; }
};

// Coordinates of device/tensor_map.h, RowDims.
struct AnyLocation {
  int batch;
  SeqlenPair len;
  int q_row;  // of the first query
  int q_end;
  int k_row;  // of the first key
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

  FA3_HD int first_q() const { return q_row; }
  FA3_HD int first_k() const { return k_row; }
  FA3_HD int end_q() const { return q_end; }
  FA3_HD int end_k() const { return k_end; }
};

template <BatchKind kBatch>
using LocationOf = std::conditional_t<kBatch == BatchKind::kDense, DenseLocation, AnyLocation>;

// No more tiles of `rows` rows than this are in `batch` sequences with `total` rows.
constexpr int64_t most_tiles(int64_t total, int64_t batch, int rows) {
  return total / rows + (batch < total ? batch : total);
}

// The tables in the workspace of a launch, in this order.
struct PackedTables {
  int tiles = 0;                       // room in sequence_of_tile
  int row_tile_count = 0;              // room in row_tiles
  int* header = nullptr;               // kHeaderInts: the next ticket
  int* sequence_of_tile = nullptr;     // kNoTile behind the last one
  RowTile* row_tiles = nullptr;        // of the backward; the sequences as they are in the batch
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

// How tickets are numbered: heads, and how many of them form a section (a divisor of them).
struct TicketOrder {
  FastDiv heads;
  FastDiv section_heads;

  // The tile of a sequence that a ticket stands for, and its head; batch is the place in the table.
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
