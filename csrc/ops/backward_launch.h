// Plans and launches the backward, for its ops.
#pragma once

#include "attention_ops.h"
#include "ops/cuda_call.h"

namespace fa3 {

struct BackwardResults {
  OwnedTensor dq;
  OwnedTensor dk;
  OwnedTensor dv;
  OwnedTensor dsinks;
};

// Plans params.problem, fills in the rest of params from the tensors, and launches on the current
// stream of their device. The caller has set the problem, which has a query and a key, the scales,
// sinks and lengths. Inputs that the kernels cannot address are replaced by copies; such gradients
// are written through temporaries.
void launch_backward(char const* op, OpTensors& tensors, BackwardResults const& results,
                     BwdParams& params);

}  // namespace fa3
