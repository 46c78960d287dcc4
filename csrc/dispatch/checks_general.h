// What a call of the general ops must look like: with a window, chunks, softcap, sinks, or
// sequences of several lengths in one tensor. The counterpart of dispatch/checks.h, in the same
// words.
#pragma once

#include "dispatch/checks.h"

namespace fa3 {

struct GeneralCall {
  ForwardCall forward;      // if is_packed, its tensors have no batch: (total, heads, head_dim)
  TensorMeta cu_seqlens_q;  // (batch + 1,) int32, if is_packed
  TensorMeta cu_seqlens_k;  // as cu_seqlens_q
  TensorMeta seqused_q;     // (batch,) int32, with has_seqused_q
  TensorMeta seqused_k;     // as seqused_q, with has_seqused_k
  TensorMeta sinks;         // (heads_q,) float32; float64 for float64 (CPU); with has_sinks
  bool is_packed = false;   // one of cu_seqlens was given; one that was not stays as it is here
  bool has_seqused_q = false;
  bool has_seqused_k = false;
  bool has_sinks = false;
  bool causal = false;
  int64_t window_left = -1;
  int64_t window_right = -1;
  int64_t attention_chunk = 0;
  double softcap = 0.0;
};

// Empty when the call is fine, else the whole error text. Speaks of the arguments by their names in
// the public functions: s_aux are the sinks. What cu_seqlens and seqused contain is not read.
std::string check_general(GeneralCall const& call);

struct GeneralBackwardCall {
  GeneralCall general;
  TensorMeta dout;  // (batch, seqlen_q, heads_q, head_dim_v); packed (total_q, heads_q, head_dim_v)
  TensorMeta out;   // as dout
  TensorMeta lse;   // (batch, heads_q, seqlen_q); packed (heads_q, total_q); dtype as of sinks
  TensorMeta dlse;  // as lse, with has_dlse
  bool has_dlse = false;
};

// The same of the gradients.
std::string check_general_backward(GeneralBackwardCall const& call);

}  // namespace fa3
