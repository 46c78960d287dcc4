// What a call of attention on float8_e4m3fn must look like: the counterpart of checks_general.h,
// with the scales of q, k and v and what the kernels do not have.
#pragma once

#include "dispatch/checks_general.h"

namespace fa3 {

struct Fp8Call {
  GeneralCall general;   // q, k and v of e4m3; out of out_dtype
  TensorMeta scales[3];  // of q, k and v, with has_scale: (batch, heads_k), or by blocks
  bool has_scale[3] = {};
  Dtype out_dtype = Dtype::kBFloat16;
  char const* out_dtype_name = "bfloat16";
  bool wants_max_logits = false;
};

// Empty when the call is fine, else the whole error text.
std::string check_fp8(Fp8Call const& call);

}  // namespace fa3
