// The kernel that combines parts of attention. Host side; the op `combine` calls it.
#pragma once

#include "core/int_math.h"
#include "core/problem.h"

namespace fa3 {

// Columns of a warp; a lane has four of them.
constexpr int kCombineColumns = 128;

// A row is (batch, row, head). Strides are in elements.
struct CombineParams {
  float const* partial = nullptr;
  int64_t partial_stride[5] = {};  // part, batch, row, head, column
  float const* part_lse = nullptr;
  int64_t lse_stride[4] = {};  // part, batch, row, head
  void* out = nullptr;
  int64_t out_stride[4] = {};  // batch, row, head, column
  Dtype out_dtype = Dtype::kFloat32;
  float* lse = nullptr;  // (batch, rows, heads), contiguous
  int parts = 0;
  int warps = 0;  // rows of all batch entries and heads, times column_blocks()
  int columns = 0;
  bool is_vector = false;  // columns are contiguous, all rows at multiples of 4 of them
  FastDiv by_blocks;
  FastDiv by_heads;
  FastDiv by_rows;

  // Warps of a row.
  int column_blocks() const { return max_of(1, ceil_div(columns, kCombineColumns)); }
};

// On the current device and the given stream (a cudaStream_t). There are warps.
void launch_combine(CombineParams const& params, void* stream);

}  // namespace fa3
