// The producer warps of the kernel for a latent cache. One finds the tiles of the CTA and publishes
// them; its lanes read the lengths together. Others load Q and keys into the rings: one by TMA, or
// two row by row (key_columns.h). WHY other warps: one would run out of registers. With e4m3 the
// last warp reads the scales.
#pragma once

#include "forward/cache/cache_batch.h"
#include "mla/key_columns.h"
#include "mla/key_scales.h"
#include "mla/storage.h"

namespace fa3 {

template <class Traits>
struct MlaTiles {
  MlaStorage<Traits>& shared;
  typename Traits::Params const& p;

  CUTE_DEVICE void run() {
    RingState<Traits::kTileStages> ring;
    CacheTiles<Traits> tiles(p, p.lengths);
    tiles.start();
    bool is_valid;
    do {
      FwdWork<Traits> const work = tiles.next();
      is_valid = work.valid();
      shared.work_empty[ring.stage].wait(ring.phase ^ 1);
      if (is_first_lane()) {
        shared.work[ring.stage] = is_valid ? share_of_part<Traits>(p, work, 0) : work;
        shared.work_full[ring.stage].arrive();
      }
      ring.advance();
    } while (is_valid);
  }
};

template <class Traits>
struct MlaLoader {
  using Work = FwdWork<Traits>;
  using Params = typename Traits::Params;
  using Rows = ColumnRows<Traits>;

  MlaStorage<Traits>& shared;
  Params const& p;
  int warp;  // among those that run this
  HalfRing<Traits> left{true};
  HalfRing<Traits> right{false};
  RingState<Traits::kStages> rotary;
  RingState<max_of(Traits::kRawStages, 1)> raw;

  CUTE_DEVICE static bool gathers(Params const& p) { return p.box_keys == 0; }

  // Number of warps that run this loader.
  CUTE_DEVICE static int warps(Params const& p) { return gathers(p) ? Rows::kWarps : 1; }

  // Arrivals per load at the barrier of a column group.
  CUTE_DEVICE static int arrivals(Params const& p) { return gathers(p) ? 32 * Rows::kWarps : 1; }

  CUTE_DEVICE MlaLoader(MlaStorage<Traits>& shared_, Params const& p_, int warp_)
      : shared(shared_), p(p_), warp(warp_) {}

  // INVARIANT: lanes that load boxes do not wait for each other. A stage becomes full, and can be
  // used and refilled, only after the boxes of all lanes have arrived. Lanes without a box must
  // have seen all phases of a tile before Q is loaded.
  CUTE_DEVICE void run() {
    RingState<Traits::kTileStages> tiles;
    uint32_t q_phase = 1;
    CUTE_NO_UNROLL
    while (true) {
      shared.work_full[tiles.stage].wait(tiles.phase);
      Work const& work = shared.work[tiles.stage];
      if (waits_for_stage()) {
        shared.half_empty[left.stage].wait(left.phase ^ 1);
      }
      if (!work.valid()) {
        expect_queries(0);
        return;
      }
      if (gathers(p)) {
        load_tile<Rows>(work, q_phase);
      } else {
        load_tile<KeyBoxes<Traits>>(work, q_phase);
      }
      q_phase ^= 1;
      __syncwarp();
      tiles.advance();
    }
  }

 private:
  CUTE_DEVICE bool leads() const { return warp == 0 && is_first_lane(); }

  // Whether this warp waits for the buffers of Q. WHY not the second gathering warp with e4m3: Q
  // does not wait for that warp, so the barrier could pass two phases before the warp looks.
  CUTE_DEVICE bool waits_for_stage() const { return !Traits::kConverts || warp == 0; }

  template <class Keys>
  CUTE_DEVICE void load_tile(Work const& work, uint32_t q_phase) {
    Keys keys(p, KeySource::of(work), warp);
    KeyRange<Traits> const range = work.keys.visits();
    keys.read_ahead(range.tile(range.first()));
    if (waits_for_stage()) {
      shared.q_empty.wait(q_phase);
    }
    __syncwarp();
    load_queries(work);
    if (keys.is_used()) {
      load_keys(range, keys);
    } else {
      skip_keys(range.count());
    }
  }

