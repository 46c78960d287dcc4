// TMA descriptors (tensor maps), encoded on the host. A map describes a tensor by up to five
// dimensions, innermost first, and the box that one copy moves. The innermost extent of a box is a
// slice of 128, 64 or 32 bytes, stored with the swizzle that wgmma reads.
//
// Reads past the tensor return zero and writes past it are dropped, so tails of a dense sequence
// need no special case. Tails of packed sequences need none either: see RowDims.
#pragma once

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include "config/slices.h"
#include "core/packed_tiles.h"

namespace fa3 {

struct TensorMapDim {
  int64_t size;
  int64_t stride;  // in elements; ignored for the innermost dimension, or if the size is 1
  int box;
};

// Rows and batch of a tensor, as three dimensions of a map: row, batch, end.
//
// Dense: `end` is always 0.
//
// Packed: one map has to end where each sequence ends. So rows are counted from the end of the
// sequence: coordinate kRowsEnd is one past its last row, whatever its length, and one past the
// last row of the map. `end` is the row of the tensor at which the sequence ends, and its stride is
// one row. `batch` is always kRowsEnd, with a stride by which the address moves back by kRowsEnd
// rows, modulo 2^64. The sum of the three is the row of the tensor. WHY the map does not begin
// kRowsEnd rows before the tensor instead: TMA reads nothing for a box wholly past the end, but the
// base address of a map must be valid memory all the same.
struct RowDims {
  int64_t rows;
  int64_t row_stride;
  int64_t batches;
  int64_t batch_stride;
  int64_t ends;

  static RowDims dense(TensorView const& t, int rows, int batches) {
    return RowDims{rows, t.row_stride, batches, t.batch_stride, 1};
  }

  static RowDims packed(TensorView const& t, int total_rows, int element_bytes = 2) {
    constexpr int64_t kWrap = int64_t(1) << 34;  // bytes; kRowsEnd times this is 2^64
    static_assert(kRowsEnd == 1 << 30);
    // The stride of a tensor with a single row is meaningless.
    int64_t const row_stride = total_rows > 1 ? t.row_stride : 128 / element_bytes;
    return RowDims{kRowsEnd, row_stride, int64_t(kRowsEnd) + 1, kWrap / element_bytes - row_stride,
                   int64_t(total_rows) + 1};
  }
};

// The encode function of the driver; nullptr if the driver lacks it.
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
// INVARIANT: data is 16-byte aligned, and strides of dimensions larger than 1 are multiples of 16
// bytes; the op copies tensors that are not. Strides of size-1 dimensions are meaningless and are
// replaced by a valid one.
struct TensorMapMaker {
  Dtype dtype;
  cudaError_t error = cudaSuccess;

  // Encodes a map of the first kRank dimensions.
  template <int kRank, int kDims>
  CUtensorMap make(void const* data, TensorMapDim const (&dims)[kDims]) {
    static_assert(kRank <= kDims);
    int const bytes = element_bytes(dtype);
    cuuint64_t sizes[kRank];
    cuuint64_t strides[kRank];  // bytes, for dimensions 1 and up
    cuuint32_t boxes[kRank];
    cuuint32_t steps[kRank];
    for (int i = 0; i < kRank; ++i) {
      sizes[i] = cuuint64_t(dims[i].size);
      boxes[i] = cuuint32_t(dims[i].box);
      steps[i] = 1;
      if (i > 0) {
        strides[i - 1] = dims[i].size > 1 ? cuuint64_t(dims[i].stride * bytes) : 16;
      }
    }
    CUtensorMap map;
    PFN_cuTensorMapEncodeTiled_v12000 const encode = tensor_map_encoder();
    CUresult const result =
        encode == nullptr
            ? CUDA_ERROR_NOT_FOUND
            : encode(&map, data_type(), kRank, const_cast<void*>(data), sizes, strides, boxes,
                     steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(boxes[0] * bytes),
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (error == cudaSuccess) {
      error = static_cast<cudaError_t>(result);  // runtime and driver share error numbers
    }
    return map;
  }

 private:
  static CUtensorMapSwizzle swizzle_of(int slice_bytes) {
    return slice_bytes == 32   ? CU_TENSOR_MAP_SWIZZLE_32B
           : slice_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                               : CU_TENSOR_MAP_SWIZZLE_128B;
  }

  CUtensorMapDataType data_type() const {
    return dtype == Dtype::kFloat8E4M3 ? CU_TENSOR_MAP_DATA_TYPE_UINT8
           : dtype == Dtype::kFloat16  ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                       : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  }
};

}  // namespace fa3
