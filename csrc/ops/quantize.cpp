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

struct Results {
  OwnedTensor values;
  OwnedTensor scales;
};

// How a tensor is quantised, beside its sequences.
struct Way {
  int64_t block;
  int64_t group;
  std::optional<int64_t> seed;
};

// Sequences of packed rows; null: x has a batch, all rows count.
struct Lists {
  OwnedTensor cu_seqlens;
  OwnedTensor seqused;
};

QuantizeCall describe_call(OwnedTensor const& x, Lists const& lists, Way const& way) {
  QuantizeCall call;
  call.x = describe(x);
  call.is_packed = lists.cu_seqlens != nullptr;
  call.has_seqused = lists.seqused != nullptr;
  if (call.is_packed) {
    call.cu_seqlens = describe(lists.cu_seqlens);
  }
  if (call.has_seqused) {
    call.seqused = describe(lists.seqused);
  }
  call.block = way.block;
  call.group = way.group;
  call.seed = way.seed;
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

// A tensor that is to be quantised, with all that its launch needs.
struct Job {
  OwnedTensor const& x;
  QuantizeCall call;
  QuantizeShape shape;
  Results results;
  OwnedTensor copy;    // null: the kernels read x
  OwnedTensor maxima;  // null: none are needed
  QuantizeParams params;
  QuantizePlan plan{};

  // Nothing but checks, so that several may be made before the first has results.
  Job(OwnedTensor const& x_, Lists const& lists, Way const& way)
      : x(x_), call(describe_call(x, lists, way)) {
    throw_if(check_quantize(call));
    shape = shape_of(call);
  }

  bool has_values() const { return !is_empty(call.x); }

  // Whether nothing but this launch is needed, which has no memory of its own.
  bool is_one_launch() const {
    return has_values() && copy == nullptr && plan.method == QuantizeMethod::kBlocks;
  }

  void allocate_results() {
    results = {allocate(kOp, call.x.size, call.x.rank, Dtype::kFloat8E4M3, call.x.device_index),
               allocate_scales(shape, call.x.device_index)};
  }

  void plan_launch(int sm_count) {
    copy = copy_unless_readable(x, call.x);
    params.shape = shape;
    params.dtype = call.x.dtype;
    params.x = view(with_batch(copy ? describe(copy) : call.x));
    params.values = static_cast<uint8_t*>(mutable_data(results.values));
    params.scales = static_cast<float*>(mutable_data(results.scales));
    params.cu_seqlens = reinterpret_cast<int const*>(call.cu_seqlens.address);
    params.seqused = reinterpret_cast<int const*>(call.seqused.address);
    params.is_rotated = call.seed.has_value();
    params.mixed_seed = mix(uint32_t(call.seed.value_or(0)));
    plan = plan_quantize(params, sm_count);
    if (plan.words > 0) {
      maxima = allocate(kOp, &plan.words, 1, Dtype::kFloat32, call.x.device_index);
      params.maxima = static_cast<uint32_t*>(mutable_data(maxima));
    }
  }

  void launch(int sm_count) {
    if (plan.method != QuantizeMethod::kBlocks && shape.block > 0 && shape.is_packed) {
      fill(results.scales, 1.0);
    }
    void* stream = nullptr;
    require(aoti_torch_get_current_cuda_stream(call.x.device_index, &stream),
            "find the current stream");
    launch_quantize(plan, params, sm_count, stream);
  }

  void fill_scales() { fill(results.scales, shape.block > 0 ? 1.0 : double(kScaleOfZeros)); }
};

// Tensors of one device. Where each takes one launch alone, no launch waits for the one before.
template <int kCount>
void run_jobs(Job (&jobs)[kCount]) {
  DeviceGuard const guard(jobs[0].call.x.device_index);
  int const sm_count = device_info_of(jobs[0].call.x).sm_count;
  bool are_independent = true;
  for (Job& job : jobs) {
    job.allocate_results();
    if (job.has_values()) {
      job.plan_launch(sm_count);
    }
    are_independent = are_independent && job.is_one_launch();
  }
  for (int i = 0; i < kCount; ++i) {
    if (!jobs[i].has_values()) {
      jobs[i].fill_scales();
      continue;
    }
    jobs[i].params.follows = are_independent && i > 0;
    jobs[i].params.is_followed = are_independent && i + 1 < kCount;
    jobs[i].launch(sm_count);
  }
}

// Gives where the next results go.
StableIValue* put_results(Job& job, StableIValue* stack) {
  *stack++ = boxed(std::move(job.results.values));
  *stack++ = boxed(std::move(job.results.scales));
  return stack;
}

int64_t heads_of(OwnedTensor const& x) {
  TensorMeta const meta = describe(x);
  return meta.rank < 2 ? 0 : meta.size[meta.rank - 2];
}

}  // namespace

// The arguments are read off the stack in the order of the schema.
void quantize_fp8_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  expect_schema(kOp, {num_args, num_outputs}, {6, 2});
  BoxedStack args(stack);
  OwnedTensor const x = args.tensor();
  Lists const lists{args.optional_tensor(), args.optional_tensor()};
  Way const way{args.integer(), args.integer(), args.optional_integer()};
  Job jobs[] = {Job(x, lists, way)};
  run_jobs(jobs);
  put_results(jobs[0], stack);
}

void quantize_qkv_fp8_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  expect_schema(kOp, {num_args, num_outputs}, {10, 6});
  BoxedStack args(stack);
  OwnedTensor const q = args.tensor();
  OwnedTensor const k = args.tensor();
  OwnedTensor const v = args.tensor();
  Lists const of_q{args.optional_tensor(), args.optional_tensor()};
  Lists const of_k{args.optional_tensor(), args.optional_tensor()};
  int64_t const q_block = args.integer();
  int64_t const kv_block = args.integer();
  std::optional<int64_t> const seed = args.optional_integer();
  int64_t const group = heads_of(q) / std::max<int64_t>(1, heads_of(k));
  // K, which takes longest, comes first: its last CTAs run beside the first ones of Q.
  Job jobs[] = {Job(k, of_k, Way{kv_block, 1, seed}), Job(q, of_q, Way{q_block, group, seed}),
                Job(v, of_k, Way{kv_block, 1, std::nullopt})};
  run_jobs(jobs);
  stack = put_results(jobs[1], stack);
  stack = put_results(jobs[0], stack);
  put_results(jobs[2], stack);
}

}  // namespace fa3
