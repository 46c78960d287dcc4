// The backward ops on CUDA: read, check, allocate, plan, launch (backward_launch.h). Without
// synchronisation, on the current stream of q's device, like the forward ops.
#include <utility>

#include "attention_ops.h"
#include "checks/checks.h"
#include "call/device_info.h"
#include "plan/problem_of_call.h"
#include "ops/backward_launch.h"
#include "ops/boxed_stack.h"
#include "ops/library.h"

namespace fa3 {
namespace {

// Computes into the gradients, which it allocates if they are null. dsinks is zero.
void run_backward(AttentionCall const& call, OpTensors& tensors, BackwardResults& results) {
  char const* const op = call.op();
  BwdParams params;
  params.problem = problem_of(call);
  set_score(params, call);
  params.mask = view_mask(call.mask, call.mask.query_lists);
  params.dsinks =
      call.sink_count() > 0 ? static_cast<float*>(mutable_data(results.dsinks)) : nullptr;
  if (!results.dq) {
    results.dq = allocate_like(op, call.q);
    results.dk = allocate_like(op, call.k);
    results.dv = allocate_like(op, call.v);
  }
  FwdProblem const& problem = params.problem;
  int const queries = problem.is_packed ? problem.total_q : problem.seqlen_q;
  int const keys = problem.is_packed ? problem.total_k : problem.seqlen_k;
  bool const has_queries = problem.batch > 0 && problem.heads_q > 0 && queries > 0;
  // Without keys, sinks have a gradient all the same.
  if (has_queries && (keys > 0 || call.sink_count() > 0)) {
    launch_backward(op, tensors, results, params);
  } else {
    fill(results.dq, 0.0);
    fill(results.dk, 0.0);
    fill(results.dv, 0.0);
  }
}

// The gradient of the sinks, empty without them.
OwnedTensor allocate_sinks(AttentionCall const& call) {
  int64_t const size = call.sink_count();
  OwnedTensor dsinks = allocate(call.op(), &size, 1, Dtype::kFloat32, call.q.device_index);
  if (size > 0) {
    fill(dsinks, 0.0);
  }
  return dsinks;
}

template <class Op>
void boxed_backward(StableIValue* stack, uint64_t, uint64_t) {
  BoxedStack values(stack);
  OpTensors tensors;
  AttentionCall call;
  Op::read(values, tensors, call);
  call.is_backward = true;
  call.device = limits_of(device_info_of(call.q));
  throw_if(check_call(call));
  DeviceGuard const guard(call.q.device_index);
  BackwardResults results{std::move(tensors.dq), std::move(tensors.dk), std::move(tensors.dv),
                          allocate_sinks(call)};
  run_backward(call, tensors, results);
  Op::box(stack, results);
}

constexpr BoxedOp kOps[] = {{ops::bwd::kName, &boxed_backward<ops::bwd>},
                            {ops::bwd_out::kName, &boxed_backward<ops::bwd_out>}};

}  // namespace

std::span<BoxedOp const> backward_ops() { return kOps; }

}  // namespace fa3
