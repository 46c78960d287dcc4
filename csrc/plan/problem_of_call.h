// The problem that a call is: its mask in the form that the kernels know, without limits that mask
// nothing.
#pragma once

#include "call/attention_call.h"

namespace fa3 {

// The call has passed its checks.
FwdProblem problem_of(AttentionCall const& call);

// The same of a call on a cache that check_cache() accepts.
FwdProblem problem_of_cache(AttentionCall const& call);

}  // namespace fa3
