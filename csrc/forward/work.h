// A tile of the schedule, resolved: coordinates and K tiles, by the same code for producer,
// consumers and store warps.
#pragma once

#include "core/block_range.h"
#include "forward/params.h"

namespace fa3 {

struct FwdWork {
  int head_group;  // `pack` query heads
  int kv_head;
  int batch;
  int position_begin;  // first query of the tile
  BlockRange keys;     // K tiles
};

template <class Traits>
CUTE_DEVICE FwdWork resolve_tile(FwdDeviceParams const& p, TileCoord tile) {
  int const positions = Traits::kWarpgroups * p.positions_per_warpgroup;
  int const begin = tile.m * positions;
  return FwdWork{tile.head, p.groups_per_kv_head.div(tile.head), tile.batch, begin,
                 block_range(begin, begin + positions, p.seqlen, Traits::kTileN, Traits::kCausal)};
}

// The tiles of this CTA.
CUTE_DEVICE TileWalk walk_tiles(FwdDeviceParams const& p) {
  return TileWalk(p.order, int(blockIdx.x), int(gridDim.x));
}

}  // namespace fa3
