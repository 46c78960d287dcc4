// The contents of the op library, _C.abi3.so: boxed ops (ops/boxed_stack.h) and functions for
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
std::span<BoxedOp const> backward_ops();
std::span<BoxedOp const> quantize_ops();
std::span<BoxedOp const> combine_ops();
std::span<BoxedOp const> mask_list_ops();
std::span<BoxedOp const> chosen_gradient_ops();

// Why the installed driver cannot run this library; empty if it can, and without a driver. Does not
// initialise CUDA.
std::string current_driver_problem();

}  // namespace fa3
