// Helpers of the CUDA ops around a launch: the current device, and tensors as kernels read them.
#pragma once

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>

#include <stdexcept>

#include "call/attention_call.h"
#include "call/given_tensor.h"
#include "call/text.h"
#include "call/tma_rules.h"
#include "ops/tensor_handle.h"

namespace fa3 {

// Makes a device the current one, and restores the previous one.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    int32_t current = -1;
    require(aoti_torch_get_current_device_index(&current), "read the current device");
    if (current != device) {
      require(aoti_torch_create_device_guard(device, &guard_), "change the current device");
    }
  }
  ~DeviceGuard() {
    if (guard_) {
      aoti_torch_delete_device_guard(guard_);
    }
  }
  DeviceGuard(DeviceGuard const&) = delete;
  DeviceGuard& operator=(DeviceGuard const&) = delete;

 private:
  DeviceGuardHandle guard_ = nullptr;
};

inline void* current_stream(int device) {
  void* stream = nullptr;
  require(aoti_torch_get_current_cuda_stream(device, &stream), "read the current stream");
  return stream;
}

// Does nothing for a null tensor.
inline void fill(OwnedTensor const& tensor, double value) {
  if (tensor) {
    require(aoti_torch_aten_fill__Scalar(tensor.get(), value), "fill a tensor");
  }
}

inline bool is_contiguous(TensorMeta const& meta) {
  int64_t stride = 1;
  for (int i = meta.rank - 1; i >= 0; --i) {
    if (meta.size[i] > 1 && meta.stride[i] != stride) {
      return false;
    }
    stride *= meta.size[i];
  }
  return true;
}

// Where kernels write the largest logits: `given` on a cache, else `result`; null: not wanted.
inline float* largest_rows(AttentionCall const& call, OwnedTensor const& given,
                           OwnedTensor const& result) {
  if (given && !is_contiguous(describe(given))) {
    throw std::runtime_error(
        error_text(call.op(), "max_logits_out to be contiguous", "other strides"));
  }
  bool const is_wanted = given || call.execution.return_max_logits;
  return is_wanted ? static_cast<float*>(mutable_data(given ? given : result)) : nullptr;
}

// A float32 for each row and head of a tensor (batch, rows, heads, columns) or (rows, heads,
// columns), as an LSE has: (batch, heads, rows) or (heads, rows).
inline OwnedTensor allocate_rows(char const* op, TensorMeta const& like) {
  int64_t const packed[] = {like.size[1], like.size[0]};
  int64_t const dense[] = {like.size[0], like.size[2], like.size[1]};
  return allocate(op, like.rank == 3 ? packed : dense, like.rank - 1, Dtype::kFloat32,
                  like.device_index);
}

inline TensorView view(TensorMeta const& meta) {
  return TensorView{reinterpret_cast<void*>(meta.address), meta.stride[0], meta.stride[1],
                    meta.stride[2]};
}

// The tensor as the kernel reads it. A copy replaces a tensor that TMA cannot address. The caller
// keeps it until the launch; then the caching allocator reuses its memory only for later work on
// the same stream.
inline TensorView readable(char const* op, OwnedTensor& tensor, TensorMeta const& meta) {
  if (meta.rank == 3) {
    return readable(op, tensor, with_batch(meta));
  }
  if (tma_can_address(meta)) {
    return view(meta);
  }
  tensor = packed_copy(op, tensor, meta);
  return view(describe(tensor));
}

// A tensor as the kernel writes it. One that TMA cannot address is written through a temporary.
class Target {
 public:
  Target(char const* op, OwnedTensor const& tensor) : tensor_(tensor) {
    TensorMeta meta = describe(tensor);
    if (!tma_can_address(with_batch(meta))) {
      temporary_ = allocate_like(op, meta);
      meta = describe(temporary_);
    }
    view_ = fa3::view(with_batch(meta));
    view_.data = mutable_data(temporary_ ? temporary_ : tensor);
  }

  TensorView const& view() const { return view_; }

  // After the launch.
  void finish() const {
    if (temporary_) {
      require(aoti_torch_copy_(tensor_.get(), temporary_.get(), /*non_blocking=*/0),
              "copy a result to where it belongs");
    }
  }

 private:
  OwnedTensor const& tensor_;
  OwnedTensor temporary_;
  TensorView view_;
};

inline void throw_if(std::string const& error) {
  if (!error.empty()) {
    throw std::runtime_error(error);
  }
}

template <class T>
T const* data_of(std::optional<TensorMeta> const& tensor) {
  return tensor ? reinterpret_cast<T const*>(tensor->address) : nullptr;
}

inline PackedLengths lengths_of(AttentionCall const& call) {
  LengthArguments const& lengths = call.lengths;
  return PackedLengths{data_of<int>(lengths.cu_seqlens_q), data_of<int>(lengths.cu_seqlens_k),
                       data_of<int>(lengths.seqused_q), data_of<int>(lengths.seqused_k)};
}

// What FwdParams and BwdParams hold of scores and lengths.
template <class Params>
void set_score(Params& params, AttentionCall const& call) {
  params.sinks = data_of<float>(call.score.sinks);
  params.lengths = lengths_of(call);
  params.softmax_scale = float(call.softmax_scale());
  params.softcap = float(call.score.softcap);
}

// Dimensions of size 1 are shared.
inline MaskLists view_mask(MaskArguments const& given, std::optional<TensorMeta> const& lists) {
  MaskLists mask;
  if (lists) {
    auto const stride = [&](int dim) { return lists->size[dim] > 1 ? lists->stride[dim] : 0; };
    mask.lists = data_of<int>(lists);
    mask.batch_stride = stride(0);
    mask.head_stride = stride(1);
    mask.tile_stride = int(stride(2));
  }
  if (auto const& rows = given.mask_rows) {
    mask.rows = data_of<int>(rows);
    mask.rows_batch_stride = rows->rank == 3 && rows->size[0] > 1 ? rows->stride[0] : 0;
  }
  return mask;
}

// Scales of heads, (batch, heads_k) or (pages, heads_k), or of keys, (pages, keys, blocks).
inline ScaleView scale_view(std::optional<TensorMeta> const& scale) {
  ScaleView view;
  if (scale && !is_empty(*scale)) {
    view.data = reinterpret_cast<float const*>(scale->address);
    view.batch_stride = scale->stride[0];
    view.head_stride = scale->stride[1];
    view.block_stride = scale->rank == 3 && scale->size[2] > 1 ? scale->stride[2] : 0;
    view.by_kv_head = true;
  }
  return view;
}

}  // namespace fa3
