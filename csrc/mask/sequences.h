// Where lists and rows stand in packed sequences, or in a dense batch.
#pragma once

#include "device/cute.h"
#include "mask/lists.h"

namespace fa3 {

// How many of ascending numbers are at most x.
template <class NumberAt>
CUTE_DEVICE int count_at_most(int x, int count, NumberAt const& number_at) {
  int first = 0;
  while (first < count) {
    int const middle = first + (count - first) / 2;
    if (number_at(middle) <= x) {
      first = middle + 1;
    } else {
      count = middle;
    }
  }
  return first;
}

// The first list of packed sequence b, which begins at a row.
CUTE_DEVICE int first_list(int row, int b) { return row / kListedRows + b; }

// The packed sequence of a list, -1 if there is none.
CUTE_DEVICE int sequence_of_list(int list, int const* cu, int batch, int total) {
  return count_at_most(
             list, batch,
             [&](int b) { return first_list(packed_rows(cu, nullptr, b, total).begin, b); }) -
         1;
}

CUTE_DEVICE int keys_of_sequence(MaskListParams const& p, int b) {
  return p.is_packed() ? min_of(p.keys, packed_rows(p.lengths.cu_k, nullptr, b, p.all_keys).length)
                       : p.keys;
}

// The queries of a list.
struct ListQueries {
  int sequence;
  int tile;  // the tile's number in the sequence
  int row;   // the first query
  int rows;  // how many queries; 0: the list belongs to no sequence
  int keys;  // how many keys the sequence has

  CUTE_DEVICE int rows_of_half(int half) const {
    return clamp(rows - half * kMaskBlock, 0, kMaskBlock);
  }
};

CUTE_DEVICE ListQueries queries_of_list(MaskListParams const& p, int batch, int list) {
  int b = batch;
  int tile = list;
  PackedRows of_sequence{0, p.queries};
  if (p.is_packed()) {
    b = sequence_of_list(list, p.lengths.cu_q, p.batch, p.queries);
    if (b < 0) {
      return ListQueries{0, 0, 0, 0, 0};
    }
    of_sequence = packed_rows(p.lengths.cu_q, nullptr, b, p.queries);
    tile -= first_list(of_sequence.begin, b);
  }
  bool const exists = tile < ceil_div(of_sequence.length, p.tile_rows);
  int const before = exists ? tile * p.tile_rows : 0;
  int const rows = exists ? min_of(p.tile_rows, of_sequence.length - before) : 0;
  return ListQueries{b, tile, of_sequence.begin + before, rows, keys_of_sequence(p, b)};
}

CUTE_DEVICE int keys_of_row(MaskListParams const& p, int row) {
  if (!p.is_packed()) {
    return p.keys;
  }
  int const b = count_at_most(row, p.batch, [&](int i) { return p.lengths.cu_q[i + 1]; });
  return b < p.batch ? keys_of_sequence(p, b) : 0;
}

// The tiles of queries of a sequence with a tile of keys.
struct ListKeys {
  int tile;   // the number of the tile of keys in the sequence
  int first;  // the number of the sequence's first tile of queries, over all sequences
  int count;  // how many tiles of queries; 0: the list has no keys
};

CUTE_DEVICE ListKeys keys_of_list(MaskListParams const& p, int list) {
  if (!p.is_packed()) {
    return ListKeys{list, 0, ceil_div(p.queries, p.tile_queries)};
  }
  int const b = sequence_of_list(list, p.lengths.cu_k, p.batch, p.all_keys);
  if (b < 0) {
    return ListKeys{0, 0, 0};
  }
  PackedRows const k = packed_rows(p.lengths.cu_k, nullptr, b, p.all_keys);
  PackedRows const q = packed_rows(p.lengths.cu_q, nullptr, b, p.queries);
  int const tile = list - first_list(k.begin, b);
  bool const exists = tile < min_of(p.tiles(), ceil_div(k.length, kListedKeys));
  return ListKeys{tile, first_list(q.begin, b) * p.tiles_of_list(),
                  exists ? ceil_div(q.length, p.tile_queries) : 0};
}

}  // namespace fa3
