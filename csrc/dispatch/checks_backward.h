// What a call of the backward must look like; the counterpart of dispatch/checks.h.
#pragma once

#include "dispatch/checks.h"

namespace fa3 {

struct BackwardCall {
  ForwardCall forward;  // q, k, v, softmax_scale; its op is set
  TensorMeta dout;      // (batch, seqlen_q, heads_q, head_dim)
  TensorMeta out;       // as dout
  TensorMeta lse;       // (batch, heads_q, seqlen_q), float32; float64 for float64 (CPU)
  TensorMeta dlse;      // as lse, with has_dlse
  TensorMeta dq;        // as q, with has_gradients: the op writes into it; else it allocates
  TensorMeta dk;        // as k, with has_gradients
  TensorMeta dv;        // as v, with has_gradients
  bool has_dlse = false;
  bool has_gradients = false;
};

// As errors name it.
inline char const* backward_op(bool has_gradients) { return has_gradients ? "bwd_out" : "bwd"; }

// The backward has no second launch for more columns of v. Tensors have a batch or none.
std::string check_gradient_head_dims(ForwardCall const& forward);

// Their number has to fit into an int. Tensors have a batch.
std::string check_key_tiles(ForwardCall const& forward);

// Empty when the call is fine, else the whole error text. A CUDA call that passes has a kernel in
// kBwdVariants.
std::string check_backward(BackwardCall const& call);

}  // namespace fa3
