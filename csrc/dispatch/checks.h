// What a call must look like: the one source of user checks. The CUDA op calls it with the tensors
// themselves; the CPU implementation, can_use() and explain() call it through the torch-free module
// flash_attn3._plan, so that a mistake is named in the same words everywhere. Pure: no torch, no
// CUDA, no allocation unless there is something to say.
#pragma once

#include <string>

#include "core/problem.h"

namespace fa3 {

struct ForwardCall {
  TensorMeta q;    // (batch, seqlen_q, heads_q, head_dim)
  TensorMeta k;    // (batch, seqlen_k, heads_k, head_dim)
  TensorMeta v;    // (batch, seqlen_k, heads_k, head_dim_v)
  TensorMeta out;  // (batch, seqlen_q, heads_q, head_dim_v), with has_out
  bool has_out = false;
  char const* op = nullptr;  // nullptr: fwd, or with has_out fwd_out
  bool has_batch = true;     // false: the caller's tensors have none, and a batch of 1 stands here
  double softmax_scale = 1.0;
  int64_t sm_margin = 0;
  int sm_count = 0;  // of q's device; 0 when unknown
};

// As errors name a dimension of the above.
inline int named_dim(ForwardCall const& call, int dim) { return call.has_batch ? dim : dim - 1; }

// As errors name it.
inline char const* op_of(ForwardCall const& call) {
  return call.op ? call.op : call.has_out ? "fwd_out" : "fwd";
}

// What the first of these that finds something wrong says of a call, or "".
template <class Call, size_t kCount>
std::string first_error(std::string (*const (&checks)[kCount])(Call const&), Call const& call) {
  for (auto const check : checks) {
    std::string error = check(call);
    if (!error.empty()) {
      return error;
    }
  }
  return {};
}

// Empty when the call is fine, else the whole error text. A CUDA call that passes has a kernel in
// kFwdVariants.
std::string check_forward(ForwardCall const& call);

}  // namespace fa3
