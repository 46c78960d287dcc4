// Merges of partial results, for ops that make them themselves.
#pragma once

#include "call/combine_call.h"
#include "ops/tensor_handle.h"

namespace fa3 {

// Into out and lse, on the current stream of their device. The call has passed check_merge().
void launch_merge(MergeCall const& call, OwnedTensor const& out, OwnedTensor const& lse);

}  // namespace fa3
