// The general forward ops on CUDA: windows, chunks, softcap, sinks, row maxima, packed sequences.
// As the ops of forward.cpp: no synchronisation, everything on the current stream of q's device.
#include <utility>

#include "checks/checks.h"
#include "ops/general_launch.h"
#include "ops/library.h"

namespace fa3 {
namespace {

// The last argument of fwd_general, deterministic, is for the gradients.
template <bool kHasOut, int kUnread = 0>
void boxed_general(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  constexpr char const* kOp = kHasOut ? "fwd_general_out" : "fwd_general";
  constexpr int kArguments =
      LengthArguments::kCount + ScoreArguments::kCount + ExecutionArguments::kCount;
  expect_schema(kOp, {num_args, num_outputs}, {3 + kHasOut + kArguments + kUnread, 3 - kHasOut});
  ForwardCall args(stack, kHasOut);
  AttentionCall& call = args.call;
  args.args.read_groups(call.lengths, call.score, call.execution);
  call.device = limits_of(device_info_of(call.q));
  throw_if(check_forward(call));
  FwdParams params;
  params.out_dtype = call.q.dtype;
  GeneralResults results = run_general(kOp, args, params);
  if (!kHasOut) {
    *stack++ = boxed(std::move(args.out));
  }
  *stack++ = boxed(std::move(results.lse));
  *stack = boxed(std::move(results.max_logits));
}

constexpr BoxedOp kOps[] = {{"fwd_general", &boxed_general<false, 1>},
                            {"_fwd_general", &boxed_general<false>},
                            {"fwd_general_out", &boxed_general<true>}};

}  // namespace

std::span<BoxedOp const> general_ops() { return kOps; }

}  // namespace fa3