  // Arrives at the barrier of the stage that receives Q: the leading lane, which announces the
  // bytes, and all other lanes that gather. With e4m3 the barrier counts the converting warps, so
  // the leading lane makes all arrivals.
  CUTE_DEVICE void expect_queries(int bytes) const {
    Mbarrier& full = shared.half_full[left.stage];
    if (leads()) {
      full.arrive_and_expect_tx(uint32_t(bytes));
      CUTE_UNROLL
      for (int i = 1; i < kWarpgroupWarps && Traits::kConverts; ++i) {
        full.arrive();
      }
    } else if (gathers(p) && !Traits::kConverts) {
      full.arrive();
    }
  }

  // Lanes of the first warp each load a slice. The first half of the latent columns passes through
  // a stage of the left ring.
  CUTE_DEVICE void load_queries(Work const& work) {
    constexpr int kLatent = Traits::kHeadDimV / Traits::kSlice;
    constexpr int kHeld = Traits::kHeldColumns / Traits::kSlice;
    constexpr int kSlices = kLatent + Traits::kHeadDim / Traits::kSlice;
    static_assert(kSlices <= 32);
    Mbarrier& full = shared.half_full[left.stage];
    expect_queries(p.q_slice_bytes * kSlices);
    int const slice = lane_of_warp();
    if (warp == 0 && slice < kSlices) {
      constexpr int kElements = kWarpgroupRows * Traits::kSlice;
      bool const is_held = slice < kHeld;
      bool const is_latent = slice < kLatent;
      load_box<CacheLocation>(
          is_latent ? p.qv : p.q, mbarrier_word(full), kReadOnce,
          is_held ? shared.halves[left.stage] + slice * kElements
                  : shared.q + (slice - kHeld) * kElements,
          {(is_latent ? slice : slice - kLatent) * Traits::kSlice, work.rows.head,
           work.location.first_q() + work.position_begin, work.location, work.location.end_q()});
    }
    left.advance();
  }

  // Skips K tiles in which this lane has no box.
  CUTE_DEVICE void skip_keys(int tiles) {
    CUTE_NO_UNROLL
    for (int i = 0; i < tiles; ++i) {
      left.advance();
    }
  }

  // Loads K tiles from last to first. WHY no prefetch into L2 before shared memory has room:
  // memory-bound calls take 14 % longer (H100, 2026-11-26).
  template <class Keys>
  CUTE_DEVICE void load_keys(KeyRange<Traits> const range, Keys& keys) {
    CUTE_NO_UNROLL
    for (int n = range.first(); n >= range.last(); range.advance(n)) {
      keys.take(range.tile(n));
      if (n > range.last()) {
        keys.read_ahead(range.tile(range.next(n)));
      }
      load_half<Columns::kLeft>(keys, left);
      load<Columns::kRotary>(keys, shared.rotary_full, shared.rotary_empty, shared.rotary, rotary);
      load_half<Columns::kRight>(keys, right);
    }
  }

  // Halves of e4m3 go into the ring of raw tiles.
  template <Columns kGroup, class Keys>
  CUTE_DEVICE void load_half(Keys const& keys, HalfRing<Traits>& ring) {
    if constexpr (Traits::kConverts) {
      load<kGroup>(keys, shared.raw_full, shared.raw_empty, shared.raw, raw);
      ring.advance();
    } else {
      load<kGroup>(keys, shared.half_full, shared.half_empty, shared.halves, ring);
    }
  }

  template <Columns kGroup, class Keys, class Barriers, class Buffers, class Ring>
  CUTE_DEVICE static void load(Keys const& keys, Barriers& full, Barriers& empty, Buffers& buffers,
                               Ring& ring) {
    empty[ring.stage].wait(ring.phase ^ 1);
    keys.template load<kGroup>(full[ring.stage], reinterpret_cast<char*>(buffers[ring.stage]));
    ring.advance();
  }
};

// INVARIANT: every global access of the kernel happens after this wait; the barriers order the
// other warps after it.
template <class Traits>
CUTE_DEVICE void run_mla_producer(MlaStorage<Traits>& shared, typename Traits::Params const& p,
                                  int warp) {
  wait_for_earlier_launches();
  allow_later_launches();
  if (warp == 0) {
    MlaTiles<Traits>{shared, p}.run();
  } else if (warp <= MlaLoader<Traits>::warps(p)) {
    MlaLoader<Traits>(shared, p, warp - 1).run();
  } else if (Traits::kConverts && warp == kWarpgroupWarps - 1) {
    KeyScales<Traits>{shared, p}.run();
  }
}

}  // namespace fa3
