// Reads the arguments of a boxed op off its stack, in the order of the schema, and takes over what
// they own.
#pragma once

#include <bit>
#include <optional>

#include "core/problem.h"
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

  // bool? pack_gqa
  PackGqa pack_gqa() {
    auto const value = optional();
    return !value ? PackGqa::kHeuristic : *value != 0 ? PackGqa::kAlways : PackGqa::kNever;
  }

 private:
  // An optional arrives as a pointer, owned, to its value on the heap.
  std::unique_ptr<StableIValue> optional() {
    return std::unique_ptr<StableIValue>(reinterpret_cast<StableIValue*>(*next_++));
  }

  StableIValue* next_;
};

inline StableIValue boxed(OwnedTensor tensor) {
  return reinterpret_cast<StableIValue>(tensor.release());
}

}  // namespace fa3
