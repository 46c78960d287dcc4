// The producer warp of a kernel on a cache: its lanes read the lengths and the page table together,
// and each lane issues the copies of its own box. Where rows are gathered, several warps do all of
// this together, each for its own rows. All lanes run it.
#pragma once

#include "forward/cache/cache_batch.h"
#include "forward/slots.h"
#include "forward/storage.h"

namespace fa3 {

template <class Traits>
struct CacheProducer {
  using Work = FwdWork<Traits>;
  using Slots = FwdSlots<Traits>;
  using Keys = typename Slots::Keys;
  using LoadedKeys = typename Slots::LoadedKeys;
  using Values = typename Slots::Values;
  static constexpr bool kIsWholeWarp = true;

  // Warps that run this: several where they gather rows.
  CUTE_DEVICE static int warps(CacheDeviceParams const& p) { return Keys::loading_warps(p); }

  FwdStorage<Traits>& shared;
  CacheDeviceParams const& p;
  int warp;
  RingState<Traits::kQStages> q_ring;
  RingState<Traits::kKeyStages> k_ring;
  RingState<Traits::kValueStages> v_ring;

  CUTE_DEVICE CacheProducer(FwdStorage<Traits>& shared_, CacheDeviceParams const& p_, int warp_)
      : shared(shared_), p(p_), warp(Keys::kGatheringWarps > 1 ? warp_ : 0) {}

  // INVARIANT: all global accesses follow wait(), except the prefetched lengths and page ids, which
  // are read again after it. WHY later launches are allowed at once: they wait for the end of this
  // one, but their CTAs may start where there is room.
  CUTE_DEVICE void run() {
    if (!kStartsEarly) {
      wait();
    }
    load_tiles(CacheTiles<Traits>(p, p.lengths));
    finish();
  }

 private:
  // A K tile to be loaded, and what Keys::read_id() gave for it.
  struct Step {
    KeySource from;
    int tile;
    int id;
  };

  CUTE_DEVICE int id_of(KeySource const& from, int n) const {
    return Keys::read_id(p, from, n, warp);
  }

  // WHY not with more warpgroups: they have no registers for it, and longer to run.
  static constexpr bool kStartsEarly = Traits::kWarpgroups == 1;

  CUTE_DEVICE static void wait() {
    wait_for_earlier_launches();
    allow_later_launches();
  }

  // In the order in which the consumers wait: V of a K tile follows K of the next one, also from
  // one tile to the next. The page table is read one K tile ahead. WHY a single loop, whose first
  // and last turns skip V or K: each kind of work is there once, so that there are few instructions
  // to fetch before the first load.
  //
  // The first tile is found, and its first K and V are fetched into L2, while earlier launches
  // still run. What they may have changed since is read again: all lengths, and the page table.
  CUTE_DEVICE void load_tiles(CacheTiles<Traits> tiles) {
    Step values{};
    bool has_values = false;
    bool is_early = kStartsEarly;
    bool starts = true;
    bool has_tile;
    do {
      if (starts) {
        tiles.start();
      }
      Work const work = tiles.next();
      has_tile = work.valid();
      Step keys{KeySource::of(work), work.keys.tile(work.keys.first()), 0};
      int n = work.keys.first();
      if (is_early) {
        if (has_tile) {
          Keys::prefetch(p, keys.from, keys.tile);
        }
        wait();
      }
      keys.id = has_tile ? id_of(keys.from, keys.tile) : 0;
      starts = is_early && !tiles.is_current();
      is_early = false;
      if (starts) {
        has_tile = true;
        continue;
      }
      int const begin = has_tile ? work.keys.last() : n;
      bool is_first = has_tile;
      do {
        Step next = keys;
        work.keys.advance(n);
        next.tile = work.keys.tile(n);
        if (has_tile) {
          next.id = n >= begin ? id_of(keys.from, next.tile) : 0;
          load_k(keys);
        }
        if (has_values) {
          load_v(values);
        }
        if (is_first) {
          load_q(work);
        }
        is_first = false;
        has_values = true;
        values = keys;
        keys = next;
      } while (n >= begin);
    } while (has_tile);
  }

