// A mask as lists: the K tiles that a tile of queries visits, and which of them need the mask
// (flash_attn3/ops/mask_lists.py makes them).
//
// A list is int32: the number of entries, the number of free entries, two elements of an order,
// then the entries, free ones first. A K tile is free if all queries of the tile see all of its
// keys, so it needs no mask. The order: list i of a head names the list that is the i-th longest of
// the head, then how many of its lists are outliers, more than four times as long as the mean.
#pragma once

#include "core/block_range.h"
#include "core/tile_order.h"

namespace fa3 {

constexpr int kListedRows = 128;   // queries of a tile
constexpr int kListedBlock = 64;   // the same in kernels for blocks of 64 x 64, of dense batches
constexpr int kListHeader = 4;     // ints before the entries
constexpr int kListBlockBits = 4;  // low bits of an entry, one a block; the rest is the tile

// The bits say which blocks of 64 queries and 64 keys are visible, before the intervals of rows.
struct ListEntry {
  int word;

  FA3_HD constexpr int tile() const { return word >> kListBlockBits; }

  // The bits of the lower and the upper 64 keys for one half of the queries.
  FA3_HD constexpr int halves(int half_of_queries) const { return word >> 2 * half_of_queries & 3; }
};

// Takes the place of BlockRange: visits are numbers of entries, from the last down to 0.
struct KeyList {
  int const* entries;
  int begin;
  int free_begin;
  int free_end;
  int end;

  // INVARIANT: a list has at least one entry, which may be hidden from all queries.
  FA3_HD static KeyList at(int const* list) {
    return KeyList{list + kListHeader, 0, 0, list[1], list[0]};
  }

  FA3_HD int count() const { return end; }
  FA3_HD int first() const { return end - 1; }
  FA3_HD static constexpr int last() { return 0; }
  FA3_HD ListEntry entry(int n) const { return ListEntry{entries[n]}; }
  FA3_HD int tile(int n) const { return entry(n).tile(); }
  FA3_HD static constexpr int next(int n) { return n - 1; }
  FA3_HD static constexpr void advance(int& n) { --n; }

  FA3_HD KeyList visits_with(SkippedTiles const&) const { return *this; }
  FA3_HD int count_with(SkippedTiles const&) const { return count(); }
};

// An entry of a backward list, which names the tiles of queries that visit a tile of keys, for one
// query head: a tile, its bits as in ListEntry, and its rank: how many later tiles of keys visit
// the same queries. The deterministic mode adds to dQ in the order of ranks.
constexpr int kListedKeys = 128;  // keys of a tile in the backward
struct QueryEntry {
  int word;
  int rank;

  FA3_HD constexpr int tile() const { return word >> kListBlockBits; }
  FA3_HD constexpr int bits() const { return word & ((1 << kListBlockBits) - 1); }
};

// The lists of a call, and the intervals of its rows; strides are 0 where all share one. In
// packed sequences, tile m of sequence b has list number cu_seqlens_q[b] / kListedRows + b + m.
struct MaskLists {
  int const* lists = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int tile_stride = 0;
  int const* rows = nullptr;      // (queries, 4): two intervals of keys; nullptr: all keys
  int64_t rows_batch_stride = 0;  // in ints

  FA3_HD int const* lists_of(int batch, int head) const {
    return lists + batch * batch_stride + head * head_stride;
  }

  // Dense batches: the tile with a number in the order of work; m is that of its list. heads: query
  // heads of a head of `order`; the lists of the first stand for all.
  FA3_HD TileCoord tile_of(TileOrder const& order, int number, int heads) const {
    TileCoord tile = listed_tile(order, lists[3], number);
    tile.m = lists_of(tile.batch, tile.head * heads)[int64_t(tile.m) * tile_stride + 2];
    return tile;
  }
};

}  // namespace fa3
