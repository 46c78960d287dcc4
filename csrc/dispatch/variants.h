// The list of forward variants (generated from csrc/instances/variants.py) and the way to find one.
#pragma once

#include <array>
#include <iterator>

#include "fwd_variants.h"

namespace fa3 {

inline constexpr int kFwdVariantCount = int(std::size(kFwdVariants));

// The variants among which the planner chooses for a problem, in the order of the list.
struct FwdCandidates {
  static constexpr int kMost = 4;

  int count = 0;
  int variant[kMost] = {};

  constexpr void add(int index) {
    if (count == kMost) {
      throw "csrc/instances/variants.py: more variants serve one problem than kMost";
    }
    variant[count++] = index;
  }
};

constexpr int kMaxHeadDim = 256;

// Kernels exist for some head dims; a problem with another runs on the next larger one: the copy
// engine fills the missing columns with zeros, which change neither scores nor outputs.
constexpr FwdCandidates search_candidates(Dtype dtype, MaskKind mask, int head_dim) {
  FwdCandidates found;
  for (int rounded = head_dim; found.count == 0 && rounded <= kMaxHeadDim; ++rounded) {
    for (int i = 0; i < kFwdVariantCount; ++i) {
      FwdVariantFacts const& facts = kFwdVariants[i];
      if (facts.head_dim == rounded && facts.dtype == dtype && facts.mask == mask) {
        found.add(i);
      }
    }
  }
  return found;
}

// search_candidates() for every 16-bit dtype, mask and multiple of 8, since a launch asks.
inline constexpr auto kFwdCandidates = [] {
  std::array<std::array<std::array<FwdCandidates, kMaxHeadDim / 8 + 1>, 2>, 2> table{};
  for (Dtype dtype : {Dtype::kFloat16, Dtype::kBFloat16}) {
    for (MaskKind mask : {MaskKind::kFull, MaskKind::kCausal}) {
      for (int eighths = 1; eighths <= kMaxHeadDim / 8; ++eighths) {
        table[int(dtype)][int(mask)][eighths] = search_candidates(dtype, mask, 8 * eighths);
      }
    }
  }
  return table;
}();

// INVARIANT: dtype is a 16-bit one, head_dim a multiple of 8 and at most kMaxHeadDim.
constexpr FwdCandidates const& fwd_candidates(Dtype dtype, bool causal, int head_dim) {
  return kFwdCandidates[int(dtype)][causal][head_dim / 8];
}

}  // namespace fa3