  CUTE_DEVICE void load_q(Work const& part) {
    CUTE_UNROLL
    for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
      shared.q_empty[q_ring.stage][wg].wait(q_ring.phase ^ 1);
      if (leads()) {
        load_rows(part, wg);
      }
      __syncwarp();
    }
    q_ring.advance();
  }

  CUTE_DEVICE bool leads() const { return warp == 0 && is_first_lane(); }

  // Loads Q of a warpgroup, then publishes its share.
  CUTE_DEVICE void load_rows(Work const& part, int wg) {
    Mbarrier& full = shared.q_full[q_ring.stage][wg];
    int const position = part.position_begin + wg * p.positions_per_warpgroup;
    CUTE_UNROLL
    for (int column = 0; column < Traits::kColumns; column += Traits::kSlice) {
      load_box<typename Traits::Location>(
          p.q, mbarrier_word(full), kReadOnce, &shared.q[q_ring.stage][wg][column * kWarpgroupRows],
          {ColumnsOf<Traits>::first_column() + column, part.rows.head,
           part.location.first_q() + position, part.location, part.location.end_q()});
    }
    shared.work[q_ring.stage][wg] = share_of_part<Traits>(p, part, wg);
    Slots::Scales::publish(shared, p, part, q_ring.stage, wg);
    full.arrive_and_expect_tx(uint32_t(p.q_slice_bytes) * (Traits::kColumns / Traits::kSlice));
    if (wg + 1 == Traits::kWarpgroups) {
      Slots::Helpers::publish_tile(shared, q_ring.stage);
    }
  }

  CUTE_DEVICE void load_k(Step const& step) {
    LoadedKeys::empty(shared)[k_ring.stage].wait(k_ring.phase ^ 1);
    if (Traits::kConverts) {
      Keys::template load_scale<true>(p, shared.k_scales[k_ring.stage], step.from.kv_head, step.id,
                                      warp);
    }
    Keys::template load<true>(p, LoadedKeys::full(shared)[k_ring.stage],
                              LoadedKeys::buffers(shared)[k_ring.stage], step.from, step.tile,
                              step.id, warp);
    k_ring.advance();
  }

  CUTE_DEVICE void load_v(Step const& step) {
    Values::empty(shared)[v_ring.stage].wait(v_ring.phase ^ 1);
    if (Traits::kConverts) {
      Keys::template load_scale<false>(p, shared.v_scales[v_ring.stage], step.from.kv_head, step.id,
                                       warp);
    }
    Keys::template load<false>(p, Values::full(shared)[v_ring.stage],
                               Values::buffers(shared)[v_ring.stage], step.from, step.tile, step.id,
                               warp);
    v_ring.advance();
  }

  // Publishes that there are no more tiles. WHY keys first: the converting warps learn that there
  // is no next K before they convert the last V, for which the consumers wait.
  CUTE_DEVICE void finish() {
    if (Traits::kConverts) {
      end_keys();
    }
    CUTE_UNROLL
    for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
      shared.q_empty[q_ring.stage][wg].wait(q_ring.phase ^ 1);
      if (leads()) {
        shared.work[q_ring.stage][wg].invalidate();
        shared.q_full[q_ring.stage][wg].arrive();
      }
    }
    if (leads()) {
      Slots::Helpers::publish_tile(shared, q_ring.stage);
    }
  }

  // kConverted: a stage of K without keys, for the converting warps.
  CUTE_DEVICE void end_keys() {
    LoadedKeys::empty(shared)[k_ring.stage].wait(k_ring.phase ^ 1);
    if (leads()) {
      shared.keys_end[k_ring.stage] = 1;
    }
    LoadedKeys::full(shared)[k_ring.stage].arrive();
  }
};

}  // namespace fa3
