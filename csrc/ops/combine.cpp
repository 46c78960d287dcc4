// The op `combine` on CUDA: check, allocate the LSE, launch. No synchronisation; everything runs on
// the current stream of the device of out.
#include "combine/combine.h"

#include <algorithm>
#include <utility>

#include "attention_ops.h"
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
  return meta.size[meta.rank - 1] % kVector == 0 &&
         has_chunks(meta, kVector * bytes_of(meta.dtype));
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

// What stacks and separate results share. out: (batch, rows, heads, head_dim).
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
  params.parts = call.parts() + call.stacked - 1;
  params.stacked = call.stacked;
  params.part_stride = call.part_stride;
  params.lse_part_stride = call.lse_part_stride;
  params.is_vector = has_vectors(out);
  for (int i = 0; i < call.parts(); ++i) {
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
    launch_combine(params, current_stream(device));
  }
}

// Stacks of results: the LSE is (batch, rows, heads), as those of the stack.
OwnedTensor combine_stack(ops::combine const& args) {
  CombineCall const call{describe(args.out_0), describe(args.lse_0), describe(args.out)};
  throw_if(check_combine(call));
  int const device = call.out.device_index;
  DeviceGuard const guard(device);
  OwnedTensor lse = allocate(args.kName, call.out.size, 3, Dtype::kFloat32, device);
  CombineParams params = params_of(call);
  launch(params, args.out, lse, device);
  return lse;
}

// Results that are tensors of their own: the LSE is (batch, heads, rows) or (heads, rows), as
// theirs.
OwnedTensor combine_apart(ops::combine const& args) {
  static_assert(MergeCall::kMost == kMostMergedParts);
  OwnedTensor const* const parts[] = {&args.out_0, &args.out_1, &args.out_2, &args.out_3};
  OwnedTensor const* const lses[] = {&args.lse_0, &args.lse_1, &args.lse_2, &args.lse_3};
  MergeCall call;
  call.out = describe(args.out);
  for (int i = 0; i < MergeCall::kMost; ++i) {
    describe_if(*parts[i], call.part[i]);
    describe_if(*lses[i], call.lse[i]);
  }
  throw_if(check_merge(call));
  TensorMeta const& out = call.out;
  DeviceGuard const guard(out.device_index);
  OwnedTensor lse = allocate_rows(args.kName, out);
  launch_merge(call, args.out, lse);
  return lse;
}

void boxed_combine(StableIValue* stack, uint64_t, uint64_t) {
  struct {
    OwnedTensor lse;
  } results;
  BoxedStack values(stack);
  ops::combine args;
  args.read(values);
  bool const is_apart =
      args.out_1 || args.lse_1 || args.out_2 || args.lse_2 || args.out_3 || args.lse_3;
  results.lse = is_apart ? combine_apart(args) : combine_stack(args);
  ops::combine::box(stack, results);
}

constexpr BoxedOp kOps[] = {{ops::combine::kName, &boxed_combine}};

}  // namespace

std::span<BoxedOp const> combine_ops() { return kOps; }

void launch_merge(MergeCall const& call, OwnedTensor const& out, OwnedTensor const& lse) {
  CombineParams params = params_of(call);
  launch(params, out, lse, call.out.device_index);
}

}  // namespace fa3
