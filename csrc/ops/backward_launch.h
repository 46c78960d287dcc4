// What the backward ops do to launch a planned problem.
#pragma once

#include "call/attention_call.h"
#include "ops/boxed_stack.h"
#include "ops/cuda_call.h"

namespace fa3 {

// What a user passed, in the order of the schemas; the gradients may be null: to be allocated.
struct BackwardTensors {
  OwnedTensor dout;
  OwnedTensor dlse;  // null: zero
  OwnedTensor q;
  OwnedTensor k;
  OwnedTensor v;
  OwnedTensor out;
  OwnedTensor lse;
  OwnedTensor dq;
  OwnedTensor dk;
  OwnedTensor dv;

  static constexpr int kInputs = 7;

  static BackwardTensors read(BoxedStack& args, bool has_gradients);

  void describe_in(AttentionCall& call) const;

  // Null gradients become new tensors like q, k and v.
  void allocate_gradients(char const* op);

  void zero_gradients() const;
};

// Plans params.problem, fills in the rest of params from the tensors, and launches on the current
// stream of their device. params has its problem, which has a query and a key, the scales, sinks
// and lengths. Inputs that the kernels cannot address are replaced by copies; gradients like that
// are written through temporaries.
void launch_backward(char const* op, BackwardTensors& tensors, BwdParams& params);

}  // namespace fa3
