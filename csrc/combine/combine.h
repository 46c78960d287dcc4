// Host side of the kernel that combines partial results of attention. The op `combine` and ops
// that make such results call it.
#pragma once

#include "core/int_math.h"
#include "core/problem.h"

namespace fa3 {

// Columns per warp, four per lane.
constexpr int kCombineColumns = 128;
constexpr int kMostMergedParts = 4;  // most parts that are separate tensors

// A part or a stack of parts. A row is (batch, row, head). Strides are in elements.
struct CombineSource {
  void const* data = nullptr;
  int64_t stride[4] = {};  // batch, row, head, column
  float const* lse = nullptr;
  int64_t lse_stride[3] = {};  // batch, row, head
};

struct CombineParams {
  // One part each, but the first may hold `stacked` parts; with is_stack it holds all.
  CombineSource source[kMostMergedParts];
  bool is_stack = true;
  int stacked = 1;
  int64_t part_stride = 0;  // between the parts of one tensor
  int64_t lse_part_stride = 0;
  Dtype dtype = Dtype::kFloat32;  // the parts' dtype; separate tensors are never float32
  void* out = nullptr;
  int64_t out_stride[4] = {};  // batch, row, head, column
  Dtype out_dtype = Dtype::kFloat32;
  float* lse = nullptr;        // nullptr: not requested
  int64_t lse_stride[3] = {};  // batch, row, head
  int parts = 0;
  int warps = 0;  // rows of all batch entries and heads, times column_blocks()
  int columns = 0;
  bool is_vector = false;  // columns are contiguous, and rows begin at multiples of 4 columns
  FastDiv by_blocks;
  FastDiv by_heads;
  FastDiv by_rows;

  // Warps per row.
  int column_blocks() const { return max_of(1, ceil_div(columns, kCombineColumns)); }
};

// Launches on the current device and the given stream (a cudaStream_t). params.warps is positive.
void launch_combine(CombineParams const& params, void* stream);

}  // namespace fa3
