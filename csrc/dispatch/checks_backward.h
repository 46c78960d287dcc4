// What a call of the backward must look like; the counterpart of dispatch/checks.h.
#pragma once

#include "dispatch/checks.h"

namespace fa3 {

struct BackwardCall {
  ForwardCall forward;  // q, k, v, softmax_scale
  TensorMeta dout;      // (batch, seqlen_q, heads_q, head_dim)
  TensorMeta out;       // as dout
  TensorMeta lse;       // (batch, heads_q, seqlen_q), float32; float64 for float64 (CPU)
  TensorMeta dlse;      // as lse, with has_dlse
  bool has_dlse = false;
};

// Empty when the call is fine, else the whole error text. A CUDA call that passes has a kernel in
// kBwdVariants.
std::string check_backward(BackwardCall const& call);

}  // namespace fa3
