// The warpgroup that loads Q and dO once, and the rows of each tile of keys, by chunks of 16 bytes.
// Rows that do not exist become zeros and are not read.
#pragma once

#include "chosen/traits.h"

namespace fa3 {

template <class Traits>
struct ChosenGather {
  using Element = typename Traits::Element;
  static constexpr int kLanes = 8;  // that share a row
  static constexpr int kRowsAtOnce = kWarpgroupThreads / kLanes;
  static constexpr int kRows = kTileKeys / kRowsAtOnce;  // that a thread copies

  ChosenStorage<Traits>& shared;
  ChosenGradientParams const& p;
  ChosenWork work;
  int thread;

  CUTE_DEVICE int row_of_thread(int i) const { return thread / kLanes + i * kRowsAtOnce; }

  // Copies slices of a row to row `i` of a tile.
  template <int kCount>
  CUTE_DEVICE void copy(char const* source, Element* tile, int i, bool is_read) const {
    int const chunk = thread % kLanes;
    uint32_t const target = cute::cast_smem_ptr_to_uint(tile) +
                            uint32_t(chunk_offset_bytes<kHeadRows>(row_of_thread(i), chunk));
    CUTE_UNROLL
    for (int slice = 0; slice < kCount; ++slice) {
      copy_chunk(target + slice * kSliceElements * int(sizeof(Element)),
                 source + slice * 128 + chunk * 16, is_read);
    }
  }

  CUTE_DEVICE void load_queries() const {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      bool const is_read = row_of_thread(i) < work.heads;
      int const head = work.head + (is_read ? row_of_thread(i) : 0);
      copy<Traits::kSlicesK>(row_at<Element>(p.q, work.query, head), shared.q, i, is_read);
      if constexpr (Traits::kHasLatents) {
        copy<Traits::kSlicesV>(row_at<Element>(p.q_latent, work.query, head),
                               shared.q + Traits::kSlicesK * kSliceElements, i, is_read);
      }
      copy<Traits::kSlicesV>(row_at<Element>(p.dout, work.query, head), shared.dout, i, is_read);
    }
    arrive_after_copies(shared.q_full);
  }

  CUTE_DEVICE void run() const {
    load_queries();
    ChosenList const list(p, work);
    int rows[kRows];
    auto const read_rows = [&](int tile) {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        rows[i] = list.row_of(tile * kTileKeys + row_of_thread(i));
      }
    };
    read_rows(0);
    CUTE_NO_UNROLL
    for (int tile = 0; tile < list.tiles(); ++tile) {
      shared.keys_empty.wait(tile % 2 ^ 1);
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        bool const is_read = rows[i] >= 0;
        int const row = max_of(rows[i], 0);
        copy<Traits::kSlicesK>(row_at<Element>(p.k, row, work.head_k), shared.keys, i, is_read);
        copy<Traits::kSlicesV>(row_at<Element>(p.v, row, work.head_k),
                               shared.keys + Traits::kSlicesK * kSliceElements, i, is_read);
      }
      arrive_after_copies(shared.keys_full);
      read_rows(tile + 1);
    }
  }
};

}  // namespace fa3
