// The work of a CTA: tiles of keys of one KV head, each against the queries of every query head
// that uses it. CTAs of a cluster have the same queries, and neighbouring keys or the same ones.
// One thread computes it and publishes it in shared memory: the consumers have no registers to
// spare.
#pragma once

#include "backward/params.h"
#include "config/bwd_config.h"
#include "core/block_range.h"

namespace fa3 {

struct BwdWork {
  int kv_head;     // -1: no work
  int head_begin;  // query heads
  int head_end;
  int key_begin;  // in the sequence
  QueryRange queries;
  int first_m;  // the tile of queries with which it begins
  SeqlenPair len;
  // Coordinates for TMA (RowDims): the sequence's first query, and the first key.
  int q_row;
  int q_end;
  int k_row;
  int k_end;
  int batch;
  int tile_base;  // tile 0 of the sequence's queries, for head 0, in the workspaces

  CUTE_DEVICE bool has_keys() const { return kv_head >= 0; }

  CUTE_DEVICE bool has_steps() const { return steps() > 0; }

  // 0: no query sees these keys, or there is no work.
  CUTE_DEVICE uint32_t steps() const {
    return uint32_t(head_end - head_begin) * uint32_t(max_of(0, queries.end - queries.begin));
  }
};

// With a mask of lists: a list of tiles of queries for each query head.
struct ListedBwdWork : BwdWork {
  int const* lists;  // the list of query head 0 for this tile; that of head h is h * head_stride on
  int64_t head_stride;

  ListedBwdWork() = default;
  CUTE_DEVICE ListedBwdWork(BwdWork const& work) : BwdWork(work) {}

  CUTE_DEVICE int const* list(int head) const { return lists + head * head_stride; }

  // The first head from one on that has steps.
  CUTE_DEVICE int next_head(int head) const {
    while (head < head_end && list(head)[0] == 0) {
      ++head;
    }
    return head;
  }

  CUTE_DEVICE bool has_steps() const { return next_head(head_begin) < head_end; }

