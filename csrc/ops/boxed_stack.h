// Reads the arguments of a boxed op off its stack, in the order of the schema, and takes over what
// they own.
//
// Boxed ops: the stack brings the arguments of the schema in flash_attn3/ops/library.py and takes
// the results.
#pragma once

#include <bit>
#include <optional>

#include "attention_arguments.h"
#include "ops/tensor_handle.h"

namespace fa3 {

class BoxedStack {
 public:
  explicit BoxedStack(StableIValue* stack) : next_(stack) {}

  OwnedTensor tensor() { return OwnedTensor(reinterpret_cast<AtenTensorHandle>(*next_++)); }
  int64_t integer() { return std::bit_cast<int64_t>(*next_++); }
  double real() { return std::bit_cast<double>(*next_++); }
  bool flag() { return *next_++ != 0; }

  // Null when there is none.
  OwnedTensor optional_tensor() {
    auto const value = optional();
    return OwnedTensor(value ? reinterpret_cast<AtenTensorHandle>(*value) : nullptr);
  }

  // float? softmax_scale
  std::optional<double> optional_real() {
    auto const value = optional();
    return value ? std::optional(std::bit_cast<double>(*value)) : std::nullopt;
  }

  // int? rotation_seed
  std::optional<int64_t> optional_integer() {
    auto const value = optional();
    return value ? std::optional(std::bit_cast<int64_t>(*value)) : std::nullopt;
  }

  // Into a field of a call. Tensors are described, and kept for as long as the stack is.
  void read(int64_t& field) { field = integer(); }
  void read(double& field) { field = real(); }
  void read(bool& field) { field = flag(); }
  void read(std::optional<double>& field) { field = optional_real(); }
  void read(std::optional<bool>& field) {
    auto const value = optional();
    field = value ? std::optional(*value != 0) : std::nullopt;
  }
  void read(std::optional<TensorMeta>& field) {
    OwnedTensor& kept = kept_[kept_count_++];
    kept = optional_tensor();
    if (kept) {
      field = describe(kept);
    }
  }

  // All arguments of some groups, in their order.
  template <class... Groups>
  void read_groups(Groups&... groups) {
    (groups.visit([this](char const*, auto& field) { read(field); }), ...);
  }

 private:
  // An optional arrives as a pointer, owned, to its value on the heap.
  std::unique_ptr<StableIValue> optional() {
    return std::unique_ptr<StableIValue>(reinterpret_cast<StableIValue*>(*next_++));
  }

  StableIValue* next_;
  OwnedTensor kept_[kTensorArguments];
  int kept_count_ = 0;
};

inline StableIValue boxed(OwnedTensor tensor) {
  return reinterpret_cast<StableIValue>(tensor.release());
}

}  // namespace fa3
