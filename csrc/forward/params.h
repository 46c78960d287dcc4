// The parameters of the kernel: tensor maps and the numbers that do not change during a launch.
//
// TMA treats packed sequences like dense ones (launch/tensor_map.h): rows after a
// sequence read as zeros and are not written.
#pragma once

#include <cuda.h>

#include "core/cache_keys.h"
#include "core/mask_limits.h"
#include "core/packed_tiles.h"
#include "core/problem.h"
#include "core/tile_order.h"

namespace fa3 {

// O as OutputKind::kRegisters writes it: 16-bit elements, strides in elements.
struct OutputView {
  uint16_t* data;
  int64_t batch_stride;
  int64_t row_stride;
  int64_t head_stride;
  int columns;
};

struct FwdDeviceParams {
  CUtensorMap q;       // (column, head, position, batch, end)
  CUtensorMap k;       // (column, key, KV head, batch, end)
  CUtensorMap v;       // as k
  CUtensorMap o;       // as q
  float* lse;          // (batch, lse_heads, seqlen_q) or (lse_heads, total_q); nullptr: none
  float* max_logits;   // as lse
  float const* sinks;  // (heads_q); nullptr: none
  SeqlenPair seqlen;   // packed: of all sequences together
  int lse_heads;
  float softmax_scale;      // with a softcap: the cap
  float scale_log2;         // softmax_scale * log2(e)
  float softcap_scale;      // softmax_scale / softcap
  int zero;                 // 0, unknown to ptxas (softmax.h)
  float lazy_rescale_log2;  // general kernels; 0 where row maxima are wanted
  int q_slice_bytes;  // what one TMA box of Q brings: fewer than 64 rows when the packing does not
                      // fill them
  int positions_per_warpgroup;
  int lead;        // dense: lead_positions(), or 0
  int least_lead;  // packed: a sequence whose lead_positions() are fewer has a lead of 0
  FastDiv pack;    // query heads in the rows of a tile
  FastDiv groups_per_kv_head;
  IntervalMask mask;  // used with MaskKind::kInterval
  // With ScalesKind::kBlocks.
  OutputView out;
  ScaleView q_scale;
  ScaleView k_scale;
  ScaleView v_scale;
  int scale_batches;  // larger than the index of any sequence
  bool out_is_half;   // else bfloat16
  TileOrder order;    // dense, as are the number of tiles and the counter
  int tiles;
  int* ticket_counter;
  TicketOrder tickets;  // packed, as are the tables
  PackedTables tables;

  FA3_HD bool is_packed() const { return tables.header != nullptr; }
};

// The parameters of a kernel that folds parts of the keys.
struct FoldDeviceParams : FwdDeviceParams {
  int part_tiles;  // K tiles of a part
  float4* totals;  // (CTA, warpgroup, kTotalFours of folded_parts.h, thread)
};

// The parameters of a kernel with a mask of lists.
struct ListDeviceParams : FwdDeviceParams {
  MaskLists listed;
};

// The parameters of a kernel on a cache.
struct CacheDeviceParams : FwdDeviceParams {
  CacheLengths lengths;
  CacheLine line;
  int const* page_table;  // nullptr: entries of a dense cache
  int64_t table_stride;
  int entries;  // pages, or entries of a dense cache
  FastDiv page_size;
  bool is_chosen;     // queries choose their keys: CacheProblem::is_chosen
  int box_keys;       // keys of one TMA box, a divisor of page and K tile; 0: rows are gathered
  TensorView k_rows;  // strides in bytes; for gathering
  TensorView v_rows;
  int row_bytes_k;
  int row_bytes_v;
  uint64_t hint;      // L2 policy for K and V loads
  uint4 const* tree;  // a row of bits for each query (core/tree_mask.h); nullptr: none
  int tree_stride;    // rows of a batch entry; 0 with packed queries
  bool folds;         // parts are not divided by their sums, and are folded (folded_parts.h)
  // For each slot of a part: its rows of O and their LSEs; the LSEs of a group of parts that begins
  // with it; and how many parts of its output tile, or of its group, are complete. A decode kernel
  // has an order of its own (decode/combine.h).
  float* parts;       // (slots, rows, Dv), in the order of cache/parts.h
  float* part_lses;   // (slots, rows); with `folds` maxima of scores
  float* group_lses;  // (slots, rows); with `folds` sums
  int* arrived;       // (2, slots, warpgroups)
  int slots;
  int part_rows;
  // Scales by (page, KV head) of a cache that is converted; batch_stride is that of a page.
  ScaleView k_page_scale;  // nullptr: k_scale and v_scale hold
  ScaleView v_page_scale;
  FastDiv keys_of_scale;  // box_keys, or 1

  FA3_HD bool has_page_scales() const { return k_page_scale.data != nullptr; }
  FA3_HD bool has_packed_queries() const { return lengths.packed.cu_q != nullptr; }
};

}  // namespace fa3
