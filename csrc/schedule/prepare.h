// The kernel that precedes the others for packed sequences: it fills the tables of
// core/packed_tiles.h. Host side; the ops call it.
#pragma once

#include "core/packed_tiles.h"

namespace fa3 {

// The most expensive sequences come first. The forward schedules tiles of queries, whose cost is
// keys. The backward schedules tiles of keys, whose cost is queries, and also numbers the tiles of
// queries.
struct PrepareParams {
  PackedLengths lengths;
  int batch = 0;
  int entries = 0;  // FwdProblem::entries()
  int total_q = 0;
  int total_k = 0;
  int tile_positions = 0;  // queries of a tile
  int tile_keys = 0;       // backward: keys of a tile; else 0
  // forward: the most keys that a tile visits under the mask; more keys of a sequence cost nothing
  int most_keys = 0;
  int most_queries = 0;  // backward: the same for queries
  PackedTables tables;

  FA3_HD constexpr bool schedules_keys() const { return tile_keys > 0; }
};

inline PrepareParams prepare_params(BwdParams const& params) {
  FwdProblem const& problem = params.problem;
  BwdSchedule const& schedule = params.schedule;
  PrepareParams prepare;
  prepare.lengths = params.lengths;
  prepare.batch = problem.batch;
  prepare.entries = problem.entries();
  prepare.total_q = problem.total_q;
  prepare.total_k = problem.total_k;
  prepare.tile_positions = schedule.tile_m;
  prepare.tile_keys = schedule.tile_n;
  prepare.most_queries = schedule.most_queries;
  prepare.tables = PackedTables::in(params.tables, schedule.n_tiles, schedule.m_tiles);
  return prepare;
}

// Launches on the current device and the given stream (a cudaStream_t).
void launch_prepare(PrepareParams const& params, void* stream);

}  // namespace fa3
