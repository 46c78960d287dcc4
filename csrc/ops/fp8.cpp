// Attention on float8_e4m3fn on CUDA. As the general ops: no synchronisation, everything on the
// current stream of q's device.
#include <utility>

#include "checks/checks.h"
#include "call/given_tensor.h"
#include "ops/general_launch.h"
#include "ops/library.h"

namespace fa3 {
namespace {

// Scales (batch, KV heads), or by block (batch, heads, blocks), whose first dimension is 1 with
// packed sequences. Without keys the kernels read no scale.
ScaleView scale_view(std::optional<TensorMeta> const& given, bool is_packed) {
  if (!given) {
    return {};
  }
  TensorMeta const& scale = *given;
  bool const by_block = scale.rank == 3;
  ScaleView view;
  view.data = is_empty(scale) ? nullptr : reinterpret_cast<float const*>(scale.address);
  view.batch_stride = by_block && is_packed ? 0 : scale.stride[0];
  view.head_stride = scale.stride[1];
  view.block_stride = by_block ? scale.stride[2] : 0;
  view.by_kv_head = !by_block;
  return view;
}

template <bool kHasOut>
void boxed_fp8(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  constexpr char const* kOp = kHasOut ? "fwd_fp8_out" : "fwd_fp8";
  // With out, its dtype stands for float16_out.
  constexpr int kArguments = ScaleArguments::kCount + Fp8Arguments::kCount +
                             LengthArguments::kCount + ScoreArguments::kCount +
                             ExecutionArguments::kCount;
  expect_schema(kOp, {num_args, num_outputs}, {3 + kArguments, 3 - kHasOut});
  ForwardCall args(stack, kHasOut);
  AttentionCall& call = args.call;
  args.args.read_groups(call.scales);
  if (!kHasOut) {
    args.args.read(call.fp8.float16_out);
  }
  args.args.read(call.fp8.promote);
  args.args.read_groups(call.lengths, call.score, call.execution);
  call.device = limits_of(device_info_of(call.q));
  throw_if(check_fp8(call));
  FwdParams params;
  params.out_dtype = call.fp8_out_dtype();
  params.q_scale = scale_view(call.scales.q_descale, call.is_packed());
  params.k_scale = scale_view(call.scales.k_descale, call.is_packed());
  params.v_scale = scale_view(call.scales.v_descale, call.is_packed());
  GeneralResults results = run_general(kOp, args, params);
  if (!kHasOut) {
    *stack++ = boxed(std::move(args.out));
  }
  *stack++ = boxed(std::move(results.lse));
  *stack = boxed(std::move(results.max_logits));
}

constexpr BoxedOp kOps[] = {{"fwd_fp8", &boxed_fp8<false>}, {"fwd_fp8_out", &boxed_fp8<true>}};

}  // namespace

std::span<BoxedOp const> fp8_ops() { return kOps; }

}  // namespace fa3
