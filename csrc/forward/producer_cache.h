// The producer warp of a kernel on a cache: its lanes read the lengths and the page table together,
// and each lane issues the copies of its own box. All lanes run this.
#pragma once

#include "forward/cache_batch.h"
#include "forward/slots.h"
#include "forward/storage.h"

namespace fa3 {

template <class Traits>
struct CacheProducer {
  using Work = FwdWork<Traits>;
  using Slots = FwdSlots<Traits>;
  using Keys = typename Slots::Keys;
  using Values = typename Slots::Values;
  using Ids = typename Keys::Ids;
  static constexpr bool kIsWholeWarp = true;

  FwdStorage<Traits>& shared;
  CacheDeviceParams const& p;
  RingState<Traits::kQStages> q_ring;
  RingState<Traits::kStages> k_ring;
  RingState<Traits::kValueStages> v_ring;

  CUTE_DEVICE CacheProducer(FwdStorage<Traits>& shared_, CacheDeviceParams const& p_)
      : shared(shared_), p(p_) {}

  // INVARIANT: whatever this kernel reads or writes in global memory comes after these loads, and
  // so after the wait for earlier launches. WHY later launches are allowed at once: they wait for
  // the end of this one, but their CTAs may start where there is room.
  CUTE_DEVICE void run() {
    wait_for_earlier_launches();
    allow_later_launches();
    load_tiles(CacheTiles<Traits>(p));
    finish();
  }

 private:
  // In the order in which the consumers wait, as FwdProducer::load_tiles().
  CUTE_DEVICE void load_tiles(CacheTiles<Traits> tiles) {
    Work work = no_tile<Traits>();
    Ids ids = {};
    while (true) {
      Work const next = tiles.next();
      Ids const next_ids = next.valid() ? load_k(next, next.keys.end - 1) : ids;
      if (work.valid()) {
        load_v(work, work.keys.begin, ids);
      }
      if (!next.valid()) {
        return;
      }
      load_q(next);
      work = next;
      ids = next_ids;
      CUTE_NO_UNROLL
      for (int n = work.keys.end - 1; n > work.keys.begin; --n) {
        Ids const following = load_k(work, n - 1);
        load_v(work, n, ids);
        ids = following;
      }
    }
  }

  CUTE_DEVICE void load_q(Work const& part) {
    CUTE_UNROLL
    for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
      shared.q_empty[q_ring.stage][wg].wait(q_ring.phase ^ 1);
      if (is_first_lane()) {
        load_rows(share_of_part<Traits>(p, part, wg), wg);
      }
      __syncwarp();
    }
    q_ring.advance();
  }

  // Publishes the share of a warpgroup, and loads its Q.
  CUTE_DEVICE void load_rows(Work const& work, int wg) {
    Mbarrier& full = shared.q_full[q_ring.stage][wg];
    shared.work[q_ring.stage][wg] = work;
    full.arrive_and_expect_tx(uint32_t(p.q_slice_bytes) * (Traits::kColumns / Traits::kSlice));
    CUTE_UNROLL
    for (int column = 0; column < Traits::kColumns; column += Traits::kSlice) {
      load_box<typename Traits::Location>(
          p.q, mbarrier_word(full), kReadOnce,
          &shared.q[q_ring.stage][wg][column * kWarpgroupRows],
          {column, work.rows.head, work.location.first_q() + work.position_begin, work.location,
           work.location.end_q()});
    }
    if (wg + 1 == Traits::kWarpgroups) {
      Slots::Helpers::publish_tile(shared, q_ring.stage);
    }
  }

  // Gives where the rows are, for V.
  CUTE_DEVICE Ids load_k(Work const& work, int n) {
    Ids const ids = Keys::read_ids(p, work, n);
    shared.k_empty[k_ring.stage].wait(k_ring.phase ^ 1);
    Keys::template load<Traits::kColumns>(p, true, shared.k_full[k_ring.stage],
                                          shared.k[k_ring.stage], work, n, ids);
    k_ring.advance();
    return ids;
  }

  CUTE_DEVICE void load_v(Work const& work, int n, Ids const& ids) {
    Values::empty(shared)[v_ring.stage].wait(v_ring.phase ^ 1);
    Keys::template load<Traits::kColumnsV>(p, false, Values::full(shared)[v_ring.stage],
                                           Values::buffers(shared)[v_ring.stage], work, n, ids);
    v_ring.advance();
  }

  // Publishes that there are no more tiles.
  CUTE_DEVICE void finish() {
    CUTE_UNROLL
    for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
      shared.q_empty[q_ring.stage][wg].wait(q_ring.phase ^ 1);
      if (is_first_lane()) {
        shared.work[q_ring.stage][wg].keys.end = 0;
        shared.q_full[q_ring.stage][wg].arrive();
      }
    }
    if (is_first_lane()) {
      Slots::Helpers::publish_tile(shared, q_ring.stage);
    }
  }
};

}  // namespace fa3
