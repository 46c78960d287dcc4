// Which tensors TMA can address, and which of them kernels load by chunks of 16 bytes. The others
// are copied into packed memory first.
#pragma once

#include "call/given_tensor.h"
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

// Whether aligned chunks of so many bytes of the columns can be loaded and stored.
inline bool has_chunks(TensorMeta const& meta, int64_t bytes = kTmaAlignment) {
  int const columns = meta.rank - 1;
  bool fine = meta.address % bytes == 0 && (meta.size[columns] <= 1 || meta.stride[columns] == 1);
  for (int i = 0; i < columns; ++i) {
    int64_t const stride = meta.stride[i] * bytes_of(meta.dtype);
    fine = fine && (meta.size[i] <= 1 || stride % bytes == 0);
  }
  return fine;
}

}  // namespace fa3
