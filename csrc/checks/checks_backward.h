// What a call of the backward must look like; the counterpart of checks/checks_general.h.
#pragma once

#include "checks/checks.h"

namespace fa3 {

// Empty when the inputs of the forward are fine for its gradients, else the whole error text.
std::string check_gradient_inputs(AttentionCall const& call);

// The same of all tensors of the call. A CUDA call that passes has a kernel in kBwdVariants.
std::string check_backward(AttentionCall const& call);

}  // namespace fa3
