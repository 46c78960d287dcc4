// K and V loaded from a cache by a warp. A K tile is several boxes, each of keys of one page; a
// dense cache is one page a sequence. Pages of other sizes than multiples of 8 are gathered row by
// row.
//
// INVARIANT: pages that a sequence does not need are not read: their boxes have coordinates outside
// the tensor, which the copy engine reads as zeros. V of a key that the sequence does not have must
// not reach O through P = 0, since 0 * NaN is NaN: a K tile with such keys is gathered, and their
// rows are zeros. Their K gives scores that the mask replaces.
#pragma once

#include "device/barriers.h"
#include "device/math.h"
#include "forward/keys_tma.h"

namespace fa3 {

// Where the rows of a K tile come from: the entry (page) of this lane's box, or of its rows where
// they are gathered.
template <int kPerLane>
struct PageIds {
  int id[kPerLane];
};

template <class Traits>
struct PagedKeys {
  using ElementKv = typename Traits::ElementKv;
  static constexpr int kRowsPerLane = ceil_div(Traits::kTileN, 32);
  using Ids = PageIds<kRowsPerLane>;

  // Arrivals at the barrier of a loaded stage: all lanes.
  CUTE_DEVICE static constexpr int arrivals(CacheDeviceParams const&) { return 32; }

  // Gathered rows were not written by the copy engine.
  CUTE_DEVICE static void after_wait(CacheDeviceParams const&) { fence_shared_for_async_proxy(); }

  // Reads the page table for the n-th K tile: this lane's box, or its rows lane, lane + 32, ...
  CUTE_DEVICE static Ids read_ids(CacheDeviceParams const& p, FwdWork<Traits> const& work, int n) {
    if (p.box_keys == 0) {
      return read_rows(p, work, n);
    }
    Ids ids;
    ids.id[0] = entry_of(p, work, n * Traits::kTileN + lane_of_warp() * p.box_keys);
    return ids;
  }

  // The n-th K tile, as (keys, kColumns) in slices.
  template <int kColumns>
  CUTE_DEVICE static void load(CacheDeviceParams const& p, bool is_key, Mbarrier& full,
                               ElementKv* target, FwdWork<Traits> const& work, int n,
                               Ids const& ids) {
    bool const is_boxed = p.box_keys > 0;
    if (is_boxed && (is_key || has_all_keys(work, n))) {
      load_boxes<kColumns>(p, is_key ? p.k : p.v, full, target, work, n, ids.id[0]);
    } else {
      gather<kColumns>(p, is_key, full, target, work, n, is_boxed ? read_rows(p, work, n) : ids);
    }
  }

 private:
  CUTE_DEVICE static Ids read_rows(CacheDeviceParams const& p, FwdWork<Traits> const& work, int n) {
    Ids ids;
    CUTE_UNROLL
    for (int i = 0; i < kRowsPerLane; ++i) {
      ids.id[i] = entry_of(p, work, n * Traits::kTileN + lane_of_warp() + 32 * i);
    }
    return ids;
  }

  CUTE_DEVICE static bool has_all_keys(FwdWork<Traits> const& work, int n) {
    return has_key(work, n * Traits::kTileN) && has_key(work, (n + 1) * Traits::kTileN - 1);
  }

  CUTE_DEVICE static bool has_key(FwdWork<Traits> const& work, int slot) {
    int const first = work.location.slot;
    return slot >= first && slot < first + work.location.len.k;
  }

  // The entry that holds a slot; one outside the tensor for slots without a key.
  CUTE_DEVICE static int entry_of(CacheDeviceParams const& p, FwdWork<Traits> const& work,
                                  int slot) {
    // A box that begins before the first key may hold it.
    bool const is_needed =
        slot < work.location.slot + work.location.len.k &&
        slot + max_of(p.box_keys, 1) > work.location.slot;
    if (p.page_table == nullptr) {
      return is_needed ? work.location.entry : p.entries;
    }
    return is_needed
               ? __ldg(p.page_table + work.location.sequence * p.table_stride + p.page_size.div(slot))
               : p.entries;
  }

