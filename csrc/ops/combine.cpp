// The op `combine` on CUDA: check, allocate the LSE, launch. No synchronisation; everything runs on
// the current stream of out_partial's device.
#include "combine/combine.h"

#include <algorithm>
#include <utility>

#include "dispatch/checks_combine.h"
#include "ops/boxed_stack.h"
#include "ops/cuda_call.h"
#include "ops/library.h"

namespace fa3 {
namespace {

constexpr char const* kOp = "combine";
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

CombineParams params_of(CombineCall const& call) {
  TensorMeta const& partial = call.out_partial;
  CombineParams params;
  params.partial = reinterpret_cast<float const*>(partial.address);
  std::copy_n(partial.stride, 5, params.partial_stride);
  params.part_lse = reinterpret_cast<float const*>(call.lse_partial.address);
  std::copy_n(call.lse_partial.stride, 4, params.lse_stride);
  std::copy_n(call.out.stride, 4, params.out_stride);
  params.out_dtype = call.out.dtype;
  params.parts = int(partial.size[0]);
  params.columns = int(partial.size[4]);
  params.is_vector = has_vectors(partial) && has_vectors(call.out);
  params.warps = int(partial.size[1] * partial.size[2] * partial.size[3]) * params.column_blocks();
  params.by_blocks = FastDiv(params.column_blocks());
  params.by_heads = FastDiv(max_of(1, int(partial.size[3])));
  params.by_rows = FastDiv(max_of(1, int(partial.size[2])));
  return params;
}

}  // namespace

void combine_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  expect_schema(kOp, {num_args, num_outputs}, {3, 1});
  BoxedStack args(stack);
  OwnedTensor const out_partial = args.tensor();
  OwnedTensor const lse_partial = args.tensor();
  OwnedTensor const out = args.tensor();
  CombineCall const call{describe(out_partial), describe(lse_partial), describe(out)};
  throw_if(check_combine(call));
  int const device = call.out_partial.device_index;
  DeviceGuard const guard(device);
  OwnedTensor lse = allocate(kOp, call.out.size, 3, Dtype::kFloat32, device);
  CombineParams params = params_of(call);
  if (params.warps > 0) {
    params.out = mutable_data(out);
    params.lse = static_cast<float*>(mutable_data(lse));
    void* stream = nullptr;
    require(aoti_torch_get_current_cuda_stream(device, &stream), "find the current stream");
    launch_combine(params, stream);
  }
  *stack = boxed(std::move(lse));
}

}  // namespace fa3
