// The producer warp: loads Q, K and V into shared memory, as far ahead as the rings allow, and
// publishes the tiles. One thread of it runs this.
#pragma once

#include "forward/slots.h"
#include "forward/storage.h"

namespace fa3 {

template <class Traits>
struct FwdProducer {
  using Work = FwdWork<Traits>;
  using Slots = FwdSlots<Traits>;
  using Keys = typename Slots::Keys;
  using Values = typename Slots::Values;
  static constexpr bool kIsWholeWarp = false;

  // The CTA draws its next ticket this many K tiles before its tile ends. WHY not a tile ahead: it
  // would reserve work that an idle CTA could start.
  static constexpr int kDrawAhead = 2;

  // General kernels with scales publish a tile before they load its first K and its Q, because
  // loading its scales takes as long. WHY not all kernels: dense ones gained nothing.
  static constexpr bool kPublishesEarly = Traits::kHasScales && !Traits::kKind.is_dense();

  FwdStorage<Traits>& shared;
  typename Traits::Params const& p;
  RingState<Traits::kQStages> q_ring;
  RingState<Traits::kStages> k_ring;
  RingState<Traits::kValueStages> v_ring;

  CUTE_DEVICE static constexpr int warps(FwdDeviceParams const&) { return 1; }

  CUTE_DEVICE FwdProducer(FwdStorage<Traits>& shared_, typename Traits::Params const& p_, int)
      : shared(shared_), p(p_) {}

  // INVARIANT: whatever this kernel reads or writes in global memory comes after these loads, and
  // so after the wait for earlier launches.
  CUTE_DEVICE void run() {
    wait_for_earlier_launches();
    Slots::Batch::template visit_tiles<Traits>(p, [&](auto tiles) {
      if constexpr (Traits::kFolds) {
        load_parts(tiles);
      } else {
        load_tiles(tiles);
      }
    });
    finish();
    allow_later_launches();
  }

  // Loads in the order in which the consumers wait: K of the next K tile comes before V of this
  // one, because S(n - 1) is issued together with P(n) V(n). The same holds from one tile to the
  // next.
  template <class Tiles>
  CUTE_DEVICE void load_tiles(Tiles tiles) {
    Work work = tiles.next();
    if (!work.valid()) {
      return;
    }
    draw_of_short(tiles, work);
    publish_early(work);
    load_k(work, work.keys.first());
    load_q(work);
    while (true) {
      for (int n = work.keys.first(); n > work.keys.last(); work.keys.advance(n)) {
        if (n == work.keys.last() + kDrawAhead) {
          tiles.draw();
        }
        load_k(work, work.keys.next(n));
        load_v(work, n);
      }
      Work const next = tiles.next();
      if (!next.valid()) {
        break;
      }
      draw_of_short(tiles, next);
      publish_early(next);
      load_k(next, next.keys.first());
      load_v(work, work.keys.last());
      load_q(next);
      work = next;
    }
    load_v(work, work.keys.last());
  }

  // load_tiles() in the order of parts (KeyTilePart).
  template <class Tiles>
  CUTE_DEVICE void load_parts(Tiles tiles) {
    Work work = tiles.next();
    if (!work.valid()) {
      return;
    }
    draw_of_short(tiles, work);
    KeyTilePart part = KeyTilePart::first(work.keys, p.part_tiles);
    int n = part.end - 1;
    load_k(work, n);
    load_q(work);
    while (true) {
      for (int left = work.keys.end - work.keys.begin - 1; left > 0; --left) {
        if (left == kDrawAhead) {
          tiles.draw();
        }
        int const last = n--;
        if (n < part.begin) {
          part = part.next(work.keys, p.part_tiles);
          n = part.end - 1;
        }
        load_k(work, n);
        load_v(work, last);
      }
      Work const next = tiles.next();
      if (!next.valid()) {
        break;
      }
      draw_of_short(tiles, next);
      part = KeyTilePart::first(next.keys, p.part_tiles);
      load_k(next, part.end - 1);
      load_v(work, n);
      load_q(next);
      work = next;
      n = part.end - 1;
    }
    load_v(work, n);
  }

  // Loads Q of each warpgroup, and publishes the tile unless publish_early() has.
  CUTE_DEVICE void load_q(Work const& tile) {
    CUTE_UNROLL
    for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
      Mbarrier& full = shared.q_full[q_ring.stage][wg];
      Work const work = kPublishesEarly ? shared.work[q_ring.stage][wg] : write_work(tile, wg);
      full.arrive_and_expect_tx(uint32_t(p.q_slice_bytes) * (Traits::kColumns / Traits::kSlice));
      CUTE_UNROLL
      for (int column = 0; column < Traits::kColumns; column += Traits::kSlice) {
        load_box<typename Traits::Location>(
            p.q, mbarrier_word(full), kReadOnce,
            &shared.q[q_ring.stage][wg][column * kWarpgroupRows],
            {ColumnsOf<Traits>::first_column() + column, work.rows.head,
             work.location.first_q() + max_of(0, work.position_begin), work.location,
             work.location.end_q()});
      }
    }
    if (!kPublishesEarly) {
      publish_to_helpers();
    }
    q_ring.advance();
  }

  CUTE_DEVICE void load_k(Work const& work, int n) {
    shared.k_empty[k_ring.stage].wait(k_ring.phase ^ 1);
    Keys::template load<Traits::kColumns, Traits::kTileN>(
        p.k, shared.k_full[k_ring.stage], shared.k[k_ring.stage], work, work.keys.tile(n));
    k_ring.advance();
  }

  CUTE_DEVICE void load_v(Work const& work, int n) {
    constexpr int kParts = Traits::kValueParts;
    CUTE_UNROLL
    for (int part = 0; part < kParts; ++part) {
      Values::empty(shared)[v_ring.stage].wait(v_ring.phase ^ 1);
      Keys::template load<Traits::kColumnsV, Traits::kValueKeys>(
          p.v, Values::full(shared)[v_ring.stage], Values::buffers(shared)[v_ring.stage], work,
          work.keys.tile(n) * kParts + part);
      v_ring.advance();
    }
  }

 private:
  // Draws the next tile at the beginning of one that has no more than kDrawAhead K tiles.
  template <class Tiles>
  CUTE_DEVICE static void draw_of_short(Tiles& tiles, Work const& work) {
    if (work.keys.count() <= kDrawAhead) {
      tiles.draw();
    }
  }

  // Publishes the share of a warpgroup, for that warpgroup and for the warp that stores its
  // results.
  CUTE_DEVICE Work write_work(Work const& tile, int wg) {
    shared.q_empty[q_ring.stage][wg].wait(q_ring.phase ^ 1);
    Work const work = share_of_warpgroup<Traits>(p, tile, wg);
    shared.work[q_ring.stage][wg] = work;
    return work;
  }

  CUTE_DEVICE void publish_early(Work const& tile) {
    if (kPublishesEarly) {
      CUTE_UNROLL
      for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
        write_work(tile, wg);
      }
      publish_to_helpers();
    }
  }

  // The other warps of this warpgroup need only the coordinates, not Q.
  CUTE_DEVICE void publish_to_helpers() { Slots::Helpers::publish_tile(shared, q_ring.stage); }

  // Publishes that there are no more tiles.
  CUTE_DEVICE void finish() {
    CUTE_UNROLL
    for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
      shared.q_empty[q_ring.stage][wg].wait(q_ring.phase ^ 1);
      shared.work[q_ring.stage][wg].invalidate();
      shared.q_full[q_ring.stage][wg].arrive();
    }
    publish_to_helpers();
  }
};

}  // namespace fa3
