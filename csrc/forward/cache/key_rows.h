// Rows of a latent cache that several warps gather with cp.async.
#pragma once

#include <climits>

#include "device/async_copy.h"
#include "forward/cache/keys_pages.h"

namespace fa3 {

// The rows of a cache, counted through all its entries.
struct CacheRows {
  int count;
  bool are_even;  // their distances are equal, also between entries, and fit in 32 bits

  static CacheRows of(CacheDeviceParams& p) {
    int const page_size = int(p.page_size.divisor);
    bool const has_even_keys = has_even_rows(p.k_rows, page_size);
    return {p.entries * page_size, has_even_rows(p.v_rows, page_size) && has_even_keys};
  }

 private:
  // Strides in bytes.
  static bool has_even_rows(TensorView& rows, int page_size) {
    if (page_size == 1) {
      rows.row_stride = rows.batch_stride;
    }
    return rows.batch_stride == page_size * rows.row_stride && rows.row_stride <= INT_MAX;
  }
};

// Eight lanes copy a row, each 16 bytes of a slice (or kLanesOfRow lanes of their own way). WHY a
// row is known by one number, from which a multiplication makes its address: the time of the
// producer is that of its instructions. With an address by page and row in each column group, 4096
// x 2048 chosen keys of 16 heads take 3440 us instead of 1994 (H200, 2026-11-28).
template <class Traits, int kWarps_, int kLanesOfRow_ = 8>
struct KeyRows {
  using Params = typename Traits::Params;
  using Keys = PagedKeys<Traits>;
  static constexpr int kWarps = kWarps_;
  static constexpr int kLanesOfRow = kLanesOfRow_;
  static constexpr int kRowsAtOnce = kWarps * 32 / kLanesOfRow;
  static constexpr int kRowsOfLane = Traits::kTileN / kRowsAtOnce;
  static_assert(kRowsAtOnce % 8 == 0, "all rows of a lane have the same swizzle");

  // Rows of the cache, counted through all its entries; outside of it if there is no key.
  struct Numbers {
    int row[kRowsOfLane];
  };

  Params const& p;
  KeySource const from;
  int const first;  // this lane's first row in a K tile
  int begin = 0;    // its slot
  Numbers numbers;
  Numbers next;
  bool is_plain = false;  // all rows of the warp exist and have the same distance

  CUTE_DEVICE KeyRows(Params const& p_, KeySource const& from_, int warp)
      : p(p_), from(from_), first((32 * warp + lane_of_warp()) / kLanesOfRow) {}

  CUTE_DEVICE static constexpr bool is_used() { return true; }

  CUTE_DEVICE void read_ahead(int tile) {
    int const slot = tile * Traits::kTileN + first;
    if (p.page_size.divisor == 1 && from.has(slot - first) &&
        from.has(slot - first + Traits::kTileN - 1)) {
      int const* const table = p.page_table + from.sequence * p.table_stride + slot;
      CUTE_UNROLL
      for (int i = 0; i < kRowsOfLane; ++i) {
        next.row[i] = table[i * kRowsAtOnce];
      }
    } else {
      CUTE_UNROLL
      for (int i = 0; i < kRowsOfLane; ++i) {
        next.row[i] = number_of(slot + i * kRowsAtOnce);
      }
    }
  }

  CUTE_DEVICE void take(int tile) {
    begin = tile * Traits::kTileN + first;
    numbers = next;
    bool exist = p.rows.are_even;
    CUTE_UNROLL
    for (int i = 0; i < kRowsOfLane; ++i) {
      exist &= exists(numbers.row[i]);
    }
    is_plain = __all_sync(kWholeWarp, exist);
  }

  // Loads slices of 128 bytes of the rows. WHY a path for rows that all exist:
  // DecodeProducer::copy_rows(). WHY the other one reads the page table again: it is rare, and a
  // loop over `numbers` would need local memory.
  template <int kSlices>
  CUTE_DEVICE void copy_rows(TensorView const& rows, int first_slice, char* buffer) const {
    int const chunk = lane_of_warp() % kLanesOfRow;
    char const* const data = static_cast<char const*>(rows.data) + first_slice * 128 + chunk * 16;
    uint32_t const target = cute::cast_smem_ptr_to_uint(buffer) +
                            uint32_t(chunk_offset_bytes<Traits::kTileN>(first, chunk));
    auto const for_slices = [](auto const& copy) {
      CUTE_UNROLL
      for (int slice = 0; slice < kSlices; ++slice) {
        copy(slice * 128, slice * Traits::kTileN * 128);
      }
    };
    if (is_plain) {
      CUTE_UNROLL
      for (int i = 0; i < kRowsOfLane; ++i) {
        char const* const row =
            data + uint64_t(uint32_t(numbers.row[i])) * uint32_t(rows.row_stride);
        uint32_t const to = target + i * kRowsAtOnce * 128;
        for_slices(
            [&](int from_offset, int offset) { copy_chunk(to + offset, row + from_offset); });
      }
    } else {
      CUTE_NO_UNROLL
      for (int i = 0; i < kRowsOfLane; ++i) {
        int const number = number_of(begin + i * kRowsAtOnce);
        int const own = exists(number) ? number : 0;
        char const* const row = data + p.page_size.div(own) * rows.batch_stride +
                                p.page_size.mod(own) * rows.row_stride;
        uint32_t const to = target + i * kRowsAtOnce * 128;
        for_slices([&](int from_offset, int offset) {
          copy_chunk(to + offset, row + from_offset, exists(number));
        });
      }
    }
  }

  // The entry of this lane's row i, and the row in it.
  struct Place {
    int entry;
    int row;
  };
  CUTE_DEVICE Place place(int i) const {
    return {p.page_size.div(numbers.row[i]), p.page_size.mod(numbers.row[i])};
  }

  // The address of this lane's row i; nullptr if there is no key.
  CUTE_DEVICE char const* row(TensorView const& rows, int i) const {
    auto const [entry, row] = place(i);
    return exists(numbers.row[i]) ? static_cast<char const*>(rows.data) +
                                        entry * rows.batch_stride + row * rows.row_stride
                                  : nullptr;
  }

 private:
  CUTE_DEVICE bool exists(int row) const { return uint32_t(row) < uint32_t(p.rows.count); }

  CUTE_DEVICE int number_of(int slot) const {
    return Keys::entry_of(p, from, slot) * int(p.page_size.divisor) + Keys::row_of(p, from, slot);
  }
};

}  // namespace fa3
