// What the op library, _C.abi3.so, consists of: boxed ops and one function for Python's ctypes.
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <string>

namespace fa3 {

// Boxed ops: the stack brings the arguments of the schema in flash_attn3/_library.py and takes the
// results. fwd(q, k, v, softmax_scale, causal, pack_gqa, sm_margin) -> (out, lse)
void fwd_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);
// The same with deterministic behind the others, which is for the gradients.
void fwd_traced_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);
// fwd(q, k, v, softmax_scale, causal, pack_gqa, sm_margin) -> out
void fwd_no_lse_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);
// fwd_out(q, k, v, out, softmax_scale, causal, pack_gqa, sm_margin) -> lse
void fwd_out_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);
// The same -> nothing
void fwd_out_no_lse_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);
// _fwd_general(q, k, v, the members of GeneralArguments, pack_gqa, sm_margin, return_max_logits)
// -> (out, lse, max_logits)
void fwd_general_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);
// fwd_general: the same with deterministic behind the others, which is for the gradients.
void fwd_general_traced_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);
// fwd_general_out: with out behind v -> (lse, max_logits)
void fwd_general_out_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);
// bwd(dout, dlse, q, k, v, out, lse, softmax_scale, causal, deterministic) -> (dq, dk, dv)
void bwd_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);
// bwd_out(dout, dlse, q, k, v, out, lse, dq, dk, dv, softmax_scale, causal, deterministic) ->
// nothing
void bwd_out_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);

// bwd_general(dout, dlse, q, k, v, out, lse, the members of GeneralArguments, deterministic)
// -> (dq, dk, dv, dsinks)
void bwd_general_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);

// fwd_fp8(q, k, v, q_descale, k_descale, v_descale, float16_out, promote, the members of
// GeneralArguments, pack_gqa, sm_margin, return_max_logits) -> (out, lse, max_logits)
void fwd_fp8_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);
// fwd_fp8_out: with out behind v, without float16_out -> (lse, max_logits)
void fwd_fp8_out_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);

// quantize_fp8(x, cu_seqlens, seqused, block, group, rotation_seed) -> (values, scales)
void quantize_fp8_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);
// quantize_qkv_fp8(q, k, v, cu_seqlens_q, seqused_q, cu_seqlens_k, seqused_k, q_block, kv_block,
// rotation_seed) -> (values, scales) of each
void quantize_qkv_fp8_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);

// Empty when the driver that is installed can run this library, and where there is none; else what
// is wrong with it. Does not initialise CUDA.
std::string current_driver_problem();

}  // namespace fa3
