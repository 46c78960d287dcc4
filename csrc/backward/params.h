// The parameters of the backward kernels: tensor maps, pointers and the numbers that do not change
// during a launch.
//
// TMA treats packed sequences like dense ones (launch/tensor_map.h): rows after a
// sequence read as zeros and are not written.
//
// In the workspaces rows are padded to whole tiles, with the shape (batch, query head, m_tiles,
// tile); for packed sequences (query head, m_tiles, tile), with the tiles of a head as RowTile
// counts them.
#pragma once

#include <cuda.h>

#include "core/key_list.h"
#include "core/packed_tiles.h"
#include "backward/query_range.h"
#include "core/tile_order.h"

namespace fa3 {

// The main kernel.
struct BwdDeviceParams {
  // (column, position, query head, batch) and, in a general variant, the end; a box is a tile of
  // queries
  CUtensorMap q;
  CUtensorMap dout;       // as q
  CUtensorMap k;          // (column, key, KV head, batch ..); a box is a tile of keys
  CUtensorMap v;          // as k
  CUtensorMap dk;         // as k; a box is the 16 keys of a warp
  CUtensorMap dv;         // as dk
  float const* lse_log2;  // workspace: a row is a float
  float const* delta;     // as lse_log2
  float* dq_sum;          // workspace: a tile as in config/dq_layout.h
  int* dq_flags;          // workspace: kDqAdders flags a tile (add_order.h)
  int* ticket;            // workspace: the next number in the order of work
  SeqlenPair seqlen;      // packed: of all sequences together
  int works;              // numbers in the order of work
  int m_tiles;
  int heads_q;
  int group;  // query heads of a KV head
  bool is_deterministic;
  bool dq_is_zeroed;
  float softmax_scale;
  float scale_log2;     // (the softcap, or else softmax_scale) * log2(e)
  float softcap_scale;  // softmax_scale / softcap
  IntervalMask mask;    // used by general variants
  TileOrder order;      // the order of tiles of keys
  TicketOrder tickets;  // packed: the same order; with the tables
  PackedTables tables;

  FA3_HD bool is_packed() const { return tables.header != nullptr; }
};

// With a mask of lists: the tiles of queries that visit each tile of keys.
struct ListedBwdParams : BwdDeviceParams {
  MaskLists listed;
};

// The kernels before and after it: a CTA has one tile of queries of one head.
struct BwdRowParams {
  TensorView o;
  TensorView dout;
  TensorView dq;
  float const* lse;
  float const* dlse;
  float* lse_log2;
  float* delta;
  float* dq_sum;
  int* dq_flags;
  int* ticket;
  bool dq_is_zeroed;
  RowTile const* row_tiles;  // packed; else nullptr
  int seqlen_q;              // packed: total_q
  int head_dim;              // q and dQ
  int head_dim_v;            // O and dO
  int heads_q;
  float softmax_scale;
  FastDiv m_tiles;
  FastDiv heads;
};

// The kernel that sums the gradients of sinks: a CTA has one head.
struct BwdSinkParams {
  float const* sinks;
  float* dsinks;
  float const* lse_log2;
  float const* delta;
  int heads_q;
  int fours;        // float4s of rows of a head, over all batch entries
  FastDiv m_fours;  // the same in one batch entry
};

}  // namespace fa3
