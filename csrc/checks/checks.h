// What a call must look like: the one source of user checks. The CUDA op calls it with the tensors
// themselves; the CPU implementation, can_use() and explain() call it through the torch-free module
// flash_attn3._plan, so that a mistake is named in the same words everywhere. Pure: no torch, no
// CUDA, no allocation unless there is something to say.
#pragma once

#include <string>

#include "call/attention_call.h"

namespace fa3 {

// What the first of these that finds something wrong says of a call, or "".
template <class Call, size_t kCount>
std::string first_error(std::string (*const (&checks)[kCount])(Call const&), Call const& call) {
  for (auto const check : checks) {
    std::string error = check(call);
    if (!error.empty()) {
      return error;
    }
  }
  return {};
}

// Empty when the call is fine, else the whole error text. A CUDA call that passes has a kernel in
// kFwdVariants. The rules of a dense call, and of its arguments in the schemas of dense ops.
std::string check_dense(AttentionCall const& call);

}  // namespace fa3
