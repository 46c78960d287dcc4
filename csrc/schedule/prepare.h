// Host side of the kernel that runs before the others for packed sequences and fills the tables of
// core/packed_tiles.h. The ops call it.
#pragma once

#include "core/packed_tiles.h"
#include "core/row_packing.h"

namespace fa3 {

// The most expensive sequences come first. The forward schedules query tiles, whose cost is their
// keys. The backward schedules key tiles, whose cost is their queries, and also numbers the query
// tiles.
struct PrepareParams {
  PackedLengths lengths;
  int batch = 0;
  int entries = 0;  // FwdProblem::entries()
  int total_q = 0;
  int total_k = 0;
  int tile_positions = 0;  // queries per tile
  int tile_keys = 0;       // backward: keys per tile; else 0
  // forward: the most keys that a tile visits under the mask; further keys cost nothing
  int most_keys = 0;
  int most_queries = 0;  // backward: the most queries that a tile visits
  PackedTables tables;

  FA3_HD constexpr bool schedules_keys() const { return tile_keys > 0; }
};

// What the tables of the forward and of the backward have in common.
inline PrepareParams prepare_params(FwdProblem const& problem, PackedLengths const& lengths) {
  PrepareParams prepare;
  prepare.lengths = lengths;
  prepare.batch = problem.batch;
  prepare.entries = problem.entries();
  prepare.total_q = problem.total_q;
  prepare.total_k = problem.total_k;
  return prepare;
}

inline PrepareParams prepare_params(FwdParams const& params, int consumer_warpgroups) {
  FwdSchedule const& schedule = params.schedule;
  IntervalMask const& mask = params.problem.mask;
  int const positions = RowPacking{schedule.pack}.positions_per_tile(consumer_warpgroups);
  PrepareParams prepare = prepare_params(params.problem, params.lengths);
  prepare.tile_positions = positions;
  int64_t const seen = int64_t(mask.left) + mask.right + positions;
  int64_t const in_chunk =
      mask.is_chunked ? int64_t(mask.chunk.divisor) + positions : int64_t(IntervalMask::kNoLimit);
  prepare.most_keys = int(min_of(seen, in_chunk));
  int const tiles_of_head = schedule.tiles / (params.problem.heads_q / schedule.pack);
  prepare.tables = PackedTables::in(params.workspace, tiles_of_head);
  return prepare;
}

inline PrepareParams prepare_params(BwdParams const& params) {
  BwdSchedule const& schedule = params.schedule;
  PrepareParams prepare = prepare_params(params.problem, params.lengths);
  prepare.tile_positions = schedule.tile_m;
  prepare.tile_keys = schedule.tile_n;
  prepare.most_queries = schedule.most_queries;
  prepare.tables = PackedTables::in(params.tables, schedule.n_tiles, schedule.m_tiles);
  return prepare;
}

// Launches on the current device and the given stream (a cudaStream_t).
void launch_prepare(PrepareParams const& params, void* stream);

}  // namespace fa3
