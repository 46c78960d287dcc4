// What the kernel receives: tensor maps and the numbers that do not change during a launch.
#pragma once

#include <cuda.h>

#include "core/mask_limits.h"
#include "core/tile_order.h"

namespace fa3 {

struct FwdDeviceParams {
  CUtensorMap q;  // (column, packed head, position, head group, batch)
  CUtensorMap k;  // (column, key, KV head, batch)
  CUtensorMap v;  // (column, key, KV head, batch)
  CUtensorMap o;  // as q
  float* lse;     // (batch, heads_q, seqlen_q); nullptr: not wanted
  SeqlenPair seqlen;
  int heads_q;
  float softmax_scale;
  float scale_log2;   // softmax_scale * log2(e)
  int q_slice_bytes;  // what one TMA box of Q brings: fewer than 64 rows when the packing does not
                      // fill them
  int positions_per_warpgroup;
  FastDiv pack;  // query heads in the rows of a tile
  FastDiv groups_per_kv_head;
  TileOrder order;
};

}  // namespace fa3
