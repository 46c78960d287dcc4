// The buffer of partial results: fp32, in the order in which the warps of the output warpgroups
// have them in registers, so that a warp stores and loads 512 bytes in a row.
#pragma once

#include "mla/traits.h"

namespace fa3 {

constexpr int kWarpRows = 16;  // rows of an accumulator in a warp

// The rows of a part. A lane's float4 has two columns of two rows, those of fragments.h.
template <class Traits>
struct MlaParts {
  static constexpr int kFours = Traits::kHeadDimV / 8;  // float4s of a lane, of 16 rows

  typename Traits::Params const& p;
  int slot;

  // The float4s of the lanes of a warp of rows: index i has the columns 8 i to 8 i + 7.
  CUTE_DEVICE float4* fours(int warp, int i) const {
    float* const rows =
        p.parts + (int64_t(slot) * p.part_rows + warp * kWarpRows) * Traits::kHeadDimV;
    return reinterpret_cast<float4*>(rows) + 32 * i;
  }

  CUTE_DEVICE float* lses() const { return p.part_lses + int64_t(slot) * p.part_rows; }
};

}  // namespace fa3
