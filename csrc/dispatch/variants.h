// The list of forward variants (generated from csrc/instances/variants.py) and the way to find one.
#pragma once

#include <iterator>

#include "fwd_variants.h"

namespace fa3 {

inline constexpr int kFwdVariantCount = int(std::size(kFwdVariants));

constexpr bool variant_serves(FwdVariantFacts const& facts, Dtype dtype, bool causal, int head_dim,
                              int head_dim_v) {
  MaskKind const mask = causal ? MaskKind::kCausal : MaskKind::kFull;
  return facts.head_dim == head_dim && facts.head_dim_v == head_dim_v && facts.dtype == dtype &&
         facts.mask == mask;
}

// Index in kFwdVariants of the first variant from `begin` on that serves the problem, -1 when there
// is none.
constexpr int find_variant(Dtype dtype, bool causal, int head_dim, int head_dim_v, int begin = 0) {
  for (int i = begin; i < kFwdVariantCount; ++i) {
    if (variant_serves(kFwdVariants[i], dtype, causal, head_dim, head_dim_v)) {
      return i;
    }
  }
  return -1;
}

}  // namespace fa3
