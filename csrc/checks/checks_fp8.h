// What a call of attention on float8_e4m3fn must look like: the counterpart of checks_general.h,
// with the scales of q, k and v and what the kernels do not have.
#pragma once

#include "checks/checks.h"

namespace fa3 {

// Empty when the call is fine, else the whole error text.
std::string check_fp8(AttentionCall const& call);

// float16 or bfloat16.
Dtype fp8_out_dtype(AttentionCall const& call);

}  // namespace fa3
