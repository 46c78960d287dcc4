// Checks of quantize_fp8 on CUDA. The texts are those of flash_attn3/ops/fp8.py, which checks on
// the CPU; the numbers in cu_seqlens and seqused are not looked at: they are on the GPU.
#pragma once

#include <optional>
#include <string>

#include "core/problem.h"

namespace fa3 {

struct QuantizeCall {
  TensorMeta x;
  bool is_packed = false;  // cu_seqlens is given
  bool has_seqused = false;
  TensorMeta cu_seqlens;
  TensorMeta seqused;
  int64_t block = 0;
  int64_t group = 1;
  std::optional<int64_t> seed;  // none: no rotation
};

// Empty when the kernels serve the call, else the error text.
std::string check_quantize(QuantizeCall const& call);

}  // namespace fa3
