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

  CUTE_DEVICE void run() {
    for (TileWalk walk = walk_tiles(p); walk.valid(); walk.next()) {
      load_tile(resolve_tile<Traits>(p, walk.coord()));
    }
  }

  // K of the next tile comes before its V: S(n - 1) is computed beside P(n) V(n).
  CUTE_DEVICE void load_tile(FwdWork const& work) {
    int n = work.keys.end - 1;
    if (n >= 0) {
      load_k(work, n);
    }
    load_q(work);
    for (; n > 0; --n) {
      load_k(work, n - 1);
      load_v(work, n);
    }
    if (n == 0) {
      load_v(work, 0);
    }
  }

  CUTE_DEVICE void load_q(FwdWork const& work) {
    CUTE_UNROLL
    for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
      Mbarrier& full = shared.q_full[q_ring.stage][wg];
      shared.q_empty[q_ring.stage][wg].wait(q_ring.phase ^ 1);
      full.arrive_and_expect_tx(uint32_t(p.q_slice_bytes) * (Traits::kHeadDim / kBoxColumns));
      CUTE_UNROLL
      for (int column = 0; column < Traits::kHeadDim; column += kBoxColumns) {
        cute::SM90_TMA_LOAD_5D::copy(&p.q, mbarrier_word(full), kOnce,
                                     &shared.q[q_ring.stage][wg][column * kWarpgroupRows], column,
                                     0, work.position_begin + wg * p.positions_per_warpgroup,
                                     work.head_group, work.batch);
      }
    }
    q_ring.advance();
  }

  CUTE_DEVICE void load_k(FwdWork const& work, int n) {
    shared.k_empty[k_ring.stage].wait(k_ring.phase ^ 1);
    load_keys<Traits::kHeadDim>(p.k, shared.k_full[k_ring.stage], shared.k[k_ring.stage], work, n);
    k_ring.advance();
  }

  CUTE_DEVICE void load_v(FwdWork const& work, int n) {
    shared.v_empty[v_ring.stage].wait(v_ring.phase ^ 1);
    load_keys<Traits::kHeadDimV>(p.v, shared.v_full[v_ring.stage], shared.v[v_ring.stage], work, n);
    v_ring.advance();
  }

  template <int kColumns>
  CUTE_DEVICE void load_keys(CUtensorMap const& map, Mbarrier& full,
                             typename Traits::Element* target, FwdWork const& work, int n) {
    full.arrive_and_expect_tx(Traits::kTileN * kColumns * sizeof(typename Traits::Element));
    CUTE_UNROLL
    for (int column = 0; column < kColumns; column += kBoxColumns) {
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
