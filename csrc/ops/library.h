// What the op library, _C.abi3.so, consists of: boxed ops (ops/boxed_stack.h) and one function for
// Python's ctypes.
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <span>
#include <string>

namespace fa3 {

// An op, by its name in the schema.
struct BoxedOp {
  char const* name;
  void (*run)(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);
};

std::span<BoxedOp const> forward_ops();
std::span<BoxedOp const> general_ops();
std::span<BoxedOp const> fp8_ops();
std::span<BoxedOp const> backward_ops();
std::span<BoxedOp const> cache_ops();

// quantize_fp8(x, cu_seqlens, seqused, block, group, rotation_seed) -> (values, scales)
void quantize_fp8_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);
// quantize_qkv_fp8(q, k, v, cu_seqlens_q, seqused_q, cu_seqlens_k, seqused_k, q_block, kv_block,
// rotation_seed) -> (values, scales) of each
void quantize_qkv_fp8_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);

// combine(out_partial, lse_partial, out) -> lse
void combine_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);
// merge_parts(out, out_0, lse_0, ..., out_3, lse_3) -> lse
void merge_parts_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);

// Empty when the driver that is installed can run this library, and where there is none; else what
// is wrong with it. Does not initialise CUDA.
std::string current_driver_problem();

}  // namespace fa3
