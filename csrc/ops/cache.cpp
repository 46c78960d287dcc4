// Attention on a cache on CUDA. No synchronisation; everything runs on the current stream of q's
// device.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "combine/combine.h"
#include "core/cache_keys.h"
#include "core/tree_mask.h"
#include "dispatch/cache_form.h"
#include "dispatch/checks_cache.h"
#include "dispatch/given_tensor.h"
#include "dispatch/plan_cache.h"
#include "dispatch/problem_of_call.h"
#include "dispatch/variants.h"
#include "ops/forward_launch.h"
#include "ops/general_launch.h"
#include "ops/library.h"
#include "schedule/counters.h"

namespace fa3 {
namespace {

constexpr char const* kOp = "attend_cache";

// (batch, heads, seqlen_q) or (heads, total_q); empty unless asked for.
OwnedTensor allocate_lse(AttentionCall const& call) {
  TensorMeta const& q = call.q;
  int64_t const packed[] = {q.size[1], q.size[0]};
  int64_t const dense[] = {q.size[0], q.size[2], q.size[1]};
  int64_t const nothing[] = {0};
  Dtype const wide = Dtype::kFloat32;
  if (!call.splits.return_lse) {
    return allocate(kOp, nothing, 1, wide, q.device_index);
  }
  return allocate(kOp, q.rank == 3 ? packed : dense, q.rank - 1, wide, q.device_index);
}

OwnedTensor allocate_out(AttentionCall const& call, Dtype dtype) {
  TensorMeta const& q = call.q;
  int64_t size[4];
  std::copy(q.size, q.size + q.rank, size);
  size[q.rank - 1] = call.v.size[call.v.rank - 1];
  return allocate(kOp, size, q.rank, dtype, q.device_index);
}

// (batch, heads_k), (pages, heads_k) or (pages, keys, blocks), whatever the strides.
ScaleView scale_view(std::optional<TensorMeta> const& scale) {
  ScaleView view;
  if (scale && !is_empty(*scale)) {
    view.data = reinterpret_cast<float const*>(scale->address);
    view.batch_stride = scale->stride[0];
    view.head_stride = scale->stride[1];
    view.block_stride = scale->rank == 3 && scale->size[2] > 1 ? scale->stride[2] : 0;
    view.by_kv_head = true;
  }
  return view;
}

void read_cache(CacheTensors& tensors, AttentionCall const& call, int capacity) {
  CacheArguments const& cache = call.cache;
  tensors.held = data_of<int>(cache.cache_seqlens);
  tensors.leftpad = data_of<int>(cache.cache_leftpad);
  tensors.new_starts = data_of<int>(cache.cu_seqlens_k_new);
  tensors.entry_of = data_of<int>(cache.cache_batch_idx);
  tensors.page_table = data_of<int>(cache.page_table);
  tensors.table_stride = cache.page_table ? cache.page_table->stride[0] : 0;
  tensors.held_by_all =
      cache.cache_length < 0 ? capacity : int(std::min<int64_t>(cache.cache_length, capacity));
  tensors.appended = int(std::min<int64_t>(cache.appended, capacity));
  tensors.first_slot = int(std::min<int64_t>(call.first.first_slot, capacity));
  if (call.tree.tree_mask) {
    TensorMeta const& tree = *call.tree.tree_mask;
    tensors.tree = reinterpret_cast<uint32_t const*>(tree.address);
    tensors.tree_stride = tree.rank == 3 ? tree.stride[0] / kTreeWords : 0;
  }
}

// How the parts of a launch become its results: a packed head is a batch entry, a query a row.
// columns: that a row of a part has.
CombineParams combine_params(FwdParams const& forward, int columns) {
  FwdProblem const& problem = forward.problem;
  CacheSchedule const& cache = forward.schedule.cache;
  int const pack = forward.schedule.pack;
  int const packed_heads = problem.heads_q / pack;
  int64_t const rows_of_head = int64_t(forward.schedule.m_tiles) * cache.rows;
  CombineParams params;
  CombineSource& parts = params.source[0];
  parts.data = forward.cache.parts;
  parts.lse = forward.cache.parts + cache.slots * cache.rows * columns;
  int64_t const part_rows[] = {rows_of_head, pack, 1};
  for (int i = 0; i < 3; ++i) {
    parts.lse_stride[i] = part_rows[i];
    parts.stride[i] = part_rows[i] * columns;
  }
  parts.stride[3] = 1;
  params.lse_part_stride = packed_heads * rows_of_head;
  params.part_stride = params.lse_part_stride * columns;
  params.parts = cache.parts_apart;
  params.columns = problem.head_dim_v;
  params.warps = problem.heads_q * problem.seqlen_q * params.column_blocks();
  params.by_blocks = FastDiv(params.column_blocks());
  params.by_heads = FastDiv(pack);
  params.by_rows = FastDiv(problem.seqlen_q);
  TensorView const& out = forward.o;
  params.out = out.data;
  params.out_dtype = forward.out_dtype;
  int64_t const strides[] = {pack * out.head_stride, out.row_stride, out.head_stride, 1};
  std::copy_n(strides, 4, params.out_stride);
  params.is_vector = (reinterpret_cast<uintptr_t>(out.data) % 8 | out.row_stride % 4 |
                      out.head_stride % 4 | problem.head_dim_v % 4) == 0;
  params.lse = forward.lse;
  params.lse_stride[0] = int64_t(pack) * problem.seqlen_q;
  params.lse_stride[1] = 1;
  params.lse_stride[2] = problem.seqlen_q;
  return params;
}

class CacheLaunch {
 public:
  CacheLaunch(ForwardCall& args, FwdParams& params) : args_(args), params_(params) {
    params.problem = problem_of_cache(args.call);
    plan_ = plan_cache(params.problem);
    require_built(plan_.variant);
    params.schedule = plan_.schedule;
  }

