// Reads single values from the stack of a boxed op. The stack holds the arguments, which the op
// owns, and receives the results; attention_ops.h, which is generated, has the order of both.
#pragma once

#include <algorithm>
#include <bit>
#include <iterator>
#include <optional>
#include <string_view>

#include "attention_arguments.h"
#include "ops/tensor_handle.h"

namespace fa3 {

// Throws unless this library was built for the schemas that Python defined
// (flash_attn3_accept_schemas).
void require_schemas();

class BoxedStack {
 public:
  explicit BoxedStack(StableIValue* stack) : next_(stack) { require_schemas(); }

  // A tensor.
  void take(OwnedTensor& tensor) { tensor.reset(reinterpret_cast<AtenTensorHandle>(*next_++)); }
  // Null when there is none.
  void take_optional(OwnedTensor& tensor) {
    auto const value = optional();
    tensor.reset(value ? reinterpret_cast<AtenTensorHandle>(*value) : nullptr);
  }
  // The same, with its description.
  template <class Meta>
  void take(OwnedTensor& tensor, Meta& meta) {
    take(tensor);
    meta = describe(tensor);
  }
  void take_optional(OwnedTensor& tensor, std::optional<TensorMeta>& meta) {
    take_optional(tensor);
    describe_if(tensor, meta);
  }

  void read(int64_t& field) { field = std::bit_cast<int64_t>(*next_++); }
  void read(double& field) { field = std::bit_cast<double>(*next_++); }
  void read(bool& field) { field = *next_++ != 0; }
  void read(std::optional<double>& field) { read_optional(field); }
  void read(std::optional<int64_t>& field) { read_optional(field); }
  void read(std::optional<bool>& field) {
    auto const value = optional();
    field = value ? std::optional(*value != 0) : std::nullopt;
  }
  // The stack keeps the tensor.
  void read(std::optional<TensorMeta>& field) { take_optional(kept_[kept_count_++], field); }

 private:
  template <class Value>
  void read_optional(std::optional<Value>& field) {
    auto const value = optional();
    field = value ? std::optional(std::bit_cast<Value>(*value)) : std::nullopt;
  }

  // An optional arrives as a pointer, owned, to its value on the heap.
  std::unique_ptr<StableIValue> optional() {
    return std::unique_ptr<StableIValue>(reinterpret_cast<StableIValue*>(*next_++));
  }

  StableIValue* next_;
  OwnedTensor kept_[kTensorArguments];
  int kept_count_ = 0;
};

// Whether an op returns the result of this name.
template <class Op>
constexpr bool returns(std::string_view name) {
  return std::find(std::begin(Op::kReturns), std::end(Op::kReturns), name) !=
         std::end(Op::kReturns);
}

inline StableIValue boxed(OwnedTensor tensor) {
  return reinterpret_cast<StableIValue>(tensor.release());
}

}  // namespace fa3
