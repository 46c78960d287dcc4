// The producer warps of the kernel for a latent cache. One finds the tiles of the CTA and publishes
// them; its lanes read the lengths together. A second one loads Q and keys into the rings. WHY two
// warps: one would run out of registers. With e4m3 the last warp reads the scales.
//
// A lane loads the box of a page. If the page size is not a multiple of 8, two warps gather the
// rows, one lane per row of the K tile.
#pragma once

#include "forward/cache/cache_batch.h"
#include "forward/cache/keys_pages.h"
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
  using Keys = PagedKeys<Traits>;
  using Element = typename Traits::Element;
  using Params = typename Traits::Params;
  static constexpr int kGatheringWarps = Traits::kTileN / 32;

  MlaStorage<Traits>& shared;
  Params const& p;
  int slot;  // first key of this lane's box, or its row, in a K tile
  HalfRing<Traits> left{true};
  HalfRing<Traits> right{false};
  RingState<Traits::kStages> rotary;
  RingState<max_of(Traits::kRawStages, 1)> raw;

  CUTE_DEVICE static bool gathers(Params const& p) { return p.box_keys == 0; }

  // Number of warps that run this loader.
  CUTE_DEVICE static int warps(Params const& p) { return gathers(p) ? kGatheringWarps : 1; }

  // Arrivals per load at the barrier of a column group.
  CUTE_DEVICE static int arrivals(Params const& p) { return gathers(p) ? 32 * kGatheringWarps : 1; }

  CUTE_DEVICE MlaLoader(MlaStorage<Traits>& shared_, Params const& p_, int warp)
      : shared(shared_),
        p(p_),
        slot(gathers(p_) ? 32 * warp + lane_of_warp() : lane_of_warp() * p_.box_keys) {}

  // The first lanes of the first warp each load a slice of Q.
  //
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
      bool const waits = !Traits::kConverts || loads_queries();
      if (waits) {
        shared.half_empty[left.stage].wait(left.phase ^ 1);
      }
      if (!work.valid()) {
        expect_queries(0);
        return;
      }
      KeySource const from = KeySource::of(work);
      KeyRange<Traits> const keys = work.keys.visits();
      bool const has_keys = slot < Traits::kTileN;
      int const first_id = has_keys ? Keys::entry_of(p, from, slot_in(keys.tile(keys.first()))) : 0;
      if (waits) {
        shared.q_empty.wait(q_phase);
      }
      q_phase ^= 1;
      __syncwarp();
      load_queries(work);
      if (has_keys) {
        load_keys(from, keys, first_id);
      } else {
        skip_keys(keys.count());
      }
      __syncwarp();
      tiles.advance();
    }
  }

 private:
  CUTE_DEVICE bool leads() const { return slot == 0; }

  // The slot of this lane's key in a K tile of the sequence.
  CUTE_DEVICE int slot_in(int tile) const { return tile * Traits::kTileN + slot; }

  // Whether this is the first warp. WHY the second gathering warp does not wait for Q's buffers
  // with e4m3: Q does not wait for that warp, so the barrier could pass two phases before the warp
  // looks.
  CUTE_DEVICE bool loads_queries() const { return !gathers(p) || slot < 32; }

  // Arrives at `full`: the leading lane announces the bytes that TMA brings, and lanes that gather
  // rows arrive too.
  CUTE_DEVICE void expect(Mbarrier& full, int bytes) const {
    if (leads()) {
      full.arrive_and_expect_tx(uint32_t(bytes));
    } else if (gathers(p)) {
      full.arrive();
    }
  }

  // Arrives at the barrier of the stage that receives Q. With e4m3 its count is that of the
  // converting warps, so the leading lane makes all arrivals.
  CUTE_DEVICE void expect_queries(int bytes) const {
    Mbarrier& full = shared.half_full[left.stage];
    if (!Traits::kConverts) {
      expect(full, bytes);
    } else if (leads()) {
      full.arrive_and_expect_tx(uint32_t(bytes));
      CUTE_UNROLL
      for (int i = 1; i < kWarpgroupWarps; ++i) {
        full.arrive();
      }
    }
  }

  // The first half of the latent columns passes through a stage of the left ring.
  CUTE_DEVICE void load_queries(Work const& work) {
    constexpr int kLatent = Traits::kHeadDimV / Traits::kSlice;
    constexpr int kHeld = Traits::kHeldColumns / Traits::kSlice;
    constexpr int kSlices = kLatent + Traits::kHeadDim / Traits::kSlice;
    static_assert(kSlices <= 32);
    Mbarrier& full = shared.half_full[left.stage];
    expect_queries(p.q_slice_bytes * kSlices);
    int const slice = gathers(p) ? slot : lane_of_warp();
    if (slice < kSlices) {
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

  // Loads K tiles from last to first. id: the page of the last one; the page table is read one K
  // tile ahead. WHY no prefetch into L2 before shared memory has room: memory-bound calls take 14 %
  // longer (H100, 2026-11-26).
  CUTE_DEVICE void load_keys(KeySource const& from, KeyRange<Traits> const keys, int id) {
    CUTE_NO_UNROLL
    for (int n = keys.first(); n >= keys.last(); keys.advance(n)) {
      int const at = slot_in(keys.tile(n));
      int const next_id = n > keys.last() ? Keys::entry_of(p, from, at - Traits::kTileN) : 0;
      load_half<Columns::kLeft>(from, at, id, left);
      load<Columns::kRotary>(from, at, id, shared.rotary_full, shared.rotary_empty, shared.rotary,
                             rotary);
      load_half<Columns::kRight>(from, at, id, right);
      id = next_id;
    }
  }

  // at: the slot in the sequence. Halves of e4m3 go into the ring of raw tiles.
  template <Columns kGroup>
  CUTE_DEVICE void load_half(KeySource const& from, int at, int id, HalfRing<Traits>& ring) {
    if constexpr (Traits::kConverts) {
      load<kGroup>(from, at, id, shared.raw_full, shared.raw_empty, shared.raw, raw);
      ring.advance();
    } else {
      load<kGroup>(from, at, id, shared.half_full, shared.half_empty, shared.halves, ring);
    }
  }

  template <Columns kGroup, class Barriers, class Buffers, class Ring>
  CUTE_DEVICE void load(KeySource const& from, int at, int id, Barriers& full, Barriers& empty,
                        Buffers& buffers, Ring& ring) const {
    empty[ring.stage].wait(ring.phase ^ 1);
    char* const buffer = reinterpret_cast<char*>(buffers[ring.stage]);
    if (gathers(p)) {
      gather<kGroup>(from, at, id, full[ring.stage], buffer);
    } else {
      load_boxes<kGroup>(from, at, id, full[ring.stage], buffer);
    }
    ring.advance();
  }

  template <Columns kGroup>
  static constexpr bool kIsRotary = kGroup == Columns::kRotary;
  // Number of 128-byte slices of a column group.
  template <Columns kGroup>
  static constexpr int kSlicesOf = kIsRotary<kGroup> ? Traits::kHeadDim / Traits::kSlice
                                                     : Traits::kOutputColumns / Traits::kSliceV;
  template <Columns kGroup>
  static constexpr int kFirstOf = kGroup == Columns::kRight ? kSlicesOf<kGroup> : 0;

  // A box that holds all keys of a K tile also holds all slices.
  template <Columns kGroup>
  CUTE_DEVICE void load_boxes(KeySource const& from, int at, int id, Mbarrier& full,
                              char* buffer) const {
    constexpr int kSlices = kSlicesOf<kGroup>;
    expect(full, Traits::kTileN * kSlices * 128);
    int const row = Keys::row_of(p, from, at);
    int const step = p.box_keys == Traits::kTileN ? kSlices : 1;
    CUtensorMap const& map = kIsRotary<kGroup> ? p.k : p.v;
    CUTE_NO_UNROLL
    for (int slice = 0; slice < kSlices; slice += step) {
      cute::SM90_TMA_LOAD_4D::copy(&map, mbarrier_word(full), p.hint,
                                   buffer + (slice * Traits::kTileN + slot) * 128, 0, row,
                                   kFirstOf<kGroup> + slice, id);
    }
  }

  // Several lanes copy a row, each lane a chunk of 16 bytes. Missing rows become zeros.
  template <Columns kGroup>
  CUTE_DEVICE void gather(KeySource const& from, int at, int id, Mbarrier& full,
                          char* buffer) const {
    constexpr int kChunks = 8 * kSlicesOf<kGroup>;  // per row
    constexpr int kRowsAtOnce = 32 / kChunks;
    TensorView const& rows = kIsRotary<kGroup> ? p.k_rows : p.v_rows;
    int const lane = lane_of_warp();
    int const chunk = lane % kChunks;
    int64_t const offset = Keys::offset_of_row(p, rows, from, at, id);
    char const* const data =
        static_cast<char const*>(rows.data) + kFirstOf<kGroup> * 128 + chunk * 16;
    uint32_t const target = cute::cast_smem_ptr_to_uint(buffer);
#pragma unroll 4
    for (int i = 0; i < 32; i += kRowsAtOnce) {
      int const lane_row = i + lane / kChunks;
      int64_t const row_offset = __shfl_sync(kWholeWarp, offset, lane_row);
      int const row = slot - lane + lane_row;
      Keys::copy_chunk(target + chunk_offset_bytes<Traits::kTileN>(row, chunk), data, row_offset,
                       row_offset >= 0);
    }
    Keys::arrive_after_copies(cute::cast_smem_ptr_to_uint(&full));
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
