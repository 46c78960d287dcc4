// The forward ops on CUDA: check, copy what TMA cannot address, allocate, plan, launch. Boxed by
// hand, since the host time of a call counts on small problems. No synchronisation;
// everything runs on the current stream of q's device, so a call can be captured in a CUDA graph.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>

#include <cmath>
#include <utility>

#include "checks/checks.h"
#include "call/device_info.h"
#include "plan/problem_of_call.h"
#include "ops/forward_call.h"
#include "ops/forward_launch.h"
#include "ops/library.h"

namespace fa3 {
namespace {

// Computes into args.out, which it allocates if it is null. Gives the LSE, or null if nobody wants
// it: an allocation costs a tenth of the host time of a call.
OwnedTensor run_forward(ForwardCall& args, bool wants_lse) {
  AttentionCall& call = args.call;
  char const* const op = call.op();
  int const device = call.q.device_index;
  call.device = limits_of(device_info_of(call.q));
  throw_if(check_forward(call));

  FwdParams params;
  params.problem = problem_of(call);
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
  params.softmax_scale = float(call.softmax_scale());
  launch.run(op, params, args.out);
  return lse;
}

// The schemas of the hot ops are short: each argument costs host time. The last argument of fwd,
// deterministic, is for the gradients.
constexpr int kScalars = 4;

// The results, in order: out unless it was given, the LSE if wanted.
template <bool kHasOut, bool kWantsLse, int kUnread = 0>
void boxed_forward(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  expect_schema("fwd", {num_args, num_outputs},
                {3 + kHasOut + kScalars + kUnread, !kHasOut + kWantsLse});
  ForwardCall args(stack, kHasOut);
  args.args.read(args.call.score.softmax_scale);
  args.args.read(args.call.score.causal);
  args.args.read(args.call.execution.pack_gqa);
  args.args.read(args.call.execution.sm_margin);
  OwnedTensor lse = run_forward(args, kWantsLse);
  if (!kHasOut) {
    *stack++ = boxed(std::move(args.out));
  }
  if (kWantsLse) {
    *stack = boxed(std::move(lse));
  }
}

constexpr BoxedOp kOps[] = {{"fwd", &boxed_forward<false, true, 1>},
                            {"_fwd", &boxed_forward<false, true>},
                            {"_fwd_no_lse", &boxed_forward<false, false>},
                            {"fwd_out", &boxed_forward<true, true>},
                            {"fwd_out_no_lse", &boxed_forward<true, false>}};

}  // namespace

std::span<BoxedOp const> forward_ops() { return kOps; }

}  // namespace fa3
