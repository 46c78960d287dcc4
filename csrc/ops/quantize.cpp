// quantize_fp8 on CUDA: check, copy what the kernels cannot read, allocate, launch. No
// synchronisation; everything runs on the current stream of x's device.
#include "quantize/quantize.h"

#include <algorithm>
#include <utility>

#include "attention_ops.h"
#include "checks/checks.h"
#include "call/given_tensor.h"
#include "ops/boxed_stack.h"
#include "ops/cuda_call.h"
#include "ops/library.h"

namespace fa3 {
namespace {

constexpr char const* kOp = ops::quantize_fp8::kName;
constexpr float kScaleOfZeros = 0x1p-64f / 448.f;

// The sequences of packed rows; null: x has a batch, and all rows count.
struct Lists {
  OwnedTensor const& cu_seqlens;
  OwnedTensor const& seqused;
};

struct Granularity {
  int64_t block;
  int64_t group;
};

QuantizeCall describe_call(OwnedTensor const& x, Lists const& lists, Granularity granularity,
                           std::optional<int64_t> seed) {
  QuantizeCall call;
  call.x = describe(x);
  describe_if(lists.cu_seqlens, call.cu_seqlens);
  describe_if(lists.seqused, call.seqused);
  call.block = granularity.block;
  call.group = granularity.group;
  call.seed = seed;
  return call;
}

QuantizeShape shape_of(QuantizeCall const& call) {
  TensorMeta const x = with_batch(call.x);
  QuantizeShape shape;
  shape.is_packed = bool(call.cu_seqlens);
  shape.batch = int(call.cu_seqlens ? call.cu_seqlens->size[0] - 1 : x.size[0]);
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
  int64_t const packed[] = {1, shape.heads, shape.packed_blocks()};
  return allocate(kOp, shape.is_packed ? packed : dense, 3, Dtype::kFloat32, device);
}

// A tensor that is to be quantised, with all that its launch needs.
class Job {
  OwnedTensor const& x_;
  QuantizeCall call_;
  QuantizeShape shape_;
  OwnedTensor values_;
  OwnedTensor scales_;
  OwnedTensor copy_;    // null: the kernels read x
  OwnedTensor maxima_;  // null: none are needed

 public:
  // Only checks, so that all jobs of a call are checked before the first one allocates.
  Job(OwnedTensor const& x, Lists const& lists, Granularity granularity,
      std::optional<int64_t> seed)
      : x_(x), call_(describe_call(x, lists, granularity, seed)) {
    throw_if(check_quantize(call_));
    shape_ = shape_of(call_);
  }

  void run() {
    int const device = call_.x.device_index;
    DeviceGuard const guard(device);
    values_ = allocate(kOp, call_.x.size, call_.x.rank, Dtype::kFloat8E4M3, device);
    scales_ = allocate_scales(shape_, device);
    if (is_empty(call_.x)) {
      return fill(scales_, shape_.block > 0 ? 1.0 : double(kScaleOfZeros));
    }
    launch_quantize(make_params(), current_stream(device));
  }

  OwnedTensor take_values() { return std::move(values_); }
  OwnedTensor take_scales() { return std::move(scales_); }

 private:
  QuantizeParams make_params() {
    copy_ = has_chunks(call_.x) ? OwnedTensor() : packed_copy(kOp, x_, call_.x);
    QuantizeParams params;
    params.shape = shape_;
    params.dtype = call_.x.dtype;
    params.x = view(with_batch(copy_ ? describe(copy_) : call_.x));
    params.values = static_cast<uint8_t*>(mutable_data(values_));
    params.scales = static_cast<float*>(mutable_data(scales_));
    params.cu_seqlens = data_of<int>(call_.cu_seqlens);
    params.seqused = data_of<int>(call_.seqused);
    params.is_rotated = call_.seed.has_value();
    params.mixed_seed = mix(uint32_t(call_.seed.value_or(0)));
    if (int64_t const words = maxima_of(shape_); words > 0) {
      maxima_ = allocate(kOp, &words, 1, Dtype::kFloat32, call_.x.device_index);
      fill(maxima_, 0.0);
      params.maxima = static_cast<uint32_t*>(mutable_data(maxima_));
    }
    return params;
  }
};

int64_t heads_of(OwnedTensor const& x) {
  TensorMeta const meta = describe(x);
  return meta.rank < 2 ? 0 : meta.size[meta.rank - 2];
}

void boxed_quantize(StableIValue* stack, uint64_t, uint64_t) {
  struct {
    OwnedTensor values;
    OwnedTensor scales;
  } results;
  BoxedStack values(stack);
  ops::quantize_fp8 args;
  args.read(values);
  Job job(args.x, {args.cu_seqlens, args.seqused}, {args.block, args.group}, args.rotation_seed);
  job.run();
  results = {job.take_values(), job.take_scales()};
  ops::quantize_fp8::box(stack, results);
}

void boxed_quantize_qkv(StableIValue* stack, uint64_t, uint64_t) {
  struct {
    OwnedTensor q, q_scales, k, k_scales, v, v_scales;
  } results;
  BoxedStack values(stack);
  ops::quantize_qkv_fp8 args;
  args.read(values);
  Lists const of_q{args.cu_seqlens_q, args.seqused_q};
  Lists const of_k{args.cu_seqlens_k, args.seqused_k};
  int64_t const group = heads_of(args.q) / std::max<int64_t>(1, heads_of(args.k));
  Job q(args.q, of_q, {args.q_block, group}, args.rotation_seed);
  Job k(args.k, of_k, {args.kv_block, 1}, args.rotation_seed);
  Job v(args.v, of_k, {args.kv_block, 1}, std::nullopt);
  for (Job* job : {&q, &k, &v}) {
    job->run();
  }
  results = {q.take_values(), q.take_scales(), k.take_values(),
             k.take_scales(), v.take_values(), v.take_scales()};
  ops::quantize_qkv_fp8::box(stack, results);
}

constexpr BoxedOp kOps[] = {{ops::quantize_fp8::kName, &boxed_quantize},
                            {ops::quantize_qkv_fp8::kName, &boxed_quantize_qkv}};

}  // namespace

std::span<BoxedOp const> quantize_ops() { return kOps; }

}  // namespace fa3
