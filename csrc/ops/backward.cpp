// The backward ops on CUDA: check, allocate, plan, launch (backward_launch.h). Boxed by hand,
// without synchronisation, on the current stream of q's device, like the forward ops.
#include <utility>

#include "checks/checks.h"
#include "call/device_info.h"
#include "plan/problem_of_call.h"
#include "ops/backward_launch.h"
#include "ops/general_launch.h"
#include "ops/library.h"

namespace fa3 {
namespace {

struct BackwardCall {
  BoxedStack args;  // at the argument after the tensors
  BackwardTensors tensors;
  AttentionCall call;

  BackwardCall(StableIValue* stack, bool has_gradients)
      : args(stack), tensors(BackwardTensors::read(args, has_gradients)) {
    call.is_backward = true;
    tensors.describe_in(call);
  }
};

// Computes into the gradients, which it allocates if they are null. dsinks: (heads_q), zero; with
// sinks.
void run_backward(BackwardTensors& tensors, AttentionCall const& call, OwnedTensor const& dsinks) {
  char const* const op = call.op();
  BwdParams params;
  params.problem = problem_of(call);
  params.sinks = data_of<float>(call.score.sinks);
  params.dsinks = call.score.sinks ? static_cast<float*>(mutable_data(dsinks)) : nullptr;
  params.lengths = lengths_of(call);
  params.softmax_scale = float(call.softmax_scale());
  params.softcap = float(call.score.softcap);
  tensors.allocate_gradients(op);
  FwdProblem const& problem = params.problem;
  int const queries = problem.is_packed ? problem.total_q : problem.seqlen_q;
  int const keys = problem.is_packed ? problem.total_k : problem.seqlen_k;
  bool const has_queries = problem.batch > 0 && problem.heads_q > 0 && queries > 0;
  // Without keys, sinks have a gradient all the same.
  if (has_queries && (keys > 0 || call.score.sinks)) {
    launch_backward(op, tensors, params);
  } else {
    tensors.zero_gradients();
  }
}

void check(AttentionCall& call) {
  call.device = limits_of(device_info_of(call.q));
  throw_if(check_backward(call));
}

void box_gradients(StableIValue* stack, BackwardTensors& tensors) {
  stack[0] = boxed(std::move(tensors.dq));
  stack[1] = boxed(std::move(tensors.dk));
  stack[2] = boxed(std::move(tensors.dv));
}

template <bool kHasGradients>
void boxed_backward(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  constexpr int kGiven = kHasGradients ? 3 : 0;
  constexpr int kScalars = 3;
  expect_schema(kHasGradients ? "bwd_out" : "bwd", {num_args, num_outputs},
                {BackwardTensors::kInputs + kGiven + kScalars, 3 - kGiven});
  BackwardCall args(stack, kHasGradients);
  AttentionCall& call = args.call;
  call.score.softmax_scale = args.args.real();
  args.args.read(call.score.causal);
  args.args.read(call.gradients.deterministic);
  check(call);
  DeviceGuard const guard(call.q.device_index);
  run_backward(args.tensors, call, OwnedTensor());
  if (!kHasGradients) {
    box_gradients(stack, args.tensors);
  }
}

template <bool kHasGradients>
void boxed_general(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  constexpr int kGiven = kHasGradients ? 3 : 0;
  constexpr int kArguments =
      LengthArguments::kCount + ScoreArguments::kCount + GradientArguments::kCount;
  expect_schema(kHasGradients ? "bwd_general_out" : "bwd_general", {num_args, num_outputs},
                {BackwardTensors::kInputs + kGiven + kArguments, 4 - kGiven});
  BackwardCall args(stack, kHasGradients);
  AttentionCall& call = args.call;
  args.args.read_groups(call.lengths, call.score, call.gradients);
  check(call);
  DeviceGuard const guard(call.q.device_index);
  // Empty without sinks.
  int64_t const size = call.score.sinks ? call.score.sinks->size[0] : 0;
  OwnedTensor dsinks = allocate(call.op(), &size, 1, Dtype::kFloat32, call.q.device_index);
  require(aoti_torch_zero_(dsinks.get()), "fill the gradient of sinks");
  run_backward(args.tensors, call, dsinks);
  if (!kHasGradients) {
    box_gradients(stack, args.tensors);
    stack += 3;
  }
  *stack = boxed(std::move(dsinks));
}

constexpr BoxedOp kOps[] = {{"bwd", &boxed_backward<false>},
                            {"bwd_out", &boxed_backward<true>},
                            {"bwd_general", &boxed_general<false>},
                            {"bwd_general_out", &boxed_general<true>}};

}  // namespace

std::span<BoxedOp const> backward_ops() { return kOps; }

}  // namespace fa3
