// The producer warp: brings Q, K and V into shared memory, as far ahead as the rings allow. One
// thread of it runs this.
#pragma once

#include "device/row_copies.h"
#include "forward/storage.h"
#include "forward/work.h"

namespace fa3 {

template <class Traits>
struct FwdProducer {
  using Work = FwdWork<Traits>;

  static constexpr uint64_t kOnce =
      uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST);  // Q: read by one CTA
  static constexpr uint64_t kOften =
      uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST);  // K, V: read by many

  // FP8: whether the other warps of this warpgroup hear of a tile before its first K and its Q are
  // loaded, for to bring its scales takes as long. WHY not dense kernels without a window: nothing
  // was gained there (README.md, FP8).
  static constexpr bool kTellsEarly = Traits::kFp8 && Traits::kGeneral;

  FwdStorage<Traits>& shared;
  FwdDeviceParams const& p;
  RingState<Traits::kQStages> q_ring;
  RingState<Traits::kStages> k_ring;
  RingState<Traits::kValueStages> v_ring;

  CUTE_DEVICE FwdProducer(FwdStorage<Traits>& shared_, FwdDeviceParams const& p_)
      : shared(shared_), p(p_) {}

  // In the order in which the consumers ask: the K tile after the one at hand comes before its V,
  // because S(n - 1) is computed beside P(n) V(n); also from one tile to the next.
  // INVARIANT: whatever this kernel reads or writes in global memory comes after these loads, and
  // so after the wait for the launches before.
  CUTE_DEVICE void run() {
    wait_for_earlier_launches();
    load_all();
    finish();
    allow_later_launches();
  }

  CUTE_DEVICE void load_all() {
    if constexpr (Traits::kGeneral) {
      if (p.is_packed()) {
        load_tiles(TicketTiles<Traits>(p));
        return;
      }
    }
    load_tiles(DenseTiles<Traits>(p));
  }

  template <class Tiles>
  CUTE_DEVICE void load_tiles(Tiles tiles) {
    tiles.draw();
    Work work = tiles.next();
    if (!work.valid()) {
      return;
    }
    tiles.draw();
    tell_early(work);
    load_k(work, work.keys.end - 1);
    load_q(work);
    while (true) {
      for (int n = work.keys.end - 1; n > work.keys.begin; --n) {
        load_k(work, n - 1);
        load_v(work, n);
      }
      Work const next = tiles.next();
      if (!next.valid()) {
        break;
      }
      tiles.draw();
      tell_early(next);
      load_k(next, next.keys.end - 1);
      load_v(work, work.keys.begin);
      load_q(next);
      work = next;
    }
    load_v(work, work.keys.begin);
  }

  CUTE_DEVICE void tell_early(Work const& tile) {
    if constexpr (kTellsEarly) {
      CUTE_UNROLL
      for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
        hand_over(tile, wg);
      }
      tell_tile();
    }
  }

  // The tile's coordinates, to a warpgroup.
  CUTE_DEVICE Work hand_over(Work const& tile, int wg) {
    shared.q_empty[q_ring.stage][wg].wait(q_ring.phase ^ 1);
    Work const work = share_of_warpgroup<Traits>(p, tile, wg);
    shared.work[q_ring.stage][wg] = work;
    return work;
  }

  // Q, and the tile's coordinates if not told, for each warpgroup.
  CUTE_DEVICE void load_q(Work const& tile) {
    CUTE_UNROLL
    for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
      Mbarrier& full = shared.q_full[q_ring.stage][wg];
      Work const work = kTellsEarly ? shared.work[q_ring.stage][wg] : hand_over(tile, wg);
      full.arrive_and_expect_tx(uint32_t(p.q_slice_bytes) * (Traits::kColumns / Traits::kSlice));
      CUTE_UNROLL
      for (int column = 0; column < Traits::kColumns; column += Traits::kSlice) {
        load_box(p.q, mbarrier_word(full), kOnce,
                 &shared.q[q_ring.stage][wg][column * kWarpgroupRows], column, work.rows.head,
                 work.place.first_q() + max_of(0, work.position_begin), work.place,
                 work.place.end_q());
      }
    }
    if (!kTellsEarly) {
      tell_tile();
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
    tell_tile();
  }

  // The other warps of this warpgroup need its coordinates alone.
  CUTE_DEVICE void tell_tile() {
    if constexpr (Traits::kFp8) {
      shared.tile_known[q_ring.stage].arrive();
    }
  }

  CUTE_DEVICE void load_k(Work const& work, int n) {
    shared.k_empty[k_ring.stage].wait(k_ring.phase ^ 1);
    load_keys<Traits::kColumns, Traits::kTileN>(p.k, shared.k_full[k_ring.stage],
                                                shared.k[k_ring.stage], work, n);
    k_ring.advance();
  }

  CUTE_DEVICE void load_v(Work const& work, int n) {
    constexpr int kParts = Traits::kValueParts;
    CUTE_UNROLL
    for (int part = 0; part < kParts; ++part) {
      shared.values_in_empty()[v_ring.stage].wait(v_ring.phase ^ 1);
      load_keys<Traits::kColumnsV, Traits::kValueKeys>(
          p.v, shared.values_in_full()[v_ring.stage], shared.values_in()[v_ring.stage], work,
          n * kParts + part);
      v_ring.advance();
    }
  }

  // The n-th kKeys keys.
  template <int kColumns, int kKeys>
  CUTE_DEVICE void load_keys(CUtensorMap const& map, Mbarrier& full,
                             typename Traits::Element* target, Work const& work, int n) {
    full.arrive_and_expect_tx(kKeys * kColumns * sizeof(typename Traits::Element));
    CUTE_UNROLL
    for (int column = 0; column < kColumns; column += Traits::kSlice) {
      load_box(map, mbarrier_word(full), kOften, target + column * kKeys, column,
               work.place.first_k() + n * kKeys, work.kv_head, work.place, work.place.end_k());
    }
  }

  CUTE_DEVICE static uint64_t* mbarrier_word(Mbarrier& barrier) {
    return reinterpret_cast<uint64_t*>(&barrier);
  }
};

}  // namespace fa3
