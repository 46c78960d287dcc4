// Descriptors of the copy engine (TMA), built by hand on the host. A map describes a tensor of
// 16-bit elements by up to five dimensions, innermost first, and the box that one copy moves; the
// innermost extent of a box is 64 columns (128 bytes), stored with the 128-byte swizzle that wgmma
// reads.
//
// Reads past the tensor give zero, writes past it are dropped: tails of a dense sequence need no
// care.
#pragma once

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include "config/fwd_config.h"

namespace fa3 {

struct TensorMapDim {
  int64_t size;
  int64_t stride;  // in elements; ignored for the innermost, and where the size is 1
  int box;
};

// nullptr when the driver has no such function.
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static PFN_cuTensorMapEncodeTiled_v12000 const encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaError_t const error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &result);
    bool const found = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return found ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function) : nullptr;
  }();
  return encoder;
}

// Makes the tensor maps of a launch and keeps the first error.
//
// INVARIANT: data is 16-byte aligned and the strides of dimensions larger than 1 are multiples of
// 16 bytes; the op copies tensors that are not. The strides of size-1 dimensions mean nothing and
// are replaced by a valid one.
struct TensorMapMaker {
  Dtype dtype;
  cudaError_t error = cudaSuccess;

  template <int kRank>
  CUtensorMap make(void const* data, TensorMapDim const (&dims)[kRank]) {
    constexpr int64_t kElementBytes = 2;
    cuuint64_t sizes[kRank];
    cuuint64_t strides[kRank];  // bytes, of dimensions 1 and up
    cuuint32_t boxes[kRank];
    cuuint32_t steps[kRank];
    for (int i = 0; i < kRank; ++i) {
      sizes[i] = cuuint64_t(dims[i].size);
      boxes[i] = cuuint32_t(dims[i].box);
      steps[i] = 1;
      if (i > 0) {
        strides[i - 1] = dims[i].size > 1 ? cuuint64_t(dims[i].stride * kElementBytes) : 16;
      }
    }
    CUtensorMap map;
    PFN_cuTensorMapEncodeTiled_v12000 const encode = tensor_map_encoder();
    CUresult const result =
        encode == nullptr
            ? CUDA_ERROR_NOT_FOUND
            : encode(&map,
                     dtype == Dtype::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                              : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                     kRank, const_cast<void*>(data), sizes, strides, boxes, steps,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (error == cudaSuccess) {
      error = static_cast<cudaError_t>(result);  // the runtime and the driver number errors alike
    }
    return map;
  }
};

}  // namespace fa3
