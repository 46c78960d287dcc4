// Host side of the kernels that make the lists of an AttentionMask (core/key_list.h) from its
// intervals and blocks. The op `mask_lists` calls it.
#pragma once

#include "core/key_list.h"
#include "core/packed_tiles.h"

namespace fa3 {

constexpr int kMaskBlock = 64;  // queries and keys of a block
constexpr int kWordBits = 32;

// Bits of 32 blocks of keys, for each half of the queries of a list: some query sees some key;
// every query sees all 64 keys.
struct alignas(16) SeenBlocks {
  uint32_t some[2];
  uint32_t all[2];
};

// Bits of 32 tiles of 128 keys, for a tile of queries of the backward.
struct alignas(32) QueryMarks {
  uint32_t listed;
  uint32_t free;
  int later;  // how many tiles after these are listed
  int unused;
  uint32_t shown[kListBlockBits];  // one word for each bit of ListEntry
};

struct MaskListParams {
  // Dense: seqlen_q and seqlen_k. Packed: total_q, the most keys that a sequence has, and total_k.
  int queries = 0;
  int keys = 0;
  int all_keys = 0;
  int batch = 1;
  int heads = 1;          // that have lists of their own
  PackedLengths lengths;  // packed: cu_q and cu_k
  int tile_keys = 0;
  int tile_rows = kListedRows;  // queries of a list of K tiles; packed: kListedRows
  int tile_queries = 0;         // queries of a tile of the backward; 0: it gets no lists

  // Strides in elements: of batch, row, interval, end.
  int const* intervals = nullptr;
  int64_t interval_stride[4] = {};
  int interval_count = 0;  // intervals of each query; 0: queries see all keys
  int interval_batch = 0;
  int* rows = nullptr;         // (interval_batch, queries, 4): disjoint, inside of the sequence
  SeenBlocks* seen = nullptr;  // (interval_batch, lists, words of blocks)

  // Strides in bytes: of batch, head, block of queries, block of keys.
  bool has_blocks = false;  // false: all are visible
  uint8_t const* blocks = nullptr;
  int64_t block_stride[4] = {};
  int block_rows = 0;
  int block_columns = 0;
  int sharing_heads = 1;  // heads of the lists for each head of the blocks

  int* key_lists = nullptr;     // (list_batch, heads, lists, kListHeader + tiles)
  int* query_lists = nullptr;   // the same, of the backward, with two ints a tile
  QueryMarks* marks = nullptr;  // (list_batch, heads, words of tiles, tiles of queries)

  FA3_HD bool is_packed() const { return lengths.cu_q != nullptr; }
  FA3_HD int list_batch() const { return is_packed() ? 1 : batch; }
  // Packed: with those of rows after the last sequence, whose number in the batch is `batch`.
  FA3_HD int lists() const {
    return is_packed() ? queries / kListedRows + batch + 1 : ceil_div(queries, tile_rows);
  }
  FA3_HD int tiles() const { return max_of(1, ceil_div(keys, tile_keys)); }
  FA3_HD int tile_words() const { return ceil_div(tiles(), kWordBits); }
  FA3_HD int block_words() const { return ceil_div(tiles() * (tile_keys / kMaskBlock), kWordBits); }
  FA3_HD int query_list_count() const {
    return is_packed() ? all_keys / kListedKeys + batch + 1 : ceil_div(keys, kListedKeys);
  }
  FA3_HD int query_tiles() const { return max_of(1, ceil_div(queries, tile_queries)); }
  FA3_HD int tiles_of_list() const { return tile_queries > 0 ? kListedRows / tile_queries : 0; }
};

// Launches on the current device and the given stream (a cudaStream_t).
void launch_mask_lists(MaskListParams const& params, void* stream);

}  // namespace fa3