  void run(OwnedTensor const& out) {
    AttentionCall const& call = args_.call;
    int const device = call.q.device_index;
    void* stream = nullptr;
    require(aoti_torch_get_current_cuda_stream(device, &stream), "read the current stream");
    params_.q = readable(kOp, args_.q, with_batch(call.q));
    if (call.latent.qv) {
      params_.qv = readable(kOp, args_.qv, with_batch(*call.latent.qv));
    }
    params_.k = readable(kOp, args_.k, with_batch(call.k));
    params_.v = readable(kOp, args_.v, with_batch(call.v));
    params_.sinks = data_of<float>(call.score.sinks);
    params_.lengths = lengths_of(call);
    params_.softmax_scale = float(call.softmax_scale());
    params_.softcap = float(call.score.softcap);
    read_cache(params_.cache, call, params_.problem.cache.capacity);
    allocate_parts(device, stream);
    Target const target(kOp, out);
    params_.o = target.view();
    launch_variant(params_, plan_.variant, stream);
    if (params_.schedule.cache.parts_apart > 0) {
      launch_combine(combine_params(params_, kFwdVariants[plan_.variant].head_dim_v), stream);
    }
    target.finish();
  }

 private:
  // The buffers of the parts, and the counters of those that are complete.
  void allocate_parts(int device, void* stream) {
    FwdConfig const& config = kFwdVariants[plan_.variant];
    CacheSchedule const& cache = params_.schedule.cache;
    bool const is_latent = params_.problem.kind.is_latent;
    int64_t const part_floats = cache.slots * cache.rows * (config.head_dim_v + 2);
    int64_t const tile_floats = is_latent ? cache.slots * (kSharedTileBytes / 4) : 0;
    int64_t const floats = round_up(part_floats, 4) + tile_floats;
    int64_t const counters = is_latent ? 2 : 2 * cache.slots * config.consumer_warpgroups;
    bool const has_own_counters = counters > kLaunchCounters;
    int64_t const size = floats + (has_own_counters ? counters : 0);
    parts_ = allocate(kOp, &size, 1, Dtype::kFloat32, device);
    params_.cache.parts = static_cast<float*>(mutable_data(parts_));
    params_.cache.shared_tiles = params_.cache.parts + (floats - tile_floats);
    params_.cache.arrived = has_own_counters ? reinterpret_cast<int*>(params_.cache.parts + floats)
                                             : launch_counters(stream);
    if (has_own_counters) {
      clear_counters(params_.cache.arrived, counters, stream);
    }
  }

  ForwardCall& args_;
  FwdParams& params_;
  FwdPlan plan_;
  OwnedTensor parts_;
};

template <bool kHasOut>
void boxed_attend(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  constexpr int kArguments =
      CacheArguments::kCount + ScoreArguments::kCount + SplitArguments::kCount +
      FirstSlotArgument::kCount + LengthArguments::kCount + 2 + ScaleArguments::kCount +
      TreeArguments::kCount + ByPageArgument::kCount + LatentArgument::kCount + !kHasOut;
  expect_schema(kHasOut ? "attend_cache_out" : kOp, {num_args, num_outputs},
                {3 + kHasOut + kArguments, 2 - kHasOut});
  ForwardCall args(stack, kHasOut);
  AttentionCall& call = args.call;
  call.on_cache = true;
  args.args.read_groups(call.cache, call.score, call.splits, call.first, call.lengths);
  args.args.read(call.execution.pack_gqa);
  args.args.read(call.execution.sm_margin);
  args.args.read_groups(call.scales);
  args.args.read_groups(call.tree, call.by_page);
  args.read_qv();
  if (!kHasOut) {
    args.args.read(call.fp8.float16_out);
  }
  call.device = limits_of(device_info_of(call.q));
  throw_if(check_cache(call));
  FwdParams params;
  bool const is_fp8 = call.q.dtype == Dtype::kFloat8E4M3;
  params.out_dtype = kHasOut                          ? call.out->dtype
                     : is_fp8 && call.fp8.float16_out ? Dtype::kFloat16
                     : is_fp8                         ? Dtype::kBFloat16
                                                      : call.q.dtype;
  params.q_scale = scale_view(call.scales.q_descale);
  params.k_scale = scale_view(call.scales.k_descale);
  params.v_scale = scale_view(call.scales.v_descale);
  params.scales_by_page = call.by_page.descale_by_page;
  DeviceGuard const guard(call.q.device_index);
  OwnedTensor lse = allocate_lse(call);
  OwnedTensor out = kHasOut ? std::move(args.out) : allocate_out(call, params.out_dtype);
  params.lse = call.splits.return_lse ? static_cast<float*>(mutable_data(lse)) : nullptr;
  if (is_empty(call.k)) {
    require(aoti_torch_zero_(out.get()), "fill out");
    require(aoti_torch_aten_fill__Scalar(lse.get(), -INFINITY), "fill the LSE");
  } else if (!is_empty(call.q)) {
    CacheLaunch(args, params).run(out);
  }
  if (!kHasOut) {
    *stack++ = boxed(std::move(out));
  }
  *stack = boxed(std::move(lse));
}

constexpr BoxedOp kOps[] = {{"attend_cache", &boxed_attend<false>},
                            {"attend_cache_out", &boxed_attend<true>}};

}  // namespace

std::span<BoxedOp const> cache_ops() { return kOps; }

}  // namespace fa3
