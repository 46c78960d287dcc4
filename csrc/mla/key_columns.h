// How the columns of a K tile reach shared memory: in boxes of keys of one page, by TMA, or, where
// a page is not a multiple of 8 keys, as single rows, by cp.async.
//
// Both types hold where this lane's keys of the current K tile are, and read that of the next one
// ahead. INVARIANT: keys that the sequence does not have, and entries outside the cache, are not
// read; their columns become zeros.
#pragma once

#include "forward/cache/key_rows.h"
#include "mla/storage.h"

namespace fa3 {

// Slices of 128 bytes of a column group as loaded.
template <class Traits, Columns kGroup>
struct ColumnSlices {
  static constexpr bool kIsRotary = kGroup == Columns::kRotary;
  static constexpr int kCount =
      kIsRotary ? Traits::kHeadDim / Traits::kSlice : Traits::kOutputColumns / Traits::kSliceV;
  static constexpr int kFirst = kGroup == Columns::kRight ? kCount : 0;
};

// A lane loads the box of a page. A box that holds all keys of a K tile also holds all slices.
template <class Traits>
struct KeyBoxes {
  using Params = typename Traits::Params;
  using Keys = PagedKeys<Traits>;

  Params const& p;
  KeySource const from;
  int const first = lane_of_warp() * p.box_keys;  // first key of the box in a K tile
  int begin = 0;                                  // first slot of the box
  int id = 0;                                     // entry of the cache that holds it
  int next_id = 0;

  CUTE_DEVICE KeyBoxes(Params const& p_, KeySource const& from_, int) : p(p_), from(from_) {}

  CUTE_DEVICE bool is_used() const { return first < Traits::kTileN; }

  CUTE_DEVICE void read_ahead(int tile) {
    next_id = is_used() ? Keys::entry_of(p, from, tile * Traits::kTileN + first) : 0;
  }

  CUTE_DEVICE void take(int tile) {
    begin = tile * Traits::kTileN + first;
    id = next_id;
  }

  template <Columns kGroup>
  CUTE_DEVICE void load(Mbarrier& full, char* buffer) const {
    using Slices = ColumnSlices<Traits, kGroup>;
    if (first == 0) {
      full.arrive_and_expect_tx(uint32_t(Traits::kTileN * Slices::kCount * 128));
    }
    int const row = Keys::row_of(p, from, begin);
    int const step = p.box_keys == Traits::kTileN ? Slices::kCount : 1;
    CUtensorMap const& map = Slices::kIsRotary ? p.k : p.v;
    CUTE_NO_UNROLL
    for (int slice = 0; slice < Slices::kCount; slice += step) {
      cute::SM90_TMA_LOAD_4D::copy(&map, mbarrier_word(full), p.hint,
                                   buffer + (slice * Traits::kTileN + first) * 128, 0, row,
                                   Slices::kFirst + slice, id);
    }
  }
};

// Two warps gather the rows.
template <class Traits>
struct ColumnRows : KeyRows<Traits, 2> {
  using KeyRows<Traits, 2>::KeyRows;

  template <Columns kGroup>
  CUTE_DEVICE void load(Mbarrier& full, char* buffer) const {
    using Slices = ColumnSlices<Traits, kGroup>;
    this->template copy_rows<Slices::kCount>(Slices::kIsRotary ? this->p.k_rows : this->p.v_rows,
                                             Slices::kFirst, buffer);
    arrive_after_copies(full);
  }
};

}  // namespace fa3
