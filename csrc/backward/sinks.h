// Gradients of the sinks: a sink is one more key of every row of its head, with a value of 0, so dP
// of it is 0, and dS = -P * delta.
#pragma once

#include "core/problem.h"

namespace fa3 {

// On the current device and the given stream (a cudaStream_t), after the preprocess kernel.
void launch_sinks(BwdParams const& params, void* stream);

}  // namespace fa3
