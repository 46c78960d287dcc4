// The ops `combine` and `merge_parts` on CUDA: check, allocate the LSE, launch. No synchronisation;
// everything runs on the current stream of the device of out.
#include "combine/combine.h"

#include <algorithm>
#include <utility>

#include "checks/checks.h"
#include "ops/boxed_stack.h"
#include "ops/cuda_call.h"
#include "ops/library.h"
#include "ops/merge.h"

namespace fa3 {
namespace {

constexpr int kVector = 4;  // columns

// Whether the rows of a tensor are made of aligned vectors of four columns.
bool has_vectors(TensorMeta const& meta) {
  int64_t const bytes = kVector * (meta.dtype == Dtype::kFloat32 ? 4 : 2);
  int const columns = meta.rank - 1;
  bool fine =
      meta.address % bytes == 0 && meta.size[columns] % kVector == 0 && meta.stride[columns] == 1;
  for (int i = 0; i < columns; ++i) {
    fine = fine && (meta.size[i] <= 1 || meta.stride[i] % kVector == 0);
  }
  return fine;
}

// A part, (batch, row, head, column), with its LSE, (batch, row, head).
CombineSource source_of(TensorMeta const& part, TensorMeta const& lse) {
  CombineSource source;
  source.data = reinterpret_cast<void const*>(part.address);
  source.lse = reinterpret_cast<float const*>(lse.address);
  std::copy_n(part.stride, 4, source.stride);
  std::copy_n(lse.stride, 3, source.lse_stride);
  return source;
}

// One of a stack.
TensorMeta without_parts(TensorMeta const& stack) {
  TensorMeta part = stack;
  part.rank = stack.rank - 1;
  std::copy_n(stack.size + 1, part.rank, part.size);
  std::copy_n(stack.stride + 1, part.rank, part.stride);
  return part;
}

// What both ops share. out: (batch, rows, heads, head_dim).
void set_output(CombineParams& params, TensorMeta const& out) {
  std::copy_n(out.stride, 4, params.out_stride);
  params.out_dtype = out.dtype;
  params.columns = int(out.size[3]);
  params.warps = int(out.size[0] * out.size[1] * out.size[2]) * params.column_blocks();
  params.by_blocks = FastDiv(params.column_blocks());
  params.by_heads = FastDiv(max_of(1, int(out.size[2])));
  params.by_rows = FastDiv(max_of(1, int(out.size[1])));
}

CombineParams params_of(CombineCall const& call) {
  CombineParams params;
  set_output(params, call.out);
  params.source[0] = source_of(without_parts(call.out_partial), without_parts(call.lse_partial));
  params.part_stride = call.out_partial.stride[0];
  params.lse_part_stride = call.lse_partial.stride[0];
  params.dtype = call.out_partial.dtype;
  params.parts = int(call.out_partial.size[0]);
  params.is_vector = has_vectors(call.out_partial) && has_vectors(call.out);
  // (batch, rows, heads), contiguous.
  params.lse_stride[2] = 1;
  params.lse_stride[1] = call.out.size[2];
  params.lse_stride[0] = call.out.size[1] * call.out.size[2];
  return params;
}

CombineParams params_of(MergeCall const& call) {
  TensorMeta const out = with_batch(call.out);
  CombineParams params;
  set_output(params, out);
  params.is_stack = false;
  params.dtype = out.dtype;
  params.parts = call.parts();
  params.is_vector = has_vectors(out);
  for (int i = 0; i < params.parts; ++i) {
    TensorMeta const part = rows_like(*call.part[i], out);
    params.source[i] = source_of(part, lse_like(*call.lse[i], out));
    params.is_vector = params.is_vector && has_vectors(part);
  }
  // (batch, heads, rows), contiguous.
  params.lse_stride[1] = 1;
  params.lse_stride[2] = out.size[1];
  params.lse_stride[0] = out.size[1] * out.size[2];
  return params;
}

void launch(CombineParams& params, OwnedTensor const& out, OwnedTensor const& lse, int device) {
  if (params.warps > 0) {
    params.out = mutable_data(out);
    params.lse = static_cast<float*>(mutable_data(lse));
    void* stream = nullptr;
    require(aoti_torch_get_current_cuda_stream(device, &stream), "find the current stream");
    launch_combine(params, stream);
  }
}

}  // namespace

void launch_merge(MergeCall const& call, OwnedTensor const& out, OwnedTensor const& lse) {
  CombineParams params = params_of(call);
  launch(params, out, lse, call.out.device_index);
}

void combine_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  expect_schema("combine", {num_args, num_outputs}, {3, 1});
  BoxedStack args(stack);
  OwnedTensor const out_partial = args.tensor();
  OwnedTensor const lse_partial = args.tensor();
  OwnedTensor const out = args.tensor();
  CombineCall const call{describe(out_partial), describe(lse_partial), describe(out)};
  throw_if(check_combine(call));
  int const device = call.out_partial.device_index;
  DeviceGuard const guard(device);
  OwnedTensor lse = allocate("combine", call.out.size, 3, Dtype::kFloat32, device);
  CombineParams params = params_of(call);
  launch(params, out, lse, device);
  *stack = boxed(std::move(lse));
}

void merge_parts_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  constexpr char const* kOp = "merge_parts";
  constexpr int kMost = MergeCall::kMost;
  static_assert(kMost == kMostMergedParts);
  expect_schema(kOp, {num_args, num_outputs}, {1 + 2 * kMost, 1});
  BoxedStack args(stack);
  OwnedTensor const out = args.tensor();
  OwnedTensor kept[2 * kMost];
  MergeCall call;
  call.out = describe(out);
  for (int i = 0; i < 2 * kMost; ++i) {
    kept[i] = i < 4 ? args.tensor() : args.optional_tensor();
    if (kept[i]) {
      (i % 2 == 0 ? call.part : call.lse)[i / 2] = describe(kept[i]);
    }
  }
  throw_if(check_merge(call));
  int const device = call.out.device_index;
  DeviceGuard const guard(device);
  TensorMeta const& meta = call.out;
  int64_t const packed[] = {meta.size[1], meta.size[0]};
  int64_t const dense[] = {meta.size[0], meta.size[2], meta.size[1]};
  OwnedTensor lse =
      allocate(kOp, meta.rank == 3 ? packed : dense, meta.rank - 1, Dtype::kFloat32, device);
  launch_merge(call, out, lse);
  *stack = boxed(std::move(lse));
}

}  // namespace fa3
