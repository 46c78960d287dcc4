// The buffer of partial results on a cache. O of a part is fp32 and lies in register order, so a
// warp stores and loads 512 contiguous bytes. Each row also has an LSE (part_lses), or a maximum
// and a sum (part_lses, group_lses). Lanes without a row store nothing, and have no memory in a
// part of at most 8 rows.
#pragma once

#include "core/key_splits.h"
#include "forward/column_ctas.h"
#include "forward/params.h"

namespace fa3 {

constexpr int kWarpRows = 16;  // rows of an accumulator per warp

// The slot of part i of an output tile.
template <class Traits>
CUTE_DEVICE int slot_of_part(KeyPart const& part, int i) {
  return ColumnsOf<Traits>::slot(part.slot_of(i));
}

// The rows of a part. A lane's float4 holds two columns of two rows, as in fragments.h.
template <class Traits>
struct PartRows {
  static constexpr int kFours = Traits::kHeadDimV / 8;  // float4s of a lane in 16 rows

  CacheDeviceParams const& p;
  int slot;

  // The distance of a lane's two rows; four lanes have the same rows.
  CUTE_DEVICE int half() const {
    return Traits::kKind.is_latent ? kWarpRows / 2 : min_of(kWarpRows, p.part_rows) / 2;
  }

  // The float4s of a warp's 16 rows, one per lane. Index i covers columns 8 i to 8 i + 7.
  CUTE_DEVICE float4* fours(int warp, int i) const {
    return reinterpret_cast<float4*>(p.parts + first_row(warp) * Traits::kHeadDimV) +
           4 * half() * i;
  }

  // Index of a warp's first row in the buffers of values per row.
  CUTE_DEVICE int64_t first_row(int warp) const {
    return int64_t(slot) * p.part_rows + warp * kWarpRows;
  }
};

}  // namespace fa3
