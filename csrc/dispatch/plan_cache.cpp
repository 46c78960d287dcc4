#include "dispatch/plan_cache.h"

#include <algorithm>
#include <cstdlib>

#include "core/packed_tiles.h"
#include "core/row_packing.h"
#include "dispatch/variants.h"

namespace fa3 {
namespace {

KeySplits splits_of(CacheProblem const& cache, int tile_n) {
  KeySplits splits;
  if (cache.split_size > 0) {
    splits.kind = SplitKind::kSize;
    splits.count = ceil_div(cache.split_size, tile_n);
  } else if (cache.num_splits > 0) {
    splits.kind = SplitKind::kParts;
    splits.count = cache.num_splits;
  }
  return splits;
}

// Parts that there may be, of all output tiles. tiles: output tiles.
int64_t most_parts(CacheProblem const& cache, KeySplits const& splits, int64_t tiles, int tile_n,
                   int grid) {
  if (splits.is_even()) {
    return 2 * int64_t(grid);
  }
  int const k_tiles = max_of(1, ceil_div(cache.capacity, tile_n));
  int const of_tile = splits.kind == SplitKind::kParts ? min_of(splits.count, k_tiles)
                                                       : splits.units(k_tiles);
  return of_tile == 1 ? 1 : tiles * of_tile;
}

}  // namespace

FwdPlan plan_cache(FwdProblem const& problem) {
  FwdPlan plan;
  plan.variant = fwd_candidates(problem).variant[0];
  FwdConfig const& config = kFwdVariants[plan.variant];
  FwdSchedule& schedule = plan.schedule;
  int const group = problem.heads_q / problem.heads_k;
  schedule.pack = problem.pack_gqa == PackGqa::kNever ? 1 : largest_pack(group);
  RowPacking const rows{schedule.pack};
  int const positions = rows.positions_per_tile(config.consumer_warpgroups);
  schedule.m_tiles = ceil_div(problem.seqlen_q, positions);
  int64_t const of_head = problem.is_packed
                              ? most_tiles(problem.total_q, problem.batch, positions)
                              : int64_t(schedule.m_tiles) * problem.batch;
  int64_t const tiles = of_head * (problem.heads_q / schedule.pack);
  int const sms = std::max(1, problem.device.sm_count - problem.sm_margin);
  schedule.grid = sms * config.ctas_per_sm;
  CacheSchedule& cache = schedule.cache;
  cache.splits = splits_of(problem.cache, config.tile_n);
  char const* const least = std::getenv("FA3_LEAST");
  cache.least_units = least ? std::atoi(least) : 2;
  cache.slots = most_parts(problem.cache, cache.splits, tiles, config.tile_n, schedule.grid);
  // Rows of a part are counted as those of a tile.
  int const all_rows = config.consumer_warpgroups * kWarpgroupRows;
  bool const is_short = !problem.is_packed && problem.seqlen_q < rows.positions_per_warpgroup();
  cache.rows = is_short ? problem.seqlen_q * schedule.pack : all_rows;
  return plan;
}

}  // namespace fa3
