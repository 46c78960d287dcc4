// The problem that a call is: its mask in the form that the kernels know, without limits that mask
// nothing.
#pragma once

#include "call/attention_call.h"

namespace fa3 {

// Describes a call without a cache that has passed its checks.
FwdProblem problem_of(AttentionCall const& call);

// Describes a call on a cache that has passed check_cache().
FwdProblem problem_of_cache(AttentionCall const& call);

}  // namespace fa3
