// How attention on a cache is run. What depends on the lengths is decided on the GPU.
#pragma once

#include <vector>

#include "dispatch/plan.h"

namespace fa3 {

// The launches of a call. Packed prompts with steps beside them have two, prompts first, which run
// side by side: each has its tile, and as many CTAs as its share of the work (SharedCall).
std::vector<FwdProblem> launches_of_cache(FwdProblem const& problem);

// INVARIANT: the problem comes from a CUDA call that check_cache() accepts.
FwdPlan plan_cache(FwdProblem const& problem);

}  // namespace fa3