  CUTE_DEVICE uint32_t steps() const {
    uint32_t count = 0;
    for (int head = head_begin; head < head_end; ++head) {
      count += uint32_t(list(head)[0]);
    }
    return has_keys() ? count : 0;
  }
};

template <class Traits>
using BwdWorkOf = cute::conditional_t<Traits::kHasLists, ListedBwdWork, BwdWork>;

template <class Traits>
constexpr bool kServesPacked = !Traits::kKind.is_dense();

template <class Traits>
CUTE_DEVICE bool is_packed(BwdDeviceParams const& p) {
  return kServesPacked<Traits> && p.is_packed();
}

// The order in which CTAs take tiles of keys.
inline TileOrder key_tile_order(FwdProblem const& problem, BwdSchedule const& schedule) {
  return TileOrder(schedule.in_sections, schedule.n_tiles, problem.heads_k, problem.batch,
                   schedule.section_pairs, schedule.least_last_pairs);
}

// The tile at the same positions as the keys, among those that meet them. CTAs that begin there
// seldom want to be the first to add to the same dQ.
CUTE_DEVICE int diagonal_tile(int m, QueryRange const& queries) {
  int const count = queries.end - queries.begin;
  return queries.begin + (count > 0 && m > queries.begin ? (m - queries.begin) % count : 0);
}

// The keys of a CTA: where kTileClusters share a tile, the one with the last keys comes first in
// the order of work.
struct CtaOfTile {
  int cluster;
  int rank;
};

// Tile n of the keys of a KV head, in a sequence with these lengths. Coordinates of the sequence
// are still missing.
template <class Traits>
CUTE_DEVICE BwdWork resolve_tile(BwdDeviceParams const& p, int n, int kv_head, SeqlenPair len,
                                 CtaOfTile cta) {
  constexpr int kKeys = Traits::k.order_keys();
  BwdWork work;
  work.kv_head = kv_head;
  work.head_begin = kv_head * p.group;
  work.head_end = work.head_begin + p.group;
  work.key_begin = n * kKeys + cta.cluster * Traits::k.tile_n() +
                   (Traits::kSplitsColumns ? 0 : cta.rank * Traits::kTileN);
  work.len = len;
  if constexpr (!Traits::kHasLists) {
    work.queries =
        query_range(n * kKeys, len, Traits::kTileM, kKeys, mask_of<Traits::kKind.mask>(p.mask));
    work.first_m = p.is_deterministic || p.dq_is_zeroed
                       ? work.queries.begin
                       : diagonal_tile(n * kKeys / Traits::kTileM, work.queries);
  }
  return work;
}

// Tile n of the keys of a sequence. index: the number of its first tile in all packed sequences.
CUTE_DEVICE void set_lists(BwdWork&, BwdDeviceParams const&, TileCoord, int, int) {}

CUTE_DEVICE void set_lists(ListedBwdWork& work, ListedBwdParams const& p, TileCoord tile, int n,
                           int index) {
  work.lists = p.listed.lists_of(p.is_packed() ? 0 : tile.batch, 0) +
               int64_t(index + n) * p.listed.tile_stride;
  work.head_stride = p.listed.head_stride;
}

template <class Traits>
CUTE_DEVICE BwdWorkOf<Traits> no_work() {
  BwdWorkOf<Traits> none{};
  none.kv_head = -1;
  return none;
}

// The tile of keys with a number in the order of work, which counts from the last tile
// (core/tile_order.h, core/packed_tiles.h). In deterministic mode that is kept, since the last keys
// are added first (add_order.h); otherwise the first keys come first, since under a causal mask
// most queries see them.
CUTE_DEVICE TileCoord tile_of(BwdDeviceParams const& p, int number) {
  TileCoord tile = p.order.coord(number);
  tile.m = p.is_deterministic ? tile.m : p.order.m_tiles - 1 - tile.m;
  return tile;
}

CUTE_DEVICE TileCoord tile_of(ListedBwdParams const& p, int number) {
  return p.is_deterministic ? p.order.coord(number) : p.listed.tile_of(p.order, number, p.group);
}

// The work of the clusters with a number.
template <class Traits>
CUTE_DEVICE BwdWorkOf<Traits> work_of_dense(typename Traits::Params const& p, int number,
                                            CtaOfTile cta) {
  TileCoord const tile = tile_of(p, number);
  int const n = tile.m;
  BwdWorkOf<Traits> work = resolve_tile<Traits>(p, n, tile.head, p.seqlen, cta);
  set_lists(work, p, tile, n, 0);
  work.q_row = 0;
  work.q_end = 0;
  work.k_row = work.key_begin;
  work.k_end = 0;
  work.batch = tile.batch;
  work.tile_base = tile.batch * p.heads_q * p.m_tiles;
  return work;
}

// The work of a CTA on packed sequences. Usually there are more CTAs than tiles.
template <class Traits>
CUTE_DEVICE BwdWorkOf<Traits> work_of_packed(typename Traits::Params const& p, int number,
                                             CtaOfTile cta) {
  int const index = p.tickets.heads.div(number);
  int const sequence = p.tables.sequence_of_tile[index];  // has an entry for every CTA
  if (sequence == PackedTables::kNoTile) {
    return no_work<Traits>();
  }
  SequenceTiles const tiles = p.tables.sequences[sequence];
  Sequence const& s = tiles.sequence;
  TileCoord const tile = p.tickets.coord(tiles, number);
  int const n = p.is_deterministic ? tile.m : tiles.tiles - 1 - tile.m;
  BwdWorkOf<Traits> work = resolve_tile<Traits>(p, n, tile.head, s.len, cta);
  set_lists(work, p, tile, n, s.k_begin / kListedKeys + tile.batch);
  work.q_row = kRowsEnd - s.len.q;
  work.q_end = s.q_begin + s.len.q;
  work.k_row = kRowsEnd - s.len.k + work.key_begin;
  work.k_end = s.k_begin + s.len.k;
  work.batch = kRowsEnd;
  work.tile_base = tiles.row_tile_base;
  return work;
}

// The work of the cluster with a number, for its CTA of a rank.
template <class Traits>
CUTE_DEVICE BwdWorkOf<Traits> work_of_number(typename Traits::Params const& p, int number,
                                             int rank) {
  constexpr int kClusters = Traits::kTileClusters;
  if (number >= p.works) {
    return no_work<Traits>();
  }
  CtaOfTile const cta{kClusters - 1 - number % kClusters, rank};
  number /= kClusters;
  if constexpr (kServesPacked<Traits>) {
    if (p.is_packed()) {
      return work_of_packed<Traits>(p, number, cta);
    }
  }
  return work_of_dense<Traits>(p, number, cta);
}

// The steps of a tile of keys: tiles of queries of one head after the other. There is at least one.
struct BwdSteps {
  BwdWork const* work;
  int head;  // query head
  int m;

  CUTE_DEVICE explicit BwdSteps(BwdWork const& work_)
      : work(&work_), head(work_.head_begin), m(work_.first_m) {}

  CUTE_DEVICE bool valid() const { return head < work->head_end; }

  CUTE_DEVICE bool is_last() const {
    return next_m() == work->first_m && head + 1 == work->head_end;
  }

  CUTE_DEVICE void next() {
    m = next_m();
    head += m == work->first_m ? 1 : 0;
  }

