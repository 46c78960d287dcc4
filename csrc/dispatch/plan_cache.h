// How attention on a cache is run. What depends on the lengths is decided on the GPU.
#pragma once

#include "dispatch/plan.h"

namespace fa3 {

// INVARIANT: the problem comes from a CUDA call that check_cache() accepts.
FwdPlan plan_cache(FwdProblem const& problem);

}  // namespace fa3
