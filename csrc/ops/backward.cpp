// The dense backward ops on CUDA: check, allocate, plan, launch (backward_launch.h). Boxed by hand,
// without synchronisation, on the current stream of q's device, like the forward ops.
#include <utility>

#include "dispatch/checks_backward.h"
#include "dispatch/device_info.h"
#include "ops/backward_launch.h"
#include "ops/library.h"

namespace fa3 {
namespace {

// What a user passed. The members are read off the stack in this order.
struct BackwardArguments {
  BackwardTensors tensors;
  double softmax_scale;
  bool causal;
  bool deterministic;
};

BackwardArguments read_arguments(StableIValue* stack, bool has_gradients) {
  BoxedStack args(stack);
  return BackwardArguments{BackwardTensors::read(args, has_gradients), args.real(), args.flag(),
                           args.flag()};
}

BackwardCall describe_call(BackwardArguments const& args) {
  BackwardTensors const& tensors = args.tensors;
  BackwardCall call;
  call.forward.q = describe(tensors.q);
  call.forward.k = describe(tensors.k);
  call.forward.v = describe(tensors.v);
  call.forward.softmax_scale = args.softmax_scale;
  call.dout = describe(tensors.dout);
  call.out = describe(tensors.out);
  call.lse = describe(tensors.lse);
  call.has_dlse = tensors.dlse != nullptr;
  if (call.has_dlse) {
    call.dlse = describe(tensors.dlse);
  }
  call.has_gradients = tensors.dq != nullptr;
  if (call.has_gradients) {
    call.dq = describe(tensors.dq);
    call.dk = describe(tensors.dk);
    call.dv = describe(tensors.dv);
  }
  call.forward.op = backward_op(call.has_gradients);
  return call;
}

FwdProblem problem_of(BackwardCall const& call, BackwardArguments const& args,
                      DeviceInfo const& info) {
  TensorMeta const& q = call.forward.q;
  TensorMeta const& k = call.forward.k;
  FwdProblem problem;
  problem.dtype = q.dtype;
  problem.batch = int(q.size[0]);
  problem.seqlen_q = int(q.size[1]);
  problem.seqlen_k = int(k.size[1]);
  problem.heads_q = int(q.size[2]);
  problem.heads_k = int(k.size[2]);
  problem.head_dim = int(q.size[3]);
  problem.head_dim_v = int(call.forward.v.size[3]);
  problem.set_dense(args.causal);
  problem.deterministic = args.deterministic;
  problem.device = limits_of(info);
  return problem;
}

// Computes into the gradients, which it allocates if they are null.
void run_backward(BackwardArguments& args) {
  BackwardCall call = describe_call(args);
  TensorMeta const& q = call.forward.q;
  DeviceInfo const info = device_info_of(q);
  call.forward.sm_count = info.sm_count;
  throw_if(check_backward(call));

  BwdParams params;
  params.problem = problem_of(call, args, info);
  params.softmax_scale = float(args.softmax_scale);
  FwdProblem const& problem = params.problem;
  DeviceGuard const guard(q.device_index);
  args.tensors.allocate_gradients(call.forward.op);
  bool const has_queries = problem.batch > 0 && problem.heads_q > 0 && problem.seqlen_q > 0;
  if (has_queries && problem.seqlen_k > 0) {
    launch_backward(call.forward.op, args.tensors, params);
  } else {
    args.tensors.zero_gradients();
  }
}

}  // namespace

void bwd_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  expect_schema("bwd", {num_args, num_outputs}, {10, 3});
  BackwardArguments args = read_arguments(stack, /*has_gradients=*/false);
  run_backward(args);
  stack[0] = boxed(std::move(args.tensors.dq));
  stack[1] = boxed(std::move(args.tensors.dk));
  stack[2] = boxed(std::move(args.tensors.dv));
}

void bwd_out_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  expect_schema("bwd_out", {num_args, num_outputs}, {13, 0});
  BackwardArguments args = read_arguments(stack, /*has_gradients=*/true);
  run_backward(args);
}

}  // namespace fa3
