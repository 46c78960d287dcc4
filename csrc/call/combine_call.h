// Calls of the op `combine`.
#pragma once

#include <optional>

#include "core/problem.h"

namespace fa3 {

// A stack of parts.
struct CombineCall {
  TensorMeta out_partial;  // (parts, batch, rows, heads, head_dim) float32, float16 or bfloat16
  TensorMeta lse_partial;  // (parts, batch, rows, heads) float32
  TensorMeta out;          // (batch, rows, heads, head_dim) float32, float16 or bfloat16
};

// Parts in separate tensors, at least two. part[0] may stand for a stack of `stacked` parts;
// part_stride and lse_part_stride are the distances between them.
struct MergeCall {
  static constexpr int kMost = 4;
  TensorMeta out;  // (batch, rows, heads, head_dim) or (rows, heads, head_dim), 16 bits
  // As out; or the rows of the whole batch in one entry, or without a batch.
  std::optional<TensorMeta> part[kMost];
  std::optional<TensorMeta> lse[kMost];  // (batch, heads, rows) or (heads, rows), float32
  int stacked = 1;
  int64_t part_stride = 0;
  int64_t lse_part_stride = 0;

  int parts() const;

  // The first parts are `count` entries of a batch.
  void set_first(TensorMeta entries, TensorMeta lses, int count) {
    stacked = count;
    part_stride = entries.stride[0];
    lse_part_stride = lses.stride[0];
    entries.size[0] = lses.size[0] = 1;
    set(0, entries, lses);
  }

  void set(int i, TensorMeta const& rows, TensorMeta const& rows_lse) {
    part[i] = rows;
    lse[i] = rows_lse;
  }
};

// A part as (batch, rows, heads, head_dim) and its LSE as (batch, rows, heads), with the sizes of
// out, which has 4 dimensions. The call is fine.
TensorMeta rows_like(TensorMeta const& part, TensorMeta const& out);
TensorMeta lse_like(TensorMeta const& lse, TensorMeta const& out);

}  // namespace fa3