  CUTE_DEVICE static int row_of(CacheDeviceParams const& p, FwdWork<Traits> const& work, int slot) {
    return p.page_table == nullptr ? work.location.row + slot : p.page_size.mod(slot);
  }

  template <int kColumns>
  CUTE_DEVICE static void load_boxes(CacheDeviceParams const& p, CUtensorMap const& map,
                                     Mbarrier& full, ElementKv* target,
                                     FwdWork<Traits> const& work, int n, int id) {
    constexpr int kKeys = Traits::kTileN;
    int const lane = lane_of_warp();
    if (lane == 0) {
      full.arrive_and_expect_tx(kKeys * kColumns * sizeof(ElementKv));
    } else {
      full.arrive();
    }
    __syncwarp();
    int const first = lane * p.box_keys;
    if (first < kKeys) {
      CUTE_UNROLL
      for (int column = 0; column < kColumns; column += Traits::kSlice) {
        cute::SM90_TMA_LOAD_4D::copy(&map, mbarrier_word(full), p.hint,
                                     target + column * kKeys + first * Traits::kSlice, column,
                                     row_of(p, work, n * kKeys + first), work.kv_head, id);
      }
    }
    __syncwarp();
  }

  template <int kColumns>
  CUTE_DEVICE static void gather(CacheDeviceParams const& p, bool is_key, Mbarrier& full,
                                 ElementKv* target, FwdWork<Traits> const& work, int n,
                                 Ids const& ids) {
    constexpr int kKeys = Traits::kTileN;
    constexpr int kChunks = kColumns * int(sizeof(ElementKv)) / 16;  // of a row
    constexpr int kSliceChunks = Traits::kSlice * int(sizeof(ElementKv)) / 16;
    static_assert(kSliceChunks == 8 || kSliceChunks == 4);
    TensorView const& rows = is_key ? p.k_rows : p.v_rows;
    int const row_bytes = is_key ? p.row_bytes_k : p.row_bytes_v;
    int const lane = lane_of_warp();
    // This lane's rows; 0: none.
    int64_t offsets[kRowsPerLane];
    CUTE_UNROLL
    for (int i = 0; i < kRowsPerLane; ++i) {
      int const slot = n * kKeys + lane + 32 * i;
      bool const is_loaded =
          has_key(work, slot) && uint32_t(ids.id[i]) < uint32_t(p.entries);
      offsets[i] = is_loaded ? ids.id[i] * rows.batch_stride +
                                   row_of(p, work, slot) * rows.row_stride +
                                   work.kv_head * rows.head_stride
                             : -1;
    }
    char const* const data = static_cast<char const*>(rows.data);
    uint32_t const base = cute::cast_smem_ptr_to_uint(target);
    CUTE_UNROLL
    for (int i = 0; i < kRowsPerLane; ++i) {
      CUTE_NO_UNROLL
      for (int j = lane; j < 32 * kChunks; j += 32) {
        int const row = j / kChunks;
        int const chunk = j % kChunks;
        int64_t const offset = __shfl_sync(kAllLanes, offsets[i], row);
        int const in_tile = 32 * i + row;
        bool const is_loaded = offset >= 0 && chunk * 16 < row_bytes;
        uint32_t const to = base + (chunk / kSliceChunks * kKeys + in_tile) * kSliceChunks * 16 +
                            swizzled(chunk % kSliceChunks, in_tile) * 16;
        char const* const from = data + (is_loaded ? offset + chunk * 16 : 0);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                     "r"(is_loaded ? 16 : 0)
                     : "memory");
      }
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
                     cute::cast_smem_ptr_to_uint(&full))
                 : "memory");
  }

  static constexpr uint32_t kAllLanes = 0xffffffffu;

  // The swizzle of slices of 128 or 64 bytes.
  CUTE_DEVICE static int swizzled(int chunk, int row) {
    return sizeof(ElementKv) * Traits::kSlice == 128 ? chunk ^ row % 8 : chunk ^ row / 2 % 4;
  }
};

}  // namespace fa3