  // Whether the tile of queries needs the mask. Under a full or causal mask only the first ones
  // may.
  template <class Traits>
  CUTE_DEVICE bool is_masked() const {
    return Traits::kKind.mask == MaskKind::kInterval ? work->queries.is_masked(m)
                                                     : m < work->queries.free_begin;
  }

  CUTE_DEVICE static constexpr uint32_t own_flags() { return 0; }
  CUTE_DEVICE int order_number() const { return m; }

  // The index of the tile's rows in the workspaces.
  CUTE_DEVICE int64_t tile(BwdDeviceParams const& p) const {
    return work->tile_base + head * p.m_tiles + m;
  }

 private:
  CUTE_DEVICE int next_m() const {
    return m + 1 == work->queries.end ? work->queries.begin : m + 1;
  }
};

// The steps of a tile of keys with lists: first those without a mask, of each head.
struct ListedSteps {
  ListedBwdWork const* work;
  int head;
  int i = 0;
  int m;

  CUTE_DEVICE explicit ListedSteps(ListedBwdWork const& work_)
      : work(&work_), head(work_.next_head(work_.head_begin)) {
    read();
  }

  CUTE_DEVICE bool valid() const { return head < work->head_end; }

  CUTE_DEVICE bool is_last() const {
    return i + 1 == work->list(head)[0] && work->next_head(head + 1) == work->head_end;
  }

  CUTE_DEVICE void next() {
    if (++i == work->list(head)[0]) {
      i = 0;
      head = work->next_head(head + 1);
    }
    read();
  }

  template <class Traits>
  CUTE_DEVICE bool is_masked() const {
    return i >= work->list(head)[1];
  }

  CUTE_DEVICE uint32_t own_flags() const;
  CUTE_DEVICE int order_number() const { return entry().rank; }

  CUTE_DEVICE int64_t tile(BwdDeviceParams const& p) const {
    return work->tile_base + head * p.m_tiles + m;
  }

 private:
  CUTE_DEVICE QueryEntry entry() const {
    int const* const at = work->list(head) + kListHeader + 2 * i;
    return QueryEntry{at[0], at[1]};
  }

  CUTE_DEVICE void read() { m = valid() ? entry().tile() : 0; }
};

template <class Traits>
using StepsOf = cute::conditional_t<Traits::kHasLists, ListedSteps, BwdSteps>;

// By keys: what the load warp publishes of a step (step_ring.h).
struct BwdStep {
  static constexpr uint32_t kBuffer = 1;           // the buffer of K, and that of
  static constexpr uint32_t kBufferBefore = 2;     // the step before,
  static constexpr uint32_t kBufferTwoBefore = 4;  // and the one before that
  static constexpr uint32_t kIsFirst = 8;          // the first of its tile of keys
  static constexpr uint32_t kIsLast = 16;          // the last
  static constexpr uint32_t kFollowsFirst = 32;    // follows the first of a later tile
  static constexpr uint32_t kIsMasked = 64;
  static constexpr uint32_t kNone = 128;    // there is no step; the one before was the last
  static constexpr int kFirstBlockBit = 8;  // with lists: QueryEntry::bits(), then its rank
  static constexpr int kFirstRankBit = kFirstBlockBit + kListBlockBits;

  uint32_t flags;
  int tile;  // the tile of keys, among those of the CTA
  int rows;  // the tile of queries, in the workspaces
  int m;     // the same, in the sequence
};

CUTE_DEVICE uint32_t ListedSteps::own_flags() const {
  QueryEntry const own = entry();
  return uint32_t(own.bits()) << BwdStep::kFirstBlockBit | uint32_t(own.rank)
                                                               << BwdStep::kFirstRankBit;
}

constexpr int kStepSlots = 8;
constexpr int kWorkSlots = 4;

// Deterministic mode: how many clusters add to the dQ of a step before this one. The tiles of keys
// that meet a tile of queries are those that a forward pass over that tile would visit; the last
// one adds first. With lists m is QueryEntry::rank, the number of tiles.
template <class Traits>
CUTE_DEVICE int predecessors(BwdDeviceParams const& p, BwdWork const& work, int m) {
  if constexpr (Traits::kHasLists) {
    constexpr int kClusters = Traits::kTileClusters;
    int const cluster = work.key_begin / Traits::k.tile_n() % kClusters;
    return m * kClusters + (kClusters - 1 - cluster);
  } else {
    constexpr int kKeys = Traits::k.tile_n();
    int const position = m * Traits::kTileM;
    BlockRange const keys = block_range(position, position + Traits::kTileM, work.len, kKeys,
                                        mask_of<Traits::kKind.mask>(p.mask));
    return keys.end - 1 - work.key_begin / kKeys;
  }
}

}  // namespace fa3
