// Attention on float8_e4m3fn on CUDA. As the general ops: no synchronisation, everything on the
// current stream of q's device.
#include <utility>

#include "dispatch/checks_fp8.h"
#include "dispatch/given_tensor.h"
#include "ops/general_launch.h"
#include "ops/library.h"

namespace fa3 {
namespace {

// What a user passed.
struct Fp8Forward {
  OwnedTensor scales[3];  // of q, k and v; null: 1
  bool float16_out = false;
  GeneralForward forward;
};

Fp8Forward read_arguments(StableIValue* stack, bool has_out) {
  BoxedStack stacked(stack);
  Fp8Forward args;
  GeneralForward& forward = args.forward;
  forward.q = stacked.tensor();
  forward.k = stacked.tensor();
  forward.v = stacked.tensor();
  forward.out = has_out ? stacked.tensor() : OwnedTensor();
  for (OwnedTensor& scale : args.scales) {
    scale = stacked.optional_tensor();
  }
  args.float16_out = has_out ? false : stacked.flag();
  forward.promote = stacked.flag();
  forward.general = GeneralArguments::read(stacked);
  forward.pack_gqa = stacked.pack_gqa();
  forward.sm_margin = stacked.integer();
  forward.wants_max_logits = stacked.flag();
  return args;
}

void set_out_dtype(Fp8Forward const& args, Fp8Call& call) {
  ForwardCall const& forward = call.general.forward;
  bool const is_half = forward.has_out ? forward.out.dtype == Dtype::kFloat16 : args.float16_out;
  call.out_dtype = is_half ? Dtype::kFloat16 : Dtype::kBFloat16;
  call.out_dtype_name = is_half ? "float16" : "bfloat16";
}

Fp8Call describe_call(Fp8Forward const& args) {
  Fp8Call call;
  call.general = describe_forward(args.forward);
  for (int i = 0; i < 3; ++i) {
    call.has_scale[i] = args.scales[i] != nullptr;
    if (call.has_scale[i]) {
      call.scales[i] = describe(args.scales[i]);
    }
  }
  set_out_dtype(args, call);
  call.wants_max_logits = args.forward.wants_max_logits;
  return call;
}

// Scales (batch, KV heads), or by block (batch, heads, blocks), whose first dimension is 1 with
// packed sequences. Without keys the kernels read no scale.
ScaleView scale_view(TensorMeta const& scale, bool is_packed) {
  bool const by_block = scale.rank == 3;
  ScaleView view;
  view.data = is_empty(scale) ? nullptr : reinterpret_cast<float const*>(scale.address);
  view.batch_stride = by_block && is_packed ? 0 : scale.stride[0];
  view.head_stride = scale.stride[1];
  view.block_stride = by_block ? scale.stride[2] : 0;
  view.by_kv_head = !by_block;
  return view;
}

GeneralResults run_fp8(Fp8Forward& args) {
  Fp8Call call = describe_call(args);
  ForwardCall& forward = call.general.forward;
  forward.sm_count = device_info_of(forward.q).sm_count;
  throw_if(check_fp8(call));
  FwdParams params;
  params.out_dtype = call.out_dtype;
  ScaleView* const views[] = {&params.q_scale, &params.k_scale, &params.v_scale};
  for (int i = 0; i < 3; ++i) {
    if (call.has_scale[i]) {
      *views[i] = scale_view(call.scales[i], call.general.is_packed);
    }
  }
  return run_general(forward.has_out ? "fwd_fp8_out" : "fwd_fp8", args.forward, call.general,
                     params);
}

void run_boxed(StableIValue* stack, bool has_out) {
  Fp8Forward args = read_arguments(stack, has_out);
  GeneralResults results = run_fp8(args);
  if (!has_out) {
    *stack++ = boxed(std::move(args.forward.out));
  }
  *stack++ = boxed(std::move(results.lse));
  *stack = boxed(std::move(results.max_logits));
}

constexpr uint64_t kScales = 3;
constexpr uint64_t kArguments = 3 + kScales + 2 + GeneralArguments::kCount + 3;

}  // namespace

void fwd_fp8_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  expect_schema("fwd_fp8", {num_args, num_outputs}, {kArguments, 3});
  run_boxed(stack, /*has_out=*/false);
}

void fwd_fp8_out_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  expect_schema("fwd_fp8_out", {num_args, num_outputs}, {kArguments, 2});
  run_boxed(stack, /*has_out=*/true);
}

}  // namespace fa3
