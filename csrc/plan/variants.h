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

// The largest head dim of q, k and v: in 16 bits, and with FP8 or gradients.
constexpr int kMaxHeadDim = 512;
constexpr int kMaxNarrowHeadDim = 256;

// Up to this head dim of q and k, v of more than kMaxNarrowHeadDim columns takes a launch for each
// half.
constexpr int kLongValuesHeadDim = 64;

// Columns of v that one launch takes.
constexpr int value_columns(int head_dim, int head_dim_v) {
  return head_dim > kLongValuesHeadDim || head_dim_v <= kMaxNarrowHeadDim
             ? head_dim_v
             : round_up(ceil_div(head_dim_v, 2), 8);
}

// How many launches that makes; 1 < head_dim_v.
constexpr int value_launches(int head_dim, int head_dim_v) {
  return ceil_div(head_dim_v, value_columns(head_dim, head_dim_v));
}

// The columns of a launch of a problem: that of a latent cache takes all.
constexpr int launch_columns(FwdProblem const& problem) {
  return problem.kind.is_latent ? problem.head_dim_v
                                : value_columns(problem.head_dim, problem.head_dim_v);
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
// promote: with FP8. converts: an e4m3 cache under 16-bit queries. decodes: search the decode
// kernels. Those for e4m3 K and V compute in fp16, also for bf16 queries; those for e4m3 latents
// compute in the dtype of the queries.
constexpr FwdCandidates search_candidates(Dtype dtype, KernelKind kind, HeadDims dims,
                                          bool promote = false, bool converts = false,
                                          bool decodes = false, bool folds = false) {
  dtype = decodes && converts && !kind.is_latent ? Dtype::kFloat16 : dtype;
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

// Head dims of q, k and v that kFwdCandidates tells apart: multiples of 8, and one for all above
// kMaxNarrowHeadDim, which run on the same kernels.
constexpr int kTabledHeadDims = kMaxNarrowHeadDim / 8 + 1;
constexpr int head_dim_index(int head_dim) { return min_of(head_dim / 8, kTabledHeadDims); }

using CandidateTable = std::array<std::array<FwdCandidates, kTabledHeadDims + 1>, kBuiltKindCount>;

// search_candidates() for every kind and tabled head dim: every launch asks. WHY a constant of its
// own for each dtype: one for all exceeds the operations that g++ allows a constant.
template <Dtype kDtype>
inline constexpr CandidateTable kCandidatesOf = [] {
  CandidateTable table{};
  for (int kind = 0; kind < kBuiltKindCount; ++kind) {
    for (int i = 1; i <= kTabledHeadDims; ++i) {
      table[kind][i] = search_candidates(kDtype, kBuiltKinds[kind].kind, {8 * i, 8 * i});
    }
  }
  return table;
}();

inline constexpr CandidateTable const* kFwdCandidates[kKernelDtypes] = {
    &kCandidatesOf<Dtype::kFloat16>, &kCandidatesOf<Dtype::kBFloat16>,
    &kCandidatesOf<Dtype::kFloat8E4M3>};

// INVARIANT: dtype is one of a kernel, head dims are multiples of 8 and at most kMaxHeadDim.
constexpr FwdCandidates fwd_candidates(FwdProblem const& problem) {
  bool const is_listed = problem.head_dim == problem.head_dim_v && !problem.promote &&
                         !problem.converts && !problem.folds();
  HeadDims const dims{problem.head_dim, launch_columns(problem)};
  return is_listed ? (*kFwdCandidates[int(problem.dtype)])[kind_index(problem.kind)]
                                                          [head_dim_index(problem.head_dim)]
                   : search_candidates(problem.dtype, problem.kind, dims, problem.promote,
                                       problem.converts, /*decodes=*/false, problem.folds());
}

}  // namespace fa3
