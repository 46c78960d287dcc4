// A call of quantize_fp8.
#pragma once

#include <optional>

#include "core/problem.h"

namespace fa3 {

struct QuantizeCall {
  TensorMeta x;
  std::optional<TensorMeta> cu_seqlens;  // set if x holds packed sequences
  std::optional<TensorMeta> seqused;
  int64_t block = 0;
  int64_t group = 1;
  std::optional<int64_t> seed;  // none: no rotation
};

}  // namespace fa3
