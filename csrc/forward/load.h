// The producer warp: brings Q, K and V into shared memory, as far ahead as the rings allow. One
// thread of it runs this.
#pragma once

#include "device/tensor_map.h"
#include "forward/storage.h"
#include "forward/work.h"

namespace fa3 {

template <class Traits>
struct FwdProducer {
  static constexpr uint64_t kOnce =
      uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST);  // Q: read by one CTA
  static constexpr uint64_t kOften =
      uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST);  // K, V: read by many

  FwdStorage<Traits>& shared;
  FwdDeviceParams const& p;
  RingState<Traits::kQStages> q_ring;
  RingState<Traits::kStages> k_ring;
  RingState<Traits::kStages> v_ring;

  CUTE_DEVICE FwdProducer(FwdStorage<Traits>& shared_, FwdDeviceParams const& p_)
      : shared(shared_), p(p_) {}

  // In the order in which the consumers ask: the K tile after the one at hand comes before its V,
  // because S(n - 1) is computed beside P(n) V(n); also from one tile to the next.
  // INVARIANT: whatever this kernel reads or writes in global memory comes after these loads, and
  // so after the wait for the launches before.
  CUTE_DEVICE void run() {
    wait_for_earlier_launches();
    TileWalk walk = walk_tiles(p);
    FwdWork work = resolve_tile<Traits>(p, walk.coord());
    load_k(work, work.keys.end - 1);
    load_q(work);
    while (true) {
      for (int n = work.keys.end - 1; n > 0; --n) {
        load_k(work, n - 1);
        load_v(work, n);
      }
      walk.next();
      if (!walk.valid()) {
        break;
      }
      FwdWork const next = resolve_tile<Traits>(p, walk.coord());
      load_k(next, next.keys.end - 1);
      load_v(work, 0);
      load_q(next);
      work = next;
    }
    load_v(work, 0);
    finish();
    allow_later_launches();
  }

  // The tile's coordinates and Q, for each warpgroup.
  CUTE_DEVICE void load_q(FwdWork const& tile) {
    CUTE_UNROLL
    for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
      Mbarrier& full = shared.q_full[q_ring.stage][wg];
      shared.q_empty[q_ring.stage][wg].wait(q_ring.phase ^ 1);
      FwdWork const work = share_of_warpgroup<Traits>(p, tile, wg);
      shared.work[q_ring.stage][wg] = work;
      full.arrive_and_expect_tx(uint32_t(p.q_slice_bytes) * (Traits::kColumns / kSliceColumns));
      CUTE_UNROLL
      for (int column = 0; column < Traits::kColumns; column += kSliceColumns) {
        cute::SM90_TMA_LOAD_5D::copy(&p.q, mbarrier_word(full), kOnce,
                                     &shared.q[q_ring.stage][wg][column * kWarpgroupRows], column,
                                     0, work.position_begin, work.head_group, work.batch);
      }
    }
    q_ring.advance();
  }

  // Tells the warpgroups that there are no more tiles.
  CUTE_DEVICE void finish() {
    CUTE_UNROLL
    for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
      shared.q_empty[q_ring.stage][wg].wait(q_ring.phase ^ 1);
      shared.work[q_ring.stage][wg].keys.end = 0;
      shared.q_full[q_ring.stage][wg].arrive();
    }
  }

  CUTE_DEVICE void load_k(FwdWork const& work, int n) {
    shared.k_empty[k_ring.stage].wait(k_ring.phase ^ 1);
    load_keys<Traits::kColumns>(p.k, shared.k_full[k_ring.stage], shared.k[k_ring.stage], work, n);
    k_ring.advance();
  }

  CUTE_DEVICE void load_v(FwdWork const& work, int n) {
    shared.v_empty[v_ring.stage].wait(v_ring.phase ^ 1);
    load_keys<Traits::kColumnsV>(p.v, shared.v_full[v_ring.stage], shared.v[v_ring.stage], work, n);
    v_ring.advance();
  }

  template <int kColumns>
  CUTE_DEVICE void load_keys(CUtensorMap const& map, Mbarrier& full,
                             typename Traits::Element* target, FwdWork const& work, int n) {
    full.arrive_and_expect_tx(Traits::kTileN * kColumns * sizeof(typename Traits::Element));
    CUTE_UNROLL
    for (int column = 0; column < kColumns; column += kSliceColumns) {
      cute::SM90_TMA_LOAD_4D::copy(&map, mbarrier_word(full), kOften,
                                   target + column * Traits::kTileN, column, n * Traits::kTileN,
                                   work.kv_head, work.batch);
    }
  }

  CUTE_DEVICE static uint64_t* mbarrier_word(Mbarrier& barrier) {
    return reinterpret_cast<uint64_t*>(&barrier);
  }
};

}  // namespace fa3
