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

// The forward ops without a cache: dense or packed tensors of any dtype but e4m3. A CUDA call that
// passes has a kernel in kFwdVariants.
std::string check_forward(AttentionCall const& call);

// `attend` with e4m3 tensors or scales.
std::string check_fp8(AttentionCall const& call);

// The ops `bwd...`: the inputs of the forward alone, and all tensors of the call. A CUDA call that
// passes has a kernel in kBwdVariants.
std::string check_gradient_inputs(AttentionCall const& call);
std::string check_backward(AttentionCall const& call);

// `attend_cache`.
std::string check_cache(AttentionCall const& call);

// What append_and_attend asks for besides: new rows and rotary. k and v are the cache.
std::string check_append(AttentionCall const& call);

// What the kernel asks for after check_append(). sets_scales: whether the call gave scales to set.
std::string check_append_kernel(AttentionCall const& call, bool sets_scales);

std::string check_combine(CombineCall const& call);
std::string check_merge(MergeCall const& call);

std::string check_quantize(QuantizeCall const& call);

}  // namespace fa3
