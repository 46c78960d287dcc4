// Reads the arguments of a boxed op off its stack, in the order of the schema, and takes over what
// they own.
#pragma once

#include <bit>

#include "core/problem.h"
#include "ops/tensor_handle.h"

namespace fa3 {

class BoxedStack {
 public:
  explicit BoxedStack(StableIValue* stack) : next_(stack) {}

  OwnedTensor tensor() { return OwnedTensor(reinterpret_cast<AtenTensorHandle>(*next_++)); }
  double real() { return std::bit_cast<double>(*next_++); }
  int64_t integer() { return std::bit_cast<int64_t>(*next_++); }
  bool flag() { return *next_++ != 0; }

  // bool? pack_gqa. An optional arrives as a pointer, owned, to its value on the heap.
  PackGqa pack_gqa() {
    std::unique_ptr<StableIValue> const value(reinterpret_cast<StableIValue*>(*next_++));
    return !value ? PackGqa::kHeuristic : *value != 0 ? PackGqa::kAlways : PackGqa::kNever;
  }

 private:
  StableIValue* next_;
};

inline StableIValue boxed(OwnedTensor tensor) {
  return reinterpret_cast<StableIValue>(tensor.release());
}

}  // namespace fa3
