// The forward ops on CUDA: check, copy what TMA cannot address, allocate, plan, launch. Boxed by
// hand, since the host time of a call counts on small problems. No synchronisation;
// everything runs on the current stream of q's device, so a call can be captured in a CUDA graph.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>

#include <cmath>
#include <optional>
#include <stdexcept>
#include <utility>

#include "dispatch/checks.h"
#include "dispatch/device_info.h"
#include "ops/boxed_stack.h"
#include "ops/forward_launch.h"
#include "ops/library.h"

namespace fa3 {
namespace {

// What a user passed. The members are read off the stack in this order.
struct ForwardArguments {
  OwnedTensor q;
  OwnedTensor k;
  OwnedTensor v;
  OwnedTensor out;  // null: to be allocated
  std::optional<double> softmax_scale;
  bool causal;
  PackGqa pack_gqa;
  int64_t sm_margin;
};

ForwardArguments read_arguments(StableIValue* stack, bool has_out) {
  BoxedStack args(stack);
  return ForwardArguments{
      args.tensor(),        args.tensor(), args.tensor(),   has_out ? args.tensor() : OwnedTensor(),
      args.optional_real(), args.flag(),   args.pack_gqa(), args.integer()};
}

// head_dim ** -0.5, if none was given.
double softmax_scale(ForwardArguments const& args, TensorMeta const& q) {
  return args.softmax_scale ? *args.softmax_scale : 1 / std::sqrt(double(q.size[3]));
}

ForwardCall describe_call(ForwardArguments const& args) {
  ForwardCall call;
  call.q = describe(args.q);
  call.k = describe(args.k);
  call.v = describe(args.v);
  call.has_out = args.out != nullptr;
  if (call.has_out) {
    call.out = describe(args.out);
  }
  call.softmax_scale = softmax_scale(args, call.q);
  call.sm_margin = args.sm_margin;
  return call;
}

FwdProblem problem_of(ForwardCall const& call, ForwardArguments const& args,
                      DeviceInfo const& info) {
  FwdProblem problem;
  problem.dtype = call.q.dtype;
  problem.batch = int(call.q.size[0]);
  problem.seqlen_q = int(call.q.size[1]);
  problem.seqlen_k = int(call.k.size[1]);
  problem.heads_q = int(call.q.size[2]);
  problem.heads_k = int(call.k.size[2]);
  problem.head_dim = int(call.q.size[3]);
  problem.head_dim_v = int(call.v.size[3]);
  problem.set_dense(args.causal);
  problem.pack_gqa = args.pack_gqa;
  problem.sm_margin = int(args.sm_margin);
  problem.device = limits_of(info);
  return problem;
}

// Computes into args.out, which it allocates if it is null. Gives the LSE, or null if nobody wants
// it: an allocation costs a tenth of the host time of a call.
OwnedTensor run_forward(ForwardArguments& args, bool wants_lse) {
  ForwardCall call = describe_call(args);
  char const* const op = op_of(call);
  int const device = call.q.device_index;
  DeviceInfo const info = device_info_of(call.q);
  call.sm_count = info.sm_count;
  throw_if(check_forward(call));

  FwdParams params;
  params.problem = problem_of(call, args, info);
  ForwardLaunch launch(params);
  DeviceGuard const guard(device);
  int64_t const* const q_size = call.q.size;
  int64_t const out_size[] = {q_size[0], q_size[1], q_size[2], call.v.size[3]};
  int64_t const lse_size[] = {q_size[0], q_size[2], q_size[1]};
  if (!args.out) {
    args.out = allocate(op, out_size, 4, call.q.dtype, device);
  }
  OwnedTensor lse = wants_lse ? allocate(op, lse_size, 3, Dtype::kFloat32, device) : OwnedTensor();
  if (params.schedule.tiles == 0) {
    return lse;
  }
  if (params.problem.seqlen_k == 0) {
    require(aoti_torch_zero_(args.out.get()), "fill out");
    if (lse) {
      require(aoti_torch_aten_fill__Scalar(lse.get(), -INFINITY), "fill the LSE");
    }
    return lse;
  }
  params.q = readable(op, args.q, call.q);
  params.k = readable(op, args.k, call.k);
  params.v = readable(op, args.v, call.v);
  params.lse = lse ? static_cast<float*>(mutable_data(lse)) : nullptr;
  params.softmax_scale = float(call.softmax_scale);
  launch.run(op, params, args.out);
  return lse;
}

// What all ops of this file do. The results, in order: out unless it was given, the LSE if wanted.
void run_boxed(StableIValue* stack, bool has_out, bool wants_lse) {
  ForwardArguments args = read_arguments(stack, has_out);
  OwnedTensor lse = run_forward(args, wants_lse);
  if (!has_out) {
    *stack++ = boxed(std::move(args.out));
  }
  if (wants_lse) {
    *stack = boxed(std::move(lse));
  }
}

}  // namespace

void fwd_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  expect_schema("fwd", {num_args, num_outputs}, {7, 2});
  run_boxed(stack, /*has_out=*/false, /*wants_lse=*/true);
}

void fwd_traced_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  expect_schema("fwd", {num_args, num_outputs}, {8, 2});
  run_boxed(stack, /*has_out=*/false, /*wants_lse=*/true);
}

void fwd_no_lse_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  expect_schema("fwd", {num_args, num_outputs}, {7, 1});
  run_boxed(stack, /*has_out=*/false, /*wants_lse=*/false);
}

void fwd_out_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  expect_schema("fwd", {num_args, num_outputs}, {8, 1});
  run_boxed(stack, /*has_out=*/true, /*wants_lse=*/true);
}

void fwd_out_no_lse_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  expect_schema("fwd", {num_args, num_outputs}, {8, 0});
  run_boxed(stack, /*has_out=*/true, /*wants_lse=*/false);
}

}  // namespace fa3
