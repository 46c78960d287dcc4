// Gradients of the sinks. A sink is one more key of every row of its head, with a value of 0: its
// dP is 0, and its dS is -P * delta.
#pragma once

#include "core/problem.h"

namespace fa3 {

// Launches on the current device and the given stream (a cudaStream_t), after the preprocess
// kernel.
void launch_sinks(BwdParams const& params, void* stream);

}  // namespace fa3
