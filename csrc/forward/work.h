// A tile of the schedule, resolved: coordinates and K tiles. The producer works it out and hands it
// to the warpgroups that compute and store it, through shared memory, together with Q.
#pragma once

#include "core/block_range.h"
#include "forward/params.h"

namespace fa3 {

struct alignas(16) FwdWork {
  int head_group;  // `pack` query heads
  int kv_head;
  int batch;
  int position_begin;  // first query: of the tile, or of one warpgroup in it
  BlockRange keys;     // K tiles, at least one; none: there are no more tiles

  CUTE_DEVICE bool valid() const { return keys.end > 0; }
};

// INVARIANT: the grid has at most as many CTAs as there are tiles, so that each CTA has one.

template <class Traits>
CUTE_DEVICE FwdWork resolve_tile(FwdDeviceParams const& p, TileCoord tile) {
  int const positions = Traits::kWarpgroups * p.positions_per_warpgroup;
  int const begin = tile.m * positions;
  BlockRange keys =
      block_range(begin, begin + positions, p.seqlen, Traits::kTileN, Traits::kCausal);
  // A tile that sees no key visits one K tile, masked as a whole: no role needs a case of its own.
  keys.end = max_of(keys.end, 1);
  return FwdWork{tile.head, p.groups_per_kv_head.div(tile.head), tile.batch, begin, keys};
}

// The share of one warpgroup: K tiles that all of its own rows see need no mask.
template <class Traits>
CUTE_DEVICE FwdWork share_of_warpgroup(FwdDeviceParams const& p, FwdWork work, int warpgroup) {
  work.position_begin += warpgroup * p.positions_per_warpgroup;
  int const end = work.position_begin + p.positions_per_warpgroup;
  work.keys.free_end =
      block_range(work.position_begin, end, p.seqlen, Traits::kTileN, Traits::kCausal).free_end;
  return work;
}

// The tiles of this CTA.
CUTE_DEVICE TileWalk walk_tiles(FwdDeviceParams const& p) {
  return TileWalk(p.order, int(blockIdx.x), int(gridDim.x));
}

}  // namespace fa3
