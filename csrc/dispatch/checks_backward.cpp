#include "dispatch/checks_backward.h"

#include <array>

#include "dispatch/given_tensor.h"
#include "dispatch/tensor_rule.h"
#include "dispatch/variants.h"

namespace fa3 {
namespace {

// What the forward gave, and the gradients of it.
std::string check_outputs(BackwardCall const& call) {
  TensorMeta const& q = call.forward.q;
  int64_t const head_dim_v = call.forward.v.size[3];
  Dtype const lse_dtype = wide_dtype(q);
  char const* const lse_name = wide_dtype_name(q);
  TensorRule const rules[] = {
      {"dout", call.dout, 4, {q.size[0], q.size[1], q.size[2], head_dim_v}, q.dtype, q.dtype_name},
      {"out", call.out, 4, {q.size[0], q.size[1], q.size[2], head_dim_v}, q.dtype, q.dtype_name},
      {"lse", call.lse, 3, {q.size[0], q.size[2], q.size[1], 0}, lse_dtype, lse_name},
      {"dlse", call.dlse, 3, {q.size[0], q.size[2], q.size[1], 0}, lse_dtype, lse_name}};
  for (TensorRule const& rule : rules) {
    bool const is_there = &rule.meta != &call.dlse || call.has_dlse;
    std::string const error = is_there ? check_tensor(call.forward.op, rule, q) : "";
    if (!error.empty()) {
      return error;
    }
  }
  return {};
}

// The tensors that the op writes into.
std::string check_gradients(BackwardCall const& call) {
  ForwardCall const& forward = call.forward;
  std::array<NamedTensor, 10> const all = {{{"dq", call.dq},
                                            {"dk", call.dk},
                                            {"dv", call.dv},
                                            {"q", forward.q},
                                            {"k", forward.k},
                                            {"v", forward.v},
                                            {"dout", call.dout},
                                            {"out", call.out},
                                            {"lse", call.lse},
                                            {"dlse", call.dlse}}};
  std::span const inputs = std::span(all).subspan(3);
  for (int i = 0; i < 3; ++i) {
    auto const& [name, gradient] = all[i];
    TensorMeta const& like = inputs[i].meta;
    TensorRule const rule{name,
                          gradient,
                          4,
                          {like.size[0], like.size[1], like.size[2], like.size[3]},
                          forward.q.dtype,
                          forward.q.dtype_name};
    std::string error = check_tensor(forward.op, rule, forward.q);
    if (error.empty()) {
      error = check_given_memory(forward.op, all[i], std::span(all).subspan(i + 1));
    }
    if (!error.empty()) {
      return error;
    }
  }
  return {};
}

}  // namespace

std::string check_gradient_head_dims(ForwardCall const& forward) {
  int const dim = forward.v.rank - 1;
  int64_t const head_dim_v = forward.v.size[dim];
  if (forward.v.device != DeviceType::kCuda || head_dim_v <= kMaxHeadDim) {
    return {};
  }
  return error_text(forward.op ? forward.op : "bwd",
                    text("v.size(", dim, "), the head_dim of the values, to be at most ",
                         kMaxHeadDim, " for gradients"),
                    text(head_dim_v), "give the columns of v to two calls");
}

std::string check_key_tiles(ForwardCall const& forward) {
  // Tiles of 64 keys, as check_forward() counts those of queries.
  constexpr double kMaxTiles = double(1 << 29);
  TensorMeta const& k = forward.k;
  double const tiles = double(k.size[0]) * double(k.size[2]) * double((k.size[1] + 63) / 64);
  if (k.device == DeviceType::kCuda && tiles > kMaxTiles) {
    return error_text(
        forward.op,
        text("batch * heads * ceil(seqlen / 64) of k to be at most ", int64_t(kMaxTiles)),
        text(int64_t(tiles)), "split the batch");
  }
  return {};
}

std::string check_backward(BackwardCall const& call) {
  std::string error = check_forward(call.forward);
  if (error.empty()) {
    error = check_gradient_head_dims(call.forward);
  }
  if (error.empty()) {
    error = check_outputs(call);
  }
  if (error.empty()) {
    error = check_key_tiles(call.forward);
  }
  if (error.empty() && call.has_gradients) {
    error = check_gradients(call);
  }
  return error;
}

}  // namespace fa3
