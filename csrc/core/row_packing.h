// How the 64 rows of a consumer warpgroup are filled with queries.
//
// Without packing a row is one position of one query head. With `pack` > 1 the query heads that
// share a KV head become extra rows: row r of a warpgroup holds position r / pack, head r % pack of
// its head group. 64 / pack positions fit. If pack does not divide 64, the remaining rows are
// computed and dropped.
#pragma once

#include "core/int_math.h"

namespace fa3 {

constexpr int kWarpgroupRows = 64;

struct RowPacking {
  int pack = 1;  // query heads in the rows of a tile; divides heads_q / heads_k and is at most 64

  FA3_HD constexpr int positions_per_warpgroup() const { return kWarpgroupRows / pack; }

  FA3_HD constexpr int positions_per_tile(int warpgroups) const {
    return warpgroups * positions_per_warpgroup();
  }
};

// The positions by which the tiles of a sequence begin before its first query. Where later queries
// see more keys, the partly empty tile should be the first one, which costs least. Only whole
// warpgroups move, so that the rows of a warpgroup are the same as without a lead.
FA3_HD constexpr int lead_positions(int tiles, int seqlen_q, int warpgroups, int per_warpgroup) {
  int const missing = tiles * warpgroups * per_warpgroup - seqlen_q;
  int lead = 0;
  for (int empty = 1; empty < warpgroups; ++empty) {
    lead += missing >= empty * per_warpgroup ? per_warpgroup : 0;
  }
  return lead;
}

// The largest pack the rows can take: the largest divisor of `group` (query heads per KV head) that
// is at most 64.
constexpr int largest_pack(int group) {
  int best = 1;
  for (int d = 1; d <= kWarpgroupRows && d <= group; ++d) {
    if (group % d == 0) {
      best = d;
    }
  }
  return best;
}

}  // namespace fa3
