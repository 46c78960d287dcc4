// Which tensors the copy engine (TMA) can address. The others are copied into packed memory first.
#pragma once

#include "config/fwd_config.h"

namespace fa3 {

constexpr int64_t kTmaAlignment = 16;                // bytes, of the base and of every stride
constexpr int64_t kTmaStrideEnd = int64_t(1) << 40;  // bytes, exclusive

// For a rank 4 tensor of e4m3 or 16-bit elements whose last dimension is contiguous and that is not
// empty.
// Strides of dimensions of size 1 mean nothing and are not looked at.
inline bool tma_can_address(TensorMeta const& meta) {
  bool fine = meta.address % kTmaAlignment == 0;
  for (int i = 0; i < 3; ++i) {
    int64_t const stride = meta.stride[i] * element_bytes(meta.dtype);
    fine = fine && (meta.size[i] == 1 || (stride % kTmaAlignment == 0 && stride < kTmaStrideEnd));
  }
  return fine;
}

}  // namespace fa3
