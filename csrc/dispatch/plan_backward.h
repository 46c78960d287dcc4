// How a backward pass is run: which variant, and how its work is cut. Pure and cheap, like
// plan_forward().
#pragma once

#include "config/bwd_config.h"
#include "core/problem.h"

namespace fa3 {

struct BwdPlan {
  int variant = -1;  // index in kBwdVariants
  BwdSchedule schedule;
};

// The variant for a problem: that of the head dim, else of the next larger one. INVARIANT: the head
// dim is one that check_forward() accepts; there is a variant for each.
int find_backward_variant(Dtype dtype, bool causal, int64_t head_dim);

// INVARIANT: the problem comes from a CUDA call that check_backward() accepts, and is not empty.
// Then the numbers of tiles fit into an int.
BwdPlan plan_backward(FwdProblem const& problem);

}  // namespace fa3
