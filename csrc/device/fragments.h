// Views of a wgmma accumulator (64 rows, 128 threads): as (row, column) of one thread, and as
// operand A of the next GEMM.
#pragma once

#include "device/cute.h"

namespace fa3 {

// A thread holds two rows of an accumulator:
//
//   row = 16 * warp + lane / 4 (+ 8), column = 8 j + 2 * (lane % 4) (+ 1)
//
//   ((2, 2, J), 1, 1) -> (2 rows, (2, J) columns)
template <class Fragment>
CUTE_DEVICE auto rows_view(Fragment& acc) {
  auto layout = acc.layout();
  return cute::make_tensor(
      acc.data(),
      cute::make_layout(cute::get<0, 1>(layout),
                        cute::make_layout(cute::get<0, 0>(layout), cute::get<0, 2>(layout))));
}

// Multiplies each of this thread's two rows of an accumulator by its own factor.
template <class Fragment>
CUTE_DEVICE void multiply_rows(Fragment& acc, float const (&factor)[2]) {
  auto rows = rows_view(acc);
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    CUTE_UNROLL
    for (int c = 0; c < cute::size<1>(rows); ++c) {
      rows(r, c) *= factor[r];
    }
  }
}

// The layout of an accumulator as operand A. Registers stay in place: two groups of 8 accumulator
// columns are one group of 16 columns of A.
//
//   ((2, 2, J), 1, 1) -> ((2, 2, 2), 1, J / 2)
template <class Layout>
CUTE_DEVICE auto operand_a_layout(Layout acc) {
  auto halves = cute::logical_divide(cute::get<0, 2>(acc), cute::Layout<cute::_2>{});  // (2, J / 2)
  return cute::make_layout(
      cute::make_layout(cute::get<0, 0>(acc), cute::get<0, 1>(acc), cute::get<0>(halves)),
      cute::get<1>(acc), cute::get<1>(halves));
}

// The layout of an accumulator as 8-bit operand A, 16 columns at a time of each half of 32. A
// thread's columns have the order 2 j, 2 j + 1, 8 + 2 j, 8 + 2 j + 1, so the rows of operand B must
// have the same order (forward/fp8/values_transposed.h).
//
//   ((2, 2, J), 1, 1) -> ((4, 2, 2), 1, J / 4)
template <class Layout>
CUTE_DEVICE auto operand_a_layout_of_bytes(Layout acc) {
  constexpr int kGroups = decltype(cute::size<0, 2>(acc))::value;
  return cute::make_layout(
      cute::Shape<cute::Shape<cute::_4, cute::_2, cute::_2>, cute::_1, cute::Int<kGroups / 4>>{});
}

// Byte offset of a chunk (8 columns, 16 bytes) of a row in a tile of 64-column slices with the
// 128-byte swizzle.
template <int kRows>
CUTE_HOST_DEVICE constexpr int chunk_offset_bytes(int row, int chunk) {
  return (chunk / 8 * kRows + row) * 128 + (chunk % 8 ^ row % 8) * 16;
}

// Loads and stores the 64 rows of a warpgroup, starting at first_row, between a tile of kRows rows
// in shared memory and registers. Four words of a thread cover 16 columns of 16 bits (or 32 of 8
// bits), in the layout of operand A or of an accumulator. Whole warps call these.
template <int kRows, int kSteps, class Words>
CUTE_DEVICE void load_warpgroup_rows(char const* tile, int first_row, int thread, Words&& words) {
  int const row = first_row + thread / 32 * 16 + thread % 16;
  int const chunk = thread % 32 / 16;
  CUTE_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    auto const* const from = tile + chunk_offset_bytes<kRows>(row, 2 * step + chunk);
    cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<cute::uint128_t const*>(from), words(4 * step),
                                  words(4 * step + 1), words(4 * step + 2), words(4 * step + 3));
  }
}

template <int kRows, int kSteps, class Words>
CUTE_DEVICE void store_warpgroup_rows(Words const& words, char* tile, int first_row, int thread) {
  int const row = first_row + thread / 32 * 16 + thread % 16;
  int const chunk = thread / 16 % 2;
  CUTE_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    auto* const target = tile + chunk_offset_bytes<kRows>(row, 2 * step + chunk);
    cute::SM90_U32x4_STSM_N::copy(words(4 * step), words(4 * step + 1), words(4 * step + 2),
                                  words(4 * step + 3), *reinterpret_cast<cute::uint128_t*>(target));
  }
}

// The first of this thread's two rows.
CUTE_DEVICE int fragment_row(int warpgroup_thread) {
  return (warpgroup_thread / 32) * 16 + (warpgroup_thread % 32) / 4;
}

// The first of this thread's columns.
CUTE_DEVICE int fragment_column(int warpgroup_thread) { return 2 * (warpgroup_thread % 4); }

}  // namespace fa3
