// K and V loaded from a cache by a warp. A K tile is several boxes, each of keys of one page; a
// dense cache is one page a sequence. Pages of other sizes than multiples of 8 are gathered row by
// row.
//
// INVARIANT: pages that a sequence does not need are not read: their boxes have coordinates outside
// the tensor, which TMA reads as zeros. V of a key that the sequence does not have must
// not reach O through P = 0, since 0 * NaN is NaN: consumers clear its row (missing_values.h), or,
// where other warps read V first, a K tile with such keys is gathered, and their rows are zeros.
// Their K gives scores that the mask replaces.
#pragma once

#include "device/async_copy.h"
#include "device/math.h"
#include "forward/keys_tma.h"

namespace fa3 {

// The keys of a sequence and KV head, as CacheLocation names them.
struct KeySource {
  int kv_head;
  int sequence;
  int entry;
  int row;
  int first_slot;
  int end_slot;

  template <class Work>
  CUTE_DEVICE static KeySource of(Work const& work) {
    CacheLocation const& at = work.location;
    return KeySource{work.kv_head, at.sequence, at.entry, at.row, at.slot, at.slot + at.len.k};
  }

  CUTE_DEVICE bool has(int slot) const { return slot >= first_slot && slot < end_slot; }
};

// The scale of a page into shared memory, or zero. kIsAsync: by cp.async.
struct CopiedPageScale {
  static constexpr bool kIsAsync = true;

  CUTE_DEVICE static void load(float* target, float const* source, bool exists) {
    copy_float(target, source, exists);
  }
};

struct StoredPageScale {
  static constexpr bool kIsAsync = false;

  CUTE_DEVICE static void load(float* target, float const* source, bool exists) {
    *target = exists ? *source : 0.f;
    __threadfence_block();  // before arrive_after_copies()
  }
};

template <class Traits>
struct PagedKeys {
  using ElementKv = typename Traits::ElementKv;
  static constexpr int kKeys = Traits::kTileN;
  // Warps that gather rows, 32 of them at a time.
  static constexpr int kGatheringWarps = Traits::kTransposesV ? 1 : kWarpgroupWarps;

  CUTE_DEVICE static int loading_warps(CacheDeviceParams const& p) {
    return p.box_keys > 0 ? 1 : kGatheringWarps;
  }

  // Arrivals at the barrier of a loaded stage: all lanes.
  CUTE_DEVICE static int arrivals(CacheDeviceParams const& p) { return 32 * loading_warps(p); }

  // Gathered rows were not written by TMA.
  CUTE_DEVICE static void after_wait(CacheDeviceParams const&) { fence_shared_for_async_proxy(); }

  // The page, or the entry of a dense cache, of this lane's box of the n-th K tile, or of its first
  // row.
  CUTE_DEVICE static int read_id(CacheDeviceParams const& p, KeySource const& from, int n,
                                 int warp) {
    int const slot = p.box_keys > 0 ? lane_of_warp() * p.box_keys : 32 * warp + lane_of_warp();
    return entry_of(p, from, n * kKeys + slot);
  }

  // Fetches boxes of the n-th K tile into L2. An earlier launch may still write the page table.
  CUTE_DEVICE static void prefetch(CacheDeviceParams const& p, KeySource const& from, int n) {
    int const slot = n * kKeys + lane_of_warp() * p.box_keys;
    if (p.box_keys > 0 && slot < (n + 1) * kKeys) {
      int const id = entry_of<true>(p, from, slot);
      int const row = row_of(p, from, slot);
      prefetch_columns<Traits::kRawColumns>(p.k, row, from.kv_head, id);
      prefetch_columns<Traits::kRawColumnsV>(p.v, row, from.kv_head, id);
    }
  }

  // How scales of pages get into shared memory. WHY not by cp.async in a cluster: calls in parts
  // were wrong by the scales of some keys, not in each run, as if a scale came after the arrival
  // that waits for it (head dim 512; H200, 2026-11-29).
  using PageScale =
      cute::conditional_t<(Traits::k.column_ctas() > 1), StoredPageScale, CopiedPageScale>;

