// The kernel that combines parts of attention. Host side; the ops `combine` and `merge_parts` call
// it.
#pragma once

#include "core/int_math.h"
#include "core/problem.h"

namespace fa3 {

// Columns of a warp; a lane has four of them.
constexpr int kCombineColumns = 128;
constexpr int kMostMergedParts = 4;  // that are tensors of their own

// A part, or a stack of them. A row is (batch, row, head). Strides are in elements.
struct CombineSource {
  void const* data = nullptr;
  int64_t stride[4] = {};  // batch, row, head, column
  float const* lse = nullptr;
  int64_t lse_stride[3] = {};  // batch, row, head
};

struct CombineParams {
  CombineSource source[kMostMergedParts];  // a part each, or the first one has all
  bool is_stack = true;
  int64_t part_stride = 0;  // between the parts of one tensor
  int64_t lse_part_stride = 0;
  Dtype dtype = Dtype::kFloat32;  // the parts' dtype; separate tensors are never float32
  void* out = nullptr;
  int64_t out_stride[4] = {};  // batch, row, head, column
  Dtype out_dtype = Dtype::kFloat32;
  float* lse = nullptr;        // nullptr: not wanted
  int64_t lse_stride[3] = {};  // batch, row, head
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
