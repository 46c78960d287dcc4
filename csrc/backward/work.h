// What a CTA works on: a tile of keys of one KV head, against the queries of every head that uses
// it. CTAs of a cluster have neighbouring keys, and the same queries. One thread works it out and
// leaves it in shared memory: the consumers have no registers to spare.
#pragma once

#include "backward/params.h"
#include "config/bwd_config.h"

namespace fa3 {

struct BwdWork {
  int kv_head;
  int head_begin;  // query heads
  int head_end;
  int batch;
  int key_begin;
  QueryRange queries;

  CUTE_DEVICE uint32_t steps() const {
    return uint32_t(head_end - head_begin) * uint32_t(queries.end - queries.begin);
  }
};

// The order in which CTAs take tiles of keys. Deterministic: in sections, for full attention too,
// so that the CTAs that start together wait for each other over many heads instead of one.
inline TileOrder key_tile_order(FwdProblem const& problem, BwdSchedule const& schedule) {
  return TileOrder(problem.causal || problem.deterministic, schedule.n_tiles, problem.heads_k,
                   problem.batch, schedule.section_pairs);
}

// The work of the cluster with a number in the order of work, for its CTA of a rank. Causal: the
// first keys are seen by most queries, so they come first (TileOrder counts from the longest tile).
// Deterministic: the last keys come first, because they are added first (turns.h).
template <class Traits>
CUTE_DEVICE BwdWork work_of_cta(BwdDeviceParams const& p, int number, int rank) {
  constexpr int kSize = Traits::kClusterSize;
  constexpr int kKeys = Traits::kTileN * kSize;
  TileCoord const tile = TileWalk(p.order, number, int(gridDim.x) / kSize).coord();
  int const n = p.is_deterministic() ? tile.m : p.order.m_tiles - 1 - tile.m;
  int const tile_begin = n * kKeys;
  return BwdWork{tile.head,
                 tile.head * p.group,
                 (tile.head + 1) * p.group,
                 tile.batch,
                 tile_begin + rank * Traits::kTileN,
                 query_range(tile_begin, p.seqlen, Traits::kTileM, kKeys, Traits::kCausal)};
}

// The steps of a CTA: tiles of queries of one head after the other. There is at least one.
struct BwdSteps {
  BwdWork const& work;
  int head;  // query head
  int m;

  CUTE_DEVICE explicit BwdSteps(BwdWork const& work_)
      : work(work_), head(work_.head_begin), m(work_.queries.begin) {}

  CUTE_DEVICE bool valid() const { return head < work.head_end; }

  CUTE_DEVICE void next() {
    if (++m == work.queries.end) {
      m = work.queries.begin;
      ++head;
    }
  }

  CUTE_DEVICE bool is_masked() const { return m < work.queries.free_begin; }

  // Counts tiles of queries over all heads and batches: the place of their rows in the workspaces.
  CUTE_DEVICE int64_t tile(BwdDeviceParams const& p) const {
    return (int64_t(work.batch) * p.heads_q + head) * p.m_tiles + m;
  }
};

}  // namespace fa3
