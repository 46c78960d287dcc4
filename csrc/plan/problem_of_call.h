// The problem that a call is: its mask in the form that the kernels know, without limits that mask
// nothing.
#pragma once

#include "call/attention_call.h"

namespace fa3 {

// Describes a call that has passed its checks.
FwdProblem problem_of(AttentionCall const& call);

// Whether the planner alone decides into how many parts the keys are split.
bool splits_freely(AttentionCall const& call);

// The keys are not split.
void forbid_splits(AttentionCall& call);

}  // namespace fa3
