// The backward op on CUDA: check, copy what the kernels cannot address, allocate gradients and
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

constexpr char const* kOp = "bwd";  // as errors name it

// What a user passed. The members are read off the stack in this order.
struct BackwardArguments {
  OwnedTensor dout;
  OwnedTensor dlse;  // null: zero
  OwnedTensor q;
  OwnedTensor k;
  OwnedTensor v;
  OwnedTensor out;
  OwnedTensor lse;
  double softmax_scale;
  bool causal;
  bool deterministic;
};

BackwardArguments read_arguments(StableIValue* stack) {
  BoxedStack args(stack);
  return BackwardArguments{
      args.tensor(), args.optional_tensor(), args.tensor(), args.tensor(), args.tensor(),
      args.tensor(), args.tensor(),          args.real(),   args.flag(),   args.flag()};
}

struct Gradients {
  OwnedTensor dq;
  OwnedTensor dk;
  OwnedTensor dv;
};

BackwardCall describe_call(BackwardArguments const& args) {
  BackwardCall call;
  call.forward.q = describe(args.q);
  call.forward.k = describe(args.k);
  call.forward.v = describe(args.v);
  call.forward.softmax_scale = args.softmax_scale;
  call.forward.is_backward = true;
  call.dout = describe(args.dout);
  call.out = describe(args.out);
  call.lse = describe(args.lse);
  call.has_dlse = args.dlse != nullptr;
  if (call.has_dlse) {
    call.dlse = describe(args.dlse);
  }
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

OwnedTensor allocate_like(TensorMeta const& meta) {
  return allocate(kOp, meta.size, meta.rank, meta.dtype, meta.device_index);
}

Gradients allocate_gradients(ForwardCall const& call) {
  return Gradients{allocate_like(call.q), allocate_like(call.k), allocate_like(call.v)};
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
TensorView readable_gradient(OwnedTensor& tensor, TensorMeta const& meta) {
  bool has_own_elements = meta.stride[3] == 1;
  for (int i = 0; i < 3; ++i) {
    has_own_elements = has_own_elements && (meta.size[i] == 1 || meta.stride[i] != 0);
  }
  if (!has_own_elements) {
    tensor = packed_copy(kOp, tensor, meta);
    return view(describe(tensor));
  }
  return readable(kOp, tensor, meta);
}

float const* readable_rows(OwnedTensor& tensor, TensorMeta const& meta) {
  if (!is_contiguous(meta)) {
    tensor = packed_copy(kOp, tensor, meta);
  }
  return static_cast<float const*>(mutable_data(tensor));
}

// A new tensor, for writing.
TensorView writable(OwnedTensor const& tensor) {
  TensorMeta const meta = describe(tensor);
  TensorView target = view(meta);
  target.data = mutable_data(tensor);
  return target;
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
OwnedTensor allocate_workspace(BwdParams& params, int device) {
  static_assert(sizeof(int) == sizeof(float));
  BwdSchedule const& schedule = params.schedule;
  int64_t const rows = schedule.rows;
  int64_t const floats = 2 * rows + schedule.dq_floats + schedule.flags;
  OwnedTensor workspace = allocate(kOp, &floats, 1, Dtype::kFloat32, device);
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

void launch(BackwardArguments& args, BackwardCall const& call, BwdParams& params,
            Gradients const& gradients) {
  int const device = call.forward.q.device_index;
  BwdLaunch const launcher = plan_launch(params);
  OwnedTensor const workspace = allocate_workspace(params, device);
  params.q = readable(kOp, args.q, call.forward.q);
  params.k = readable(kOp, args.k, call.forward.k);
  params.v = readable(kOp, args.v, call.forward.v);
  params.o = readable_gradient(args.out, call.out);
  params.dout = readable_gradient(args.dout, call.dout);
  params.lse = readable_rows(args.lse, call.lse);
  params.dlse = args.dlse ? readable_rows(args.dlse, call.dlse) : nullptr;
  params.dq = writable(gradients.dq);
  params.dk = writable(gradients.dk);
  params.dv = writable(gradients.dv);
  params.softmax_scale = float(args.softmax_scale);
  void* stream = nullptr;
  require(aoti_torch_get_current_cuda_stream(device, &stream), "read the current stream");
  launcher(params, stream);
}

Gradients run_backward(BackwardArguments& args) {
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
  Gradients gradients = allocate_gradients(call.forward);
  bool const has_queries = problem.batch > 0 && problem.heads_q > 0 && problem.seqlen_q > 0;
  if (has_queries && problem.seqlen_k > 0) {
    launch(args, call, params, gradients);
  } else {
    zero(gradients.dq);
    zero(gradients.dk);
    zero(gradients.dv);
  }
  return gradients;
}

}  // namespace

void bwd_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  expect_schema(kOp, {num_args, num_outputs}, {10, 3});
  BackwardArguments args = read_arguments(stack);
  Gradients gradients = run_backward(args);
  stack[0] = boxed(std::move(gradients.dq));
  stack[1] = boxed(std::move(gradients.dk));
  stack[2] = boxed(std::move(gradients.dv));
}

}  // namespace fa3
