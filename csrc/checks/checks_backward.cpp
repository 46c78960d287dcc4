#include "checks/checks_backward.h"

#include <array>

#include "checks/checks_general.h"
#include "checks/tensor_rule.h"
#include "plan/variants.h"

namespace fa3 {
namespace {

// What the forward gave, and the gradients of it.
std::string check_outputs(AttentionCall const& call) {
  TensorRule const rules[] = {like_out("dout", *call.dout, call), like_out("out", *call.out, call),
                              like_lse("lse", *call.lse, call),
                              like_lse("dlse", call.dlse ? *call.dlse : *call.lse, call)};
  for (TensorRule const& rule : rules) {
    std::string const error = check_tensor(call.op(), rule, call.q);
    if (!error.empty()) {
      return error;
    }
  }
  return {};
}

// The tensors that the op writes into.
std::string check_gradients(AttentionCall const& call) {
  if (!call.dq) {
    return {};
  }
  std::array<NamedTensor, 10> const all = {{{"dq", *call.dq},
                                            {"dk", *call.dk},
                                            {"dv", *call.dv},
                                            {"q", call.q},
                                            {"k", call.k},
                                            {"v", call.v},
                                            {"dout", *call.dout},
                                            {"out", *call.out},
                                            {"lse", *call.lse},
                                            {"dlse", call.dlse ? *call.dlse : *call.lse}}};
  std::span const inputs = std::span(all).subspan(3);
  for (int i = 0; i < 3; ++i) {
    auto const& [name, gradient] = all[i];
    TensorMeta const& like = inputs[i].meta;
    TensorRule const rule{name,         gradient,
                          like.rank,    {like.size[0], like.size[1], like.size[2], like.size[3]},
                          call.q.dtype, call.q.dtype_name};
    std::string error = check_tensor(call.op(), rule, call.q);
    if (error.empty()) {
      error = check_given_memory(call.op(), all[i], std::span(all).subspan(i + 1));
    }
    if (!error.empty()) {
      return error;
    }
  }
  return {};
}

// The backward has no second launch for more columns of v.
std::string check_head_dim_v(AttentionCall const& call) {
  int const dim = call.v.rank - 1;
  int64_t const head_dim_v = call.v.size[dim];
  if (call.v.device != DeviceType::kCuda || head_dim_v <= kMaxHeadDim) {
    return {};
  }
  return error_text(call.op(),
                    text("v.size(", dim, "), the head_dim of the values, to be at most ",
                         kMaxHeadDim, " for gradients"),
                    text(head_dim_v), "give the columns of v to two calls");
}

// Their number has to fit into an int: tiles of 64 keys, as the forward counts those of queries.
std::string check_key_tiles(AttentionCall const& call) {
  constexpr double kMaxTiles = double(1 << 29);
  TensorMeta const& k = call.k;
  if (call.is_packed()) {
    return check_packed_tiles(call, {"k", k});
  }
  double const tiles = double(k.size[0]) * double(k.size[2]) * double((k.size[1] + 63) / 64);
  if (k.device == DeviceType::kCuda && tiles > kMaxTiles) {
    return error_text(
        call.op(),
        text("batch * heads * ceil(seqlen / 64) of k to be at most ", int64_t(kMaxTiles)),
        text(int64_t(tiles)), "split the batch");
  }
  return {};
}

using Check = std::string (*)(AttentionCall const&);

// In this order: each one may rely on those before it.
constexpr Check kInputChecks[] = {check_forward, check_head_dim_v, check_key_tiles};
constexpr Check kChecks[] = {check_gradient_inputs, check_outputs, check_gradients};

}  // namespace

std::string check_gradient_inputs(AttentionCall const& call) {
  return first_error(kInputChecks, call);
}

std::string check_backward(AttentionCall const& call) { return first_error(kChecks, call); }

}  // namespace fa3
