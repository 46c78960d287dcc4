// How a backward pass is run: which variant, and how its work is split. Pure and cheap, like
// plan_forward().
#pragma once

#include "config/bwd_config.h"
#include "core/problem.h"

namespace fa3 {

struct BwdPlan {
  int variant = -1;  // index in kBwdVariants
  BwdSchedule schedule;
};

// The variant for a problem: of those whose head dims, of q and k and of v, are no smaller, the one
// that computes least. One for the problem's mask, or, where that computes less, for any mask.
// INVARIANT: the head dims are at most 256; there is a variant for each.
int find_backward_variant(Dtype dtype, KernelKind kind, int64_t head_dim, int64_t head_dim_v);

// INVARIANT: the problem comes from a CUDA call that check_call() accepts, and has queries. Then
// the numbers of tiles fit into an int. Without keys the grid is 0.
BwdPlan plan_backward(FwdProblem const& problem);

// How the parts of dQ are added, for a reader.
char const* dq_order(FwdProblem const& problem, BwdSchedule const& schedule);

}  // namespace fa3
