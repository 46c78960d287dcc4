// What the CUDA ops do around a launch: the device, tensors as kernels read them, the schema that
// they were compiled for.
#pragma once

#include <stdexcept>

#include "call/text.h"
#include "call/tma_rules.h"
#include "ops/tensor_handle.h"

namespace fa3 {

// Makes a device the current one, and goes back.
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

// A packed tensor (rows, heads, columns) as a batch of one; others as they are.
inline TensorMeta with_batch(TensorMeta meta) {
  if (meta.rank == 3) {
    for (int i = 3; i > 0; --i) {
      meta.size[i] = meta.size[i - 1];
      meta.stride[i] = meta.stride[i - 1];
    }
    meta.size[0] = 1;
    meta.rank = 4;
  }
  return meta;
}

inline TensorView view(TensorMeta const& meta) {
  return TensorView{reinterpret_cast<void*>(meta.address), meta.stride[0], meta.stride[1],
                    meta.stride[2]};
}

// The tensor as the kernel reads it. A tensor that TMA cannot address is replaced by a copy, which
// the caller keeps until the launch; the caching allocator then hands its memory to later work of
// the same stream only.
inline TensorView readable(char const* op, OwnedTensor& tensor, TensorMeta const& meta) {
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
      temporary_ = allocate(op, meta.size, meta.rank, meta.dtype, meta.device_index);
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

// Throws when the schema is not that of this library.
struct SchemaCounts {
  uint64_t arguments;
  uint64_t results;
};

inline void expect_schema(char const* op, SchemaCounts got, SchemaCounts wanted) {
  if (got.arguments != wanted.arguments || got.results != wanted.results) {
    throw std::runtime_error(error_text(
        op, text("a schema with ", wanted.arguments, " arguments and ", wanted.results, " results"),
        text(got.arguments, " and ", got.results),
        "_C.abi3.so and the Python files are of different versions: reinstall"));
  }
}

}  // namespace fa3