  // The scale of the page of this lane's box, or of its row, which arrives with the copies of
  // load(). id: from read_id(). That of a page not needed is 0, since V of such keys is 0.
  template <bool kIsK>
  CUTE_DEVICE static void load_scale(CacheDeviceParams const& p, float (&target)[kKeys],
                                     int kv_head, int id, int warp) {
    static_assert(!Traits::kConverts || kKeys <= 32 * kGatheringWarps, "a lane has one row");
    ScaleView const& scales = kIsK ? p.k_page_scale : p.v_page_scale;
    int const index = 32 * warp + lane_of_warp();
    if (p.has_page_scales() && index * int(p.keys_of_scale.divisor) < kKeys) {
      bool const exists = uint32_t(id) < uint32_t(p.entries);
      float const* const scale = scales.data + kv_head * scales.head_stride;
      PageScale::load(target + index, scale + (exists ? id : 0) * scales.batch_stride, exists);
    }
  }

  // The n-th K tile of K or V, as (keys, columns) in slices.
  template <bool kIsK>
  CUTE_DEVICE static void load(CacheDeviceParams const& p, Mbarrier& full, ElementKv* target,
                               KeySource const& from, int n, int id, int warp) {
    if (p.box_keys > 0 && (kIsK || Traits::kClearsValues || !has_tail(from, n))) {
      load_boxes<kIsK ? Traits::kRawColumns : Traits::kRawColumnsV>(p, kIsK ? p.k : p.v, full,
                                                                    target, from, n, id);
    } else {
      gather<kIsK>(p, cute::cast_smem_ptr_to_uint(&full), cute::cast_smem_ptr_to_uint(target), from,
                   n, id, warp);
    }
  }

  CUTE_DEVICE static bool has_tail(KeySource const& from, int n) {
    return !from.has(n * kKeys) || !from.has((n + 1) * kKeys - 1);
  }

  // The entry that holds a slot; one outside the tensor where no key of the box is needed.
  // kIsEarly: what is read must not stay in L1.
  template <bool kIsEarly = false>
  CUTE_DEVICE static int entry_of(CacheDeviceParams const& p, KeySource const& from, int slot) {
    bool const is_needed = slot < from.end_slot && slot + max_of(p.box_keys, 1) > from.first_slot;
    if (p.page_table == nullptr) {
      return is_needed ? from.entry : p.entries;
    }
    if (!is_needed) {
      return p.entries;
    }
    int const* const id = p.page_table + from.sequence * p.table_stride + p.page_size.div(slot);
    return kIsEarly ? read_now(id) : *id;
  }

  CUTE_DEVICE static int row_of(CacheDeviceParams const& p, KeySource const& from, int slot) {
    return p.page_table == nullptr ? from.row + slot : p.page_size.mod(slot);
  }

  template <int kColumns>
  CUTE_DEVICE static void prefetch_columns(CUtensorMap const& map, int row, int kv_head, int id) {
    CUTE_UNROLL
    for (int column = 0; column < kColumns; column += Traits::kRawSlice) {
      cute::SM90_TMA_LOAD_4D::PREFETCH::copy(&map, ColumnsOf<Traits>::first_column() + column, row,
                                             kv_head, id);
    }
  }

  template <int kColumns>
  CUTE_DEVICE static void load_boxes(CacheDeviceParams const& p, CUtensorMap const& map,
                                     Mbarrier& full, ElementKv* target, KeySource const& from,
                                     int n, int id) {
    int const lane = lane_of_warp();
    constexpr uint32_t kBytes = kKeys * kColumns * sizeof(ElementKv);
    if (Traits::kConverts && PageScale::kIsAsync && p.has_page_scales()) {
      if (lane == 0) {
        full.expect_transaction(kBytes);
      }
      arrive_after_copies(full);
    } else if (lane == 0) {
      full.arrive_and_expect_tx(kBytes);
    } else {
      full.arrive();
    }
    __syncwarp();
    int const first = lane * p.box_keys;
    if (first < kKeys) {
      int const row = row_of(p, from, n * kKeys + first);
      CUTE_UNROLL
      for (int column = 0; column < kColumns; column += Traits::kRawSlice) {
        cute::SM90_TMA_LOAD_4D::copy(
            &map, mbarrier_word(full), p.hint, target + column * kKeys + first * Traits::kRawSlice,
            ColumnsOf<Traits>::first_column() + column, row, from.kv_head, id);
      }
    }
    __syncwarp();
  }

