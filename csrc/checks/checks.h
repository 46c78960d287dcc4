// What a call must look like: the one source of user checks. The CUDA ops call it with the tensors
// themselves; the CPU implementation, can_use() and explain() call it through the torch-free module
// flash_attn3._plan, so that every device names a mistake in the same words. Pure: no torch, no
// CUDA, no allocation unless there is something to say. Each function gives "" if the call is fine,
// else the whole error text. What lists and tables contain is not read: they are on the GPU.
#pragma once

#include <string>

#include "call/attention_call.h"
#include "call/combine_call.h"
#include "call/quantize_call.h"

namespace fa3 {

// Without a cache. is_fp8: by the rules of e4m3 tensors and scales, which `attend` alone serves. Of
// a backward, what is given is checked: the planner has the inputs alone. A CUDA call that passes
// has a kernel in kFwdVariants or kBwdVariants.
std::string check_call(AttentionCall const& call, bool is_fp8 = false);

// `attend_cache`, whose k and v are the cache, and what append_and_attend asks for besides, new
// rows and rotary: check_append() relies on check_cache(). sets_scales: whether the call gave the
// scales that new rows set.
std::string check_cache(AttentionCall const& call);
std::string check_append(AttentionCall const& call, bool sets_scales = true);

std::string check_combine(CombineCall const& call);
std::string check_merge(MergeCall const& call);
std::string check_quantize(QuantizeCall const& call);

}  // namespace fa3
