// The buffer of partial results: fp32, in the register order of the output warpgroups, so that each
// warp stores and loads 512 contiguous bytes.
#pragma once

#include "mla/traits.h"

namespace fa3 {

constexpr int kWarpRows = 16;  // rows of an accumulator per warp

// The rows of a part. A lane's float4 holds two columns of two rows, as in fragments.h.
template <class Traits>
struct MlaParts {
  static constexpr int kFours = Traits::kHeadDimV / 8;  // float4s of a lane in 16 rows

  typename Traits::Params const& p;
  int slot;

  // The 32 float4s of a warp's 16 rows, one per lane. Index i covers columns 8 i to 8 i + 7.
  CUTE_DEVICE float4* fours(int warp, int i) const {
    float* const rows =
        p.parts + (int64_t(slot) * p.part_rows + warp * kWarpRows) * Traits::kHeadDimV;
    return reinterpret_cast<float4*>(rows) + 32 * i;
  }

  CUTE_DEVICE float* lses() const { return p.part_lses + int64_t(slot) * p.part_rows; }
};

}  // namespace fa3