  // Several lanes copy a row, each a chunk of 16 bytes; a warp copies 32 rows at a time. id: the
  // entry of this lane's first row; unknown with boxes. WHY no inlining: it would make the way of
  // boxes long, whose instructions have to be fetched first.
  template <bool kIsK>
  static __device__ __noinline__ void gather(CacheDeviceParams const& p, uint32_t full,
                                             uint32_t target, KeySource from, int n, int id,
                                             int warp) {
    constexpr int kColumns = kIsK ? Traits::kRawColumns : Traits::kRawColumnsV;
    TensorView const& rows = kIsK ? p.k_rows : p.v_rows;
    int const row_bytes = kIsK ? p.row_bytes_k : p.row_bytes_v;
    constexpr int kChunks = kColumns * int(sizeof(ElementKv)) / 16;  // in a row
    constexpr int kLanes = kChunks <= 4 ? 4 : kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;
    constexpr int kSliceChunks = Traits::kRawSlice * int(sizeof(ElementKv)) / 16;
    constexpr int kRowsAtOnce = 32 / kLanes;
    static_assert(kChunks <= 32 && (kSliceChunks == 8 || kSliceChunks == 4));
    int const lane = lane_of_warp();
    int const chunk = lane % kLanes;
    int const byte = ColumnsOf<Traits>::first_column() * int(sizeof(ElementKv)) + chunk * 16;
    bool const has_column = byte < row_bytes;
    char const* const data = static_cast<char const*>(rows.data) + byte;
    uint32_t const base = target + chunk / kSliceChunks * kKeys * kSliceChunks * 16;
    int const step = 32 * loading_warps(p);
    CUTE_NO_UNROLL
    for (int first = 32 * warp; first < kKeys; first += step) {
      int const slot = n * kKeys + first + lane;
      bool const is_known = p.box_keys == 0 && first == 32 * warp;
      int64_t const offset =
          offset_of_row(p, rows, from, slot, is_known ? id : entry_of(p, from, slot));
#pragma unroll 4
      for (int i = 0; i < 32; i += kRowsAtOnce) {
        int const row = first + i + lane / kLanes;
        int64_t const of_row = __shfl_sync(0xffffffffu, offset, i + lane / kLanes);
        uint32_t const to =
            base + row * kSliceChunks * 16 + swizzled<kSliceChunks>(chunk % kSliceChunks, row) * 16;
        if ((kLanes == kChunks || chunk < kChunks) && row < kKeys) {
          bool const is_read = of_row >= 0 && has_column;
          copy_chunk(to, data + (is_read ? of_row : 0), is_read);
        }
      }
    }
    arrive_after_copies(full);
  }

  // In bytes; -1: the row is not loaded.
  CUTE_DEVICE static int64_t offset_of_row(CacheDeviceParams const& p, TensorView const& rows,
                                           KeySource const& from, int slot, int id) {
    bool const exists = from.has(slot) && uint32_t(id) < uint32_t(p.entries);
    return exists ? id * rows.batch_stride + row_of(p, from, slot) * rows.row_stride +
                        from.kv_head * rows.head_stride
                  : -1;
  }

  // The swizzle of slices of 128 or 64 bytes.
  template <int kSliceChunks>
  CUTE_DEVICE static int swizzled(int chunk, int row) {
    return kSliceChunks == 8 ? chunk ^ row % 8 : chunk ^ row / 2 % 4;
  }
};

}  // namespace fa3
