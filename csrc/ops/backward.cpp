// The backward ops on CUDA: check, copy what the kernels cannot address, allocate gradients and
// workspace, plan, launch. Boxed by hand, without synchronisation, on the current stream of q's
// device, like the forward ops.
#include <optional>
#include <stdexcept>
#include <utility>

#include "bwd_built.inc"
#include "bwd_registry.inc"
#include "dispatch/checks_backward.h"
#include "dispatch/device_info.h"
#include "dispatch/plan_backward.h"
#include "dispatch/registry.h"
#include "ops/boxed_stack.h"
#include "ops/cuda_call.h"
#include "ops/library.h"

namespace fa3 {
namespace {

// What a user passed. The members are read off the stack in this order.
struct BackwardArguments {
  OwnedTensor dout;
  OwnedTensor dlse;  // null: zero
  OwnedTensor q;
  OwnedTensor k;
  OwnedTensor v;
  OwnedTensor out;
  OwnedTensor lse;
  OwnedTensor dq;  // null: to be allocated, as dk and dv
  OwnedTensor dk;
  OwnedTensor dv;
  double softmax_scale;
  bool causal;
  bool deterministic;
};

BackwardArguments read_arguments(StableIValue* stack, bool has_gradients) {
  BoxedStack args(stack);
  auto const gradient = [&] { return has_gradients ? args.tensor() : OwnedTensor(); };
  return BackwardArguments{args.tensor(), args.optional_tensor(),
                           args.tensor(), args.tensor(),
                           args.tensor(), args.tensor(),
                           args.tensor(), gradient(),
                           gradient(),    gradient(),
                           args.real(),   args.flag(),
                           args.flag()};
}

BackwardCall describe_call(BackwardArguments const& args) {
  BackwardCall call;
  call.forward.q = describe(args.q);
  call.forward.k = describe(args.k);
  call.forward.v = describe(args.v);
  call.forward.softmax_scale = args.softmax_scale;
  call.dout = describe(args.dout);
  call.out = describe(args.out);
  call.lse = describe(args.lse);
  call.has_dlse = args.dlse != nullptr;
  if (call.has_dlse) {
    call.dlse = describe(args.dlse);
  }
  call.has_gradients = args.dq != nullptr;
  if (call.has_gradients) {
    call.dq = describe(args.dq);
    call.dk = describe(args.dk);
    call.dv = describe(args.dv);
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
  problem.causal = args.causal;
  problem.deterministic = args.deterministic;
  problem.device = DeviceLimits{info.sm_count, info.l2_bytes};
  return problem;
}

OwnedTensor allocate_like(char const* op, TensorMeta const& meta) {
  return allocate(op, meta.size, meta.rank, meta.dtype, meta.device_index);
}

bool is_contiguous(TensorMeta const& meta) {
  int64_t stride = 1;
  for (int i = meta.rank - 1; i >= 0; --i) {
    if (meta.size[i] > 1 && meta.stride[i] != stride) {
      return false;
    }
    stride *= meta.size[i];
  }
  return true;
}

// Gradients come with any strides: .sum().backward() gives a dO with stride 0 everywhere.
TensorView readable_gradient(char const* op, OwnedTensor& tensor, TensorMeta const& meta) {
  bool has_own_elements = meta.stride[3] == 1;
  for (int i = 0; i < 3; ++i) {
    has_own_elements = has_own_elements && (meta.size[i] == 1 || meta.stride[i] != 0);
  }
  if (!has_own_elements) {
    tensor = packed_copy(op, tensor, meta);
    return view(describe(tensor));
  }
  return readable(op, tensor, meta);
}

float const* readable_rows(char const* op, OwnedTensor& tensor, TensorMeta const& meta) {
  if (!is_contiguous(meta)) {
    tensor = packed_copy(op, tensor, meta);
  }
  return static_cast<float const*>(mutable_data(tensor));
}

// The launcher of the variant that the plan picked, and the schedule.
BwdLaunch plan_launch(BwdParams& params) {
  BwdPlan const plan = plan_backward(params.problem);
  BwdLaunch const launcher = kBwdLaunchers[plan.variant];
  if (!launcher) {
    throw std::runtime_error(missing_backward_text(plan.variant, kBwdBuilt));
  }
  params.schedule = plan.schedule;
  return launcher;
}

// One allocation: LSE and delta of every row, the accumulator of dQ, then the flags of
// deterministic mode, which are as wide as floats. Whole tiles of 64 rows and more keep each part
// aligned.
OwnedTensor allocate_workspace(char const* op, BwdParams& params, int device) {
  static_assert(sizeof(int) == sizeof(float));
  BwdSchedule const& schedule = params.schedule;
  int64_t const rows = schedule.rows;
  int64_t const floats = 2 * rows + schedule.dq_floats + schedule.flags;
  OwnedTensor workspace = allocate(op, &floats, 1, Dtype::kFloat32, device);
  params.lse_log2 = static_cast<float*>(mutable_data(workspace));
  params.delta = params.lse_log2 + rows;
  params.dq_sum = params.delta + rows;
  if (schedule.flags > 0) {
    params.dq_flags = reinterpret_cast<int*>(params.dq_sum + schedule.dq_floats);
    params.ticket = params.dq_flags + schedule.flags - 1;
  }
  return workspace;
}

void zero(OwnedTensor const& tensor) { require(aoti_torch_zero_(tensor.get()), "fill a gradient"); }

void launch(BackwardArguments& args, BackwardCall const& call, BwdParams& params) {
  char const* const op = call.forward.op;
  int const device = call.forward.q.device_index;
  BwdLaunch const launcher = plan_launch(params);
  OwnedTensor const workspace = allocate_workspace(op, params, device);
  params.q = readable(op, args.q, call.forward.q);
  params.k = readable(op, args.k, call.forward.k);
  params.v = readable(op, args.v, call.forward.v);
  params.o = readable_gradient(op, args.out, call.out);
  params.dout = readable_gradient(op, args.dout, call.dout);
  params.lse = readable_rows(op, args.lse, call.lse);
  params.dlse = args.dlse ? readable_rows(op, args.dlse, call.dlse) : nullptr;
  Target const targets[] = {{op, args.dq}, {op, args.dk}, {op, args.dv}};
  params.dq = targets[0].view();
  params.dk = targets[1].view();
  params.dv = targets[2].view();
  params.softmax_scale = float(args.softmax_scale);
  void* stream = nullptr;
  require(aoti_torch_get_current_cuda_stream(device, &stream), "read the current stream");
  launcher(params, stream);
  for (Target const& target : targets) {
    target.finish();
  }
}

// Computes into args.dq, args.dk and args.dv, which it allocates if they are null.
void run_backward(BackwardArguments& args) {
  BackwardCall call = describe_call(args);
  TensorMeta const& q = call.forward.q;
  DeviceInfo const info =
      q.device == DeviceType::kCuda ? device_info(q.device_index) : DeviceInfo{};
  call.forward.sm_count = info.sm_count;
  throw_if(check_backward(call));

  BwdParams params;
  params.problem = problem_of(call, args, info);
  FwdProblem const& problem = params.problem;
  DeviceGuard const guard(q.device_index);
  if (!call.has_gradients) {
    args.dq = allocate_like(call.forward.op, q);
    args.dk = allocate_like(call.forward.op, call.forward.k);
    args.dv = allocate_like(call.forward.op, call.forward.v);
  }
  bool const has_queries = problem.batch > 0 && problem.heads_q > 0 && problem.seqlen_q > 0;
  if (has_queries && problem.seqlen_k > 0) {
    launch(args, call, params);
  } else {
    zero(args.dq);
    zero(args.dk);
    zero(args.dv);
  }
}

}  // namespace

void bwd_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  expect_schema("bwd", {num_args, num_outputs}, {10, 3});
  BackwardArguments args = read_arguments(stack, /*has_gradients=*/false);
  run_backward(args);
  stack[0] = boxed(std::move(args.dq));
  stack[1] = boxed(std::move(args.dk));
  stack[2] = boxed(std::move(args.dv));
}

void bwd_out_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  expect_schema("bwd_out", {num_args, num_outputs}, {13, 0});
  BackwardArguments args = read_arguments(stack, /*has_gradients=*/true);
  run_backward(args);
}

}  // namespace fa3
