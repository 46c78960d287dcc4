// PyTorch through its stable C interface (aoti_torch_*, torch_*): one library for every torch
// from 2.10 on. Only symbols of that version, only plain C calls: torch::stable::Tensor costs a
// heap allocation a tensor, which shows on small calls.
//
// Handles that arrive on a boxed op's stack are owned by the op, and so are those it creates:
// OwnedTensor frees them, also when an error is thrown.
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <memory>
#include <optional>

#include "core/problem.h"

namespace fa3 {

struct DeleteTensor {
  void operator()(AtenTensorHandle handle) const { aoti_torch_delete_tensor_object(handle); }
};
using OwnedTensor = std::unique_ptr<AtenTensorOpaque, DeleteTensor>;

// Throws when a call into PyTorch failed; `what` says what was tried. PyTorch prints its own
// message to stderr.
void require(AOTITorchError error, char const* what);

// Shape, strides, place and address, without copying or synchronising.
TensorMeta describe(OwnedTensor const& tensor);

// Describes a tensor that may be null; then nothing changes.
inline void describe_if(OwnedTensor const& tensor, std::optional<TensorMeta>& meta) {
  if (tensor) {
    meta = describe(tensor);
  }
}

// A new contiguous CUDA tensor (float16, bfloat16, float8_e4m3fn, float32; int32 for kOther);
// throws with the number of bytes when memory runs out. `op` is named then: what the user called.
OwnedTensor allocate(char const* op, int64_t const* sizes, int rank, Dtype dtype, int device);

// A new contiguous tensor of the sizes, dtype and device of another.
inline OwnedTensor allocate_like(char const* op, TensorMeta const& meta) {
  return allocate(op, meta.size, meta.rank, meta.dtype, meta.device_index);
}

// An empty tensor on a CUDA device. If shared, calls get the same one for each result of an op: a
// new handle costs less than a new tensor.
enum class EmptyResult { kOut, kLse, kMaxLogits, kRotated, kCount };
OwnedTensor empty_result(EmptyResult result, Dtype dtype, int device, bool is_shared);

// A contiguous copy of a CUDA tensor.
OwnedTensor packed_copy(char const* op, OwnedTensor const& source, TensorMeta const& meta);

// The address for writing.
void* mutable_data(OwnedTensor const& tensor);

}  // namespace fa3
