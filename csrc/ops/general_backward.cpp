// The general backward op on CUDA: windows, chunks, softcap, sinks, packed sequences.
#include <utility>

#include "ops/backward_launch.h"
#include "ops/general_arguments.h"
#include "ops/library.h"

namespace fa3 {
namespace {

constexpr char const* kOp = "bwd";  // as errors name it

// What a user passed. The members are read off the stack in this order.
struct Arguments {
  BackwardTensors tensors;
  GeneralArguments general;
  bool deterministic;
};

Arguments read_arguments(StableIValue* stack) {
  BoxedStack args(stack);
  return Arguments{BackwardTensors::read(args, /*has_gradients=*/false),
                   GeneralArguments::read(args), args.flag()};
}

GeneralBackwardCall describe_call(Arguments const& args) {
  BackwardTensors const& tensors = args.tensors;
  GeneralBackwardCall call;
  call.general = describe_general(args.general);
  ForwardCall& forward = call.general.forward;
  forward.q = describe(tensors.q);
  forward.k = describe(tensors.k);
  forward.v = describe(tensors.v);
  forward.op = kOp;
  forward.softmax_scale = general_scale(args.general, forward.q);
  call.dout = describe(tensors.dout);
  call.out = describe(tensors.out);
  call.lse = describe(tensors.lse);
  call.has_dlse = tensors.dlse != nullptr;
  if (call.has_dlse) {
    call.dlse = describe(tensors.dlse);
  }
  return call;
}

// The gradient of the sinks, zero; empty without them.
OwnedTensor sink_gradients(GeneralCall const& call, FwdProblem const& problem) {
  int64_t const size = call.has_sinks ? problem.heads_q : 0;
  OwnedTensor dsinks = allocate(kOp, &size, 1, Dtype::kFloat32, call.forward.q.device_index);
  require(aoti_torch_zero_(dsinks.get()), "fill the gradient of sinks");
  return dsinks;
}

OwnedTensor run_backward(Arguments& args) {
  GeneralBackwardCall call = describe_call(args);
  GeneralCall& general = call.general;
  TensorMeta const& q = general.forward.q;
  DeviceInfo const info = device_info_of(q);
  general.forward.sm_count = info.sm_count;
  throw_if(check_general_backward(call));

  BwdParams params;
  params.problem = general_problem(general, args.general.sizes(), /*has_row_features=*/false);
  FwdProblem& problem = params.problem;
  problem.deterministic = args.deterministic;
  problem.device = limits_of(info);
  DeviceGuard const guard(q.device_index);
  args.tensors.allocate_gradients(kOp);
  OwnedTensor dsinks = sink_gradients(general, problem);
  params.sinks = data_of<float>(args.general.sinks, general.sinks);
  params.dsinks = general.has_sinks ? static_cast<float*>(mutable_data(dsinks)) : nullptr;
  params.lengths = lengths_of(args.general, general);
  params.softmax_scale = float(general.forward.softmax_scale);
  params.softcap = float(general.softcap);
  bool const is_packed = problem.is_packed;
  int const queries = is_packed ? problem.total_q : problem.seqlen_q;
  int const keys = is_packed ? problem.total_k : problem.seqlen_k;
  bool const has_queries = problem.batch > 0 && problem.heads_q > 0 && queries > 0;
  // Without keys, sinks have a gradient all the same.
  if (has_queries && (keys > 0 || general.has_sinks)) {
    launch_backward(kOp, args.tensors, params);
  } else {
    args.tensors.zero_gradients();
  }
  return dsinks;
}

}  // namespace

void bwd_general_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  constexpr uint64_t kArguments = BackwardTensors::kInputs + GeneralArguments::kCount + 1;
  expect_schema("bwd_general", {num_args, num_outputs}, {kArguments, 4});
  Arguments args = read_arguments(stack);
  OwnedTensor dsinks = run_backward(args);
  stack[0] = boxed(std::move(args.tensors.dq));
  stack[1] = boxed(std::move(args.tensors.dk));
  stack[2] = boxed(std::move(args.tensors.dv));
  stack[3] = boxed(std::move(dsinks));
}

}  // namespace fa3
