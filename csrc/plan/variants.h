// The list of forward variants (generated from csrc/plan/variants.py) and the way to find one.
#pragma once

#include <array>
#include <iterator>

#include "core/int_math.h"
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
      throw "csrc/plan/variants.py: more variants serve one problem than kMost";
    }
    variant[count++] = index;
  }
};

constexpr int kMaxHeadDim = 256;

// Up to this head dim of q and k, v may have more than kMaxHeadDim columns: a launch for each half.
constexpr int kLongValuesHeadDim = 64;
constexpr int kMaxLongValues = 512;

// Columns of v that one launch takes.
constexpr int value_columns(int head_dim_v) {
  return head_dim_v <= kMaxHeadDim ? head_dim_v : round_up(ceil_div(head_dim_v, 2), 8);
}

// How many launches that makes; 1 < head_dim_v.
constexpr int value_launches(int head_dim_v) {
  return ceil_div(head_dim_v, value_columns(head_dim_v));
}

// The columns of a launch of a problem: that of a latent cache takes all.
constexpr int launch_columns(FwdProblem const& problem) {
  return problem.kind.is_latent ? problem.head_dim_v : value_columns(problem.head_dim_v);
}

// Whether a kernel serves a problem of a kind: its own, and general kernels full and causal
// problems too.
constexpr bool serves(KernelKind kernel, KernelKind problem) {
  return kernel == problem || (kernel == kGeneralKernel && problem.is_dense());
}

// Decode kernels serve any score on a cache.
constexpr bool serves(FwdConfig const& config, KernelKind problem) {
  return serves(config.kind, problem) || (config.is_swapped && problem == kCacheSoftcapKernel);
}

// Kernels exist for some head dims; a problem with others runs on those that are no smaller and
// compute least: TMA fills the missing columns with zeros, which change neither scores
// nor outputs. General kernels serve full and causal problems where they compute less.
//
// promote: with FP8; converts: on a cache of e4m3 under 16-bit queries; decodes: among the decode
// kernels, of which those for e4m3 keys compute in fp16 for either dtype of queries.
constexpr FwdCandidates search_candidates(Dtype dtype, KernelKind kind, HeadDims dims,
                                          bool promote = false, bool converts = false,
                                          bool decodes = false, bool folds = false) {
  dtype = decodes && converts ? Dtype::kFloat16 : dtype;
  FwdCandidates found;
  int fewest = 1 << 30;
  for (int i = 0; i < kFwdVariantCount; ++i) {
    FwdConfig const& config = kFwdVariants[i];
    bool const is_large_enough = config.head_dim >= dims.qk && config.head_dim_v >= dims.v;
    bool const fits = config.is_swapped == decodes && config.dtype_q == dtype &&
                      config.is_promoted() == promote && config.converts() == converts &&
                      config.folds() == folds && is_large_enough && serves(config, kind);
    int const cost = 2 * (config.head_dim + config.head_dim_v) + !(config.kind == kind);
    if (fits && cost <= fewest) {
      found = cost < fewest ? FwdCandidates{} : found;
      fewest = cost;
      found.add(i);
    }
  }
  return found;
}

// Dtypes that kernels take: the first ones of Dtype.
constexpr int kKernelDtypes = 3;

// search_candidates() for every dtype, kind and multiple of 8 as head dim of q, k and v: every
// launch asks.
inline constexpr auto kFwdCandidates = [] {
  constexpr int kHeadDims = kMaxHeadDim / 8 + 1;
  std::array<std::array<std::array<FwdCandidates, kHeadDims>, kBuiltKindCount>, kKernelDtypes>
      table{};
  for (Dtype dtype : {Dtype::kFloat16, Dtype::kBFloat16, Dtype::kFloat8E4M3}) {
    for (int kind = 0; kind < kBuiltKindCount; ++kind) {
      for (int eighths = 1; eighths < kHeadDims; ++eighths) {
        table[int(dtype)][kind][eighths] =
            search_candidates(dtype, kBuiltKinds[kind].kind, {8 * eighths, 8 * eighths});
      }
    }
  }
  return table;
}();

// INVARIANT: dtype is one of a kernel, head dims are multiples of 8 and at most kMaxHeadDim.
constexpr FwdCandidates fwd_candidates(FwdProblem const& problem) {
  bool const is_listed = problem.head_dim == problem.head_dim_v && !problem.promote &&
                         !problem.converts && !problem.folds();
  HeadDims const dims{problem.head_dim, launch_columns(problem)};
  return is_listed
             ? kFwdCandidates[int(problem.dtype)][kind_index(problem.kind)][problem.head_dim / 8]
             : search_candidates(problem.dtype, problem.kind, dims, problem.promote,
                                 problem.converts, /*decodes=*/false, problem.folds());
}

}  // namespace fa3
