// Tensors of which shape, dtype and device follow from the others of a call.
#pragma once

#include <algorithm>
#include <cstring>

#include "call/attention_call.h"
#include "call/given_tensor.h"
#include "call/tensor_text.h"

namespace fa3 {

struct TensorRule {
  char const* name;
  TensorMeta const& meta;
  int rank;
  int64_t size[4];
  Dtype dtype;
  char const* dtype_name;
};

// Empty when the tensor follows its rule on the device of q, else the error text of the op.
inline std::string check_tensor(char const* op, TensorRule const& rule, TensorMeta const& q) {
  TensorMeta const& meta = rule.meta;
  bool const shapes_match =
      meta.rank == rule.rank && std::equal(meta.size, meta.size + meta.rank, rule.size);
  if (!shapes_match) {
    return error_text(op, text(rule.name, " to have the shape ", shape_text(rule.size, rule.rank)),
                      shape_text(meta.size, std::min(meta.rank, 5)));
  }
  if (meta.dtype != rule.dtype) {
    return error_text(op, text(rule.name, ".dtype to be ", rule.dtype_name), meta.dtype_name);
  }
  if (!same_device(meta, q)) {
    return error_text(op, text(rule.name, " on the device of q, ", device_text(q)),
                      device_text(meta));
  }
  return {};
}

// What the LSE and the sinks of a call are: float32, and float64 for float64.
inline Dtype wide_dtype(TensorMeta const& q) {
  return q.dtype == Dtype::kFloat64 ? Dtype::kFloat64 : Dtype::kFloat32;
}
inline char const* wide_dtype_name(TensorMeta const& q) {
  return q.dtype == Dtype::kFloat64 ? "float64" : "float32";
}

// The rule of a tensor that is like the output, and of one that is like the LSE.
inline TensorRule like_out(char const* name, TensorMeta const& meta, AttentionCall const& call) {
  TensorMeta const& q = call.q;
  TensorMeta const& v = call.v;
  if (call.is_packed()) {
    return {name, meta, 3, {q.size[0], q.size[1], v.size[2], 0}, q.dtype, q.dtype_name};
  }
  return {name, meta, 4, {q.size[0], q.size[1], q.size[2], v.size[3]}, q.dtype, q.dtype_name};
}

inline TensorRule like_lse(char const* name, TensorMeta const& meta, AttentionCall const& call) {
  TensorMeta const& q = call.q;
  char const* const dtype_name = wide_dtype_name(q);
  if (call.is_packed()) {
    return {name, meta, 2, {q.size[1], q.size[0], 0, 0}, wide_dtype(q), dtype_name};
  }
  return {name, meta, 3, {q.size[0], q.size[2], q.size[1], 0}, wide_dtype(q), dtype_name};
}

// A list with a number for each sequence: int32, contiguous, on the device of like. Its size is for
// the caller to check.
inline std::string check_list(char const* op, NamedTensor const& list, TensorMeta const& like,
                              char const* shape) {
  auto [name, meta] = list;
  if (meta.rank != 1) {
    return error_text(op, text(name, " to have 1 dimension ", shape), text(meta.rank));
  }
  if (std::strcmp(meta.dtype_name, "int32") != 0) {
    return error_text(op, text(name, ".dtype to be int32"), meta.dtype_name,
                      text("call ", name, ".int()"));
  }
  if (!same_device(meta, like)) {
    return error_text(op, text(name, " on the device of q, ", device_text(like)),
                      device_text(meta));
  }
  if (meta.size[0] > 1 && meta.stride[0] != 1) {
    return error_text(op, text(name, " to be contiguous"), text("a stride of ", meta.stride[0]),
                      text("call ", name, ".contiguous()"));
  }
  return {};
}

// A packed tensor as one with a batch of one.
inline TensorMeta with_batch_of_one(TensorMeta meta) {
  std::copy_backward(meta.size, meta.size + 3, meta.size + 4);
  std::copy_backward(meta.stride, meta.stride + 3, meta.stride + 4);
  meta.size[0] = 1;
  meta.stride[0] = 0;
  meta.rank = 4;
  return meta;
}

}  // namespace fa3
