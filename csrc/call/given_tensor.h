// Rules for the memory of a tensor, which inputs and the tensors that an op writes into share.
#pragma once

#include <algorithm>
#include <span>

#include "call/tensor_text.h"

namespace fa3 {

struct NamedTensor {
  char const* name;
  TensorMeta const& meta;
};

// Checks a rank 4 tensor.
inline std::string check_last_stride(char const* op, NamedTensor const& tensor) {
  auto const& [name, meta] = tensor;
  if (meta.size[3] <= 1 || meta.stride[3] == 1) {
    return {};
  }
  return error_text(op, text(name, ".stride(3) to be 1, the head_dim contiguous"),
                    text(meta.stride[3]), text("call ", name, ".contiguous()"));
}

inline bool is_empty(TensorMeta const& meta) {
  return std::find(meta.size, meta.size + meta.rank, 0) != meta.size + meta.rank;
}

// The address after a tensor's last element. Elements of dtypes that no kernel knows count 8 bytes.
inline int64_t end_address(TensorMeta const& meta) {
  int64_t last = 0;
  for (int i = 0; i < meta.rank; ++i) {
    last += (meta.size[i] - 1) * meta.stride[i];
  }
  int const bytes = meta.dtype == Dtype::kFloat8E4M3                                  ? 1
                    : meta.dtype == Dtype::kFloat16 || meta.dtype == Dtype::kBFloat16 ? 2
                    : meta.dtype == Dtype::kFloat32                                   ? 4
                                                                                      : 8;
  return meta.address + (last + 1) * bytes;
}

// Whether two tensors may share bytes. Those without an address (fakes, plans) share none.
inline bool may_share_memory(TensorMeta const& a, TensorMeta const& b) {
  return a.address != 0 && b.address != 0 && !is_empty(a) && !is_empty(b) &&
         a.address < end_address(b) && b.address < end_address(a);
}

// Checks a rank 4 output tensor: no two of its elements share an address, and it does
// not start where one of the others does. Kernels need its last stride to be 1.
inline std::string check_given_memory(char const* op, NamedTensor const& given,
                                      std::span<NamedTensor const> others) {
  auto const& [name, meta] = given;
  std::string const error =
      meta.device == DeviceType::kCuda ? check_last_stride(op, given) : std::string();
  if (!error.empty() || is_empty(meta)) {
    return error;
  }
  for (int i = 0; i < 4; ++i) {
    if (meta.size[i] > 1 && meta.stride[i] == 0) {
      return error_text(op, text(name, " with memory for every element"),
                        text(name, ".stride(", i, ") of 0"), "do not pass an expanded tensor");
    }
  }
  for (auto const& [other_name, other] : others) {
    if (meta.address != 0 && meta.address == other.address && !is_empty(other)) {
      return error_text(op, text(name, " with memory of its own"),
                        text("the memory of ", other_name));
    }
  }
  return {};
}

}  // namespace fa3
