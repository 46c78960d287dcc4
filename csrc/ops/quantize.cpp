// quantize_fp8 on CUDA: check, copy what the kernels cannot read, allocate, launch. No
// synchronisation; everything runs on the current stream of x's device.
#include "quantize/quantize.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>

#include <algorithm>
#include <utility>

#include "dispatch/checks_quantize.h"
#include "dispatch/device_info.h"
#include "dispatch/given_tensor.h"
#include "ops/boxed_stack.h"
#include "ops/cuda_call.h"
#include "ops/library.h"

namespace fa3 {
namespace {

constexpr char const* kOp = "quantize_fp8";
constexpr float kScaleOfZeros = 0x1p-64f / 448.f;

// What a user passed. The members are read off the stack in this order.
struct Arguments {
  OwnedTensor x;
  OwnedTensor cu_seqlens;  // null: x has a batch
  OwnedTensor seqused;     // null: all rows count
  int64_t block;
  int64_t group;
  std::optional<int64_t> seed;

  static Arguments read(BoxedStack args) {
    return Arguments{args.tensor(),  args.optional_tensor(), args.optional_tensor(),
                     args.integer(), args.integer(),         args.optional_integer()};
  }
};

struct Results {
  OwnedTensor values;
  OwnedTensor scales;
};

QuantizeCall describe_call(Arguments const& args) {
  QuantizeCall call;
  call.x = describe(args.x);
  call.is_packed = args.cu_seqlens != nullptr;
  call.has_seqused = args.seqused != nullptr;
  if (call.is_packed) {
    call.cu_seqlens = describe(args.cu_seqlens);
  }
  if (call.has_seqused) {
    call.seqused = describe(args.seqused);
  }
  call.block = args.block;
  call.group = args.group;
  call.seed = args.seed;
  return call;
}

QuantizeShape shape_of(QuantizeCall const& call) {
  TensorMeta const x = with_batch(call.x);
  QuantizeShape shape;
  shape.is_packed = call.is_packed;
  shape.batch = int(call.is_packed ? call.cu_seqlens.size[0] - 1 : x.size[0]);
  shape.rows = int(x.size[1]);
  shape.heads = int(x.size[2]);
  shape.head_dim = int(x.size[3]);
  shape.group = int(call.group);
  shape.block = int(call.block);
  return shape;
}

OwnedTensor allocate_scales(QuantizeShape const& shape, int device) {
  if (shape.block == kScalePerTensor) {
    int64_t const sizes[] = {1, 1};
    return allocate(kOp, sizes, 2, Dtype::kFloat32, device);
  }
  if (shape.block == kScalePerHead) {
    int64_t const sizes[] = {shape.batch, shape.heads / shape.group};
    return allocate(kOp, sizes, 2, Dtype::kFloat32, device);
  }
  int64_t const dense[] = {shape.batch, shape.heads, ceil_div(shape.rows, shape.block)};
  int64_t const packed[] = {1, shape.heads, shape.places(shape.block)};
  return allocate(kOp, shape.is_packed ? packed : dense, 3, Dtype::kFloat32, device);
}

void fill(OwnedTensor const& tensor, double value) {
  require(aoti_torch_aten_fill__Scalar(tensor.get(), value), "fill a result");
}

// A tensor whose rows the kernels can load: as it is, or a copy.
OwnedTensor copy_unless_readable(OwnedTensor const& x, TensorMeta const& meta) {
  int64_t const bytes = meta.dtype == Dtype::kFloat32 ? 4 : 2;
  int const columns = meta.rank - 1;
  bool fine = meta.address % 16 == 0 && (meta.size[columns] == 1 || meta.stride[columns] == 1);
  for (int i = 0; i < columns; ++i) {
    fine = fine && (meta.size[i] == 1 || meta.stride[i] * bytes % 16 == 0);
  }
  return fine ? OwnedTensor() : packed_copy(kOp, x, meta);
}

void launch(Arguments const& args, QuantizeCall const& call, QuantizeShape const& shape,
            Results const& results) {
  int const device = call.x.device_index;
  OwnedTensor const copy = copy_unless_readable(args.x, call.x);
  QuantizeParams params;
  params.shape = shape;
  params.dtype = call.x.dtype;
  params.x = view(with_batch(copy ? describe(copy) : call.x));
  params.values = static_cast<uint8_t*>(mutable_data(results.values));
  params.scales = static_cast<float*>(mutable_data(results.scales));
  params.cu_seqlens = reinterpret_cast<int const*>(call.cu_seqlens.address);
  params.seqused = reinterpret_cast<int const*>(call.seqused.address);
  params.is_rotated = call.seed.has_value();
  params.mixed_seed = mix(uint32_t(call.seed.value_or(0)));
  int const sm_count = device_info_of(call.x).sm_count;
  QuantizePlan const plan = plan_quantize(params, sm_count);
  OwnedTensor maxima;
  if (plan.words > 0) {
    maxima = allocate(kOp, &plan.words, 1, Dtype::kFloat32, device);
    params.maxima = static_cast<uint32_t*>(mutable_data(maxima));
  }
  if (plan.method != QuantizeMethod::kBlocks && shape.block > 0 && shape.is_packed) {
    fill(results.scales, 1.0);
  }
  void* stream = nullptr;
  require(aoti_torch_get_current_cuda_stream(device, &stream), "find the current stream");
  launch_quantize(plan, params, sm_count, stream);
}

Results run_quantize(Arguments const& args) {
  QuantizeCall const call = describe_call(args);
  throw_if(check_quantize(call));
  QuantizeShape const shape = shape_of(call);
  int const device = call.x.device_index;
  DeviceGuard const guard(device);
  Results results{allocate(kOp, call.x.size, call.x.rank, Dtype::kFloat8E4M3, device),
                  allocate_scales(shape, device)};
  if (is_empty(call.x)) {
    fill(results.scales, shape.block > 0 ? 1.0 : double(kScaleOfZeros));
  } else {
    launch(args, call, shape, results);
  }
  return results;
}

}  // namespace

void quantize_fp8_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  expect_schema(kOp, {num_args, num_outputs}, {6, 2});
  Results results = run_quantize(Arguments::read(BoxedStack(stack)));
  *stack++ = boxed(std::move(results.values));
  *stack = boxed(std::move(results.scales));
}

}  // namespace fa3
