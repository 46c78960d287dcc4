// What the three backward kernels receive: tensor maps, pointers and the numbers that do not change
// during a launch.
#pragma once

#include <cuda.h>

#include "core/problem.h"
#include "core/query_range.h"
#include "core/tile_order.h"

namespace fa3 {

// Of the main kernel.
struct BwdDeviceParams {
  CUtensorMap q;          // (column, position, query head, batch); a box is a tile of queries
  CUtensorMap dout;       // as q
  CUtensorMap k;          // (column, key, KV head, batch); a box is a tile of keys
  CUtensorMap v;          // as k
  CUtensorMap dk;         // as k; a box is the 16 keys of a warp
  CUtensorMap dv;         // as dk
  float const* lse_log2;  // (batch, query head, m_tiles * kTileM)
  float const* delta;     // as lse_log2
  float* dq_sum;          // (batch, query head, m tile, core/dq_layout.h)
  int* dq_flags;          // (batch, query head, m tile, kDqAdders); nullptr: not deterministic
  int* ticket;            // with dq_flags: of the next CTA
  SeqlenPair seqlen;
  int m_tiles;
  int heads_q;
  int group;  // query heads of a KV head
  float softmax_scale;
  float scale_log2;  // softmax_scale * log2(e)
  TileOrder order;   // of tiles of keys

  FA3_HD bool is_deterministic() const { return dq_flags != nullptr; }
};

// Of the kernels before and after it: a CTA has one tile of queries of one head.
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
  int seqlen_q;
  int head_dim;
  int heads_q;
  float softmax_scale;
  FastDiv m_tiles;
  FastDiv heads;
};

}  // namespace fa3
