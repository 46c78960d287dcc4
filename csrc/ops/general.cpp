// The general forward ops on CUDA: windows, chunks, softcap, sinks, row maxima, packed sequences.
// As the ops of forward.cpp: no synchronisation, everything on the current stream of q's device.
#include <utility>

#include "ops/general_launch.h"
#include "ops/library.h"

namespace fa3 {
namespace {

// The members are read off the stack in this order; deterministic, which the traced op has at the
// end, is for the gradients.
GeneralForward read_arguments(StableIValue* stack, bool has_out) {
  BoxedStack args(stack);
  return GeneralForward{args.tensor(),
                        args.tensor(),
                        args.tensor(),
                        has_out ? args.tensor() : OwnedTensor(),
                        GeneralArguments::read(args),
                        args.pack_gqa(),
                        args.integer(),
                        args.flag()};
}

void run_boxed(StableIValue* stack, bool has_out) {
  GeneralForward args = read_arguments(stack, has_out);
  GeneralCall call = describe_forward(args);
  call.forward.sm_count = device_info_of(call.forward.q).sm_count;
  throw_if(check_general(call));
  FwdParams params;
  params.out_dtype = call.forward.q.dtype;
  GeneralResults results =
      run_general(has_out ? "fwd_general_out" : "fwd_general", args, call, params);
  if (!has_out) {
    *stack++ = boxed(std::move(args.out));
  }
  *stack++ = boxed(std::move(results.lse));
  *stack = boxed(std::move(results.max_logits));
}

constexpr uint64_t kArguments = 3 + GeneralArguments::kCount + 3;

}  // namespace

void fwd_general_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  expect_schema("fwd_general", {num_args, num_outputs}, {kArguments, 3});
  run_boxed(stack, /*has_out=*/false);
}

void fwd_general_traced_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  expect_schema("fwd_general", {num_args, num_outputs}, {kArguments + 1, 3});
  run_boxed(stack, /*has_out=*/false);
}

void fwd_general_out_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  expect_schema("fwd_general_out", {num_args, num_outputs}, {kArguments + 1, 2});
  run_boxed(stack, /*has_out=*/true);
}

}  // namespace fa3
