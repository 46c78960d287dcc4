// How attention on a cache is run. What depends on the lengths is decided on the GPU.
#pragma once

#include <vector>

#include "plan/plan.h"

namespace fa3 {

constexpr int kFastRows = 32;  // rows of a KV head up to which the decode kernel is faster

// The launches of a call: one, or two if packed queries hold prompts and steps. The first of two
// computes the prompts, the second the steps. Both run at the same time (SharedCall). If the parts
// of all heads take too much memory, the problem has the heads of one group, and the groups are
// launched in turn.
std::vector<FwdProblem> launches_of_cache(FwdProblem const& problem);

// INVARIANT: the problem comes from a CUDA call that check_cache() accepts.
FwdPlan plan_cache(FwdProblem const& problem);

}  // namespace fa3
