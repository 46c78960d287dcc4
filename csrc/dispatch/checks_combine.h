// Checks of the op `combine`.
#pragma once

#include <string>

#include "core/problem.h"

namespace fa3 {

struct CombineCall {
  TensorMeta out_partial;  // (parts, batch, rows, heads, head_dim) float32
  TensorMeta lse_partial;  // (parts, batch, rows, heads) float32
  TensorMeta out;          // (batch, rows, heads, head_dim) float32, float16 or bfloat16
};

// Empty when the kernel serves the call, else the error text.
std::string check_combine(CombineCall const& call);

}  // namespace fa3
