// How attention on a cache is launched: views, buffers of partial results, counters.
#include "ops/cache_launch.h"

#include <algorithm>

#include "combine/combine.h"
#include "core/cache_keys.h"
#include "core/tree_mask.h"
#include "call/given_tensor.h"
#include "plan/plan_cache.h"
#include "plan/problem_of_call.h"
#include "plan/variants.h"
#include "ops/forward_launch.h"
#include "ops/general_launch.h"
#include "schedule/counters.h"

namespace fa3 {
namespace {

constexpr char const* kOp = "attend_cache";

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
  tensors.first_slot = int(std::min<int64_t>(call.prefix.shared_prefix, capacity));
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

}  // namespace

CacheLaunch::CacheLaunch(AttentionCall const& call, CacheInputs const& inputs,
                         CacheOutputs const& outputs, void* stream)
    : target_(kOp, outputs.out) {
  FwdParams params;
  params.out_dtype = outputs.dtype;
  params.lse = outputs.lse ? static_cast<float*>(mutable_data(outputs.lse)) : nullptr;
  params.q_scale = scale_view(call.scales.q_descale);
  params.k_scale = scale_view(call.scales.k_descale);
  params.v_scale = scale_view(call.scales.v_descale);
  params.scales_by_page = call.by_page.descale_by_page;
  params.q = readable(kOp, inputs.q, with_batch(call.q));
  if (call.latent.qv) {
    params.qv = readable(kOp, inputs.qv, with_batch(*call.latent.qv));
  }
  params.k = readable(kOp, inputs.k, with_batch(call.k));
  params.v = readable(kOp, inputs.v, with_batch(call.v));
  params.sinks = data_of<float>(call.score.sinks);
  params.lengths = lengths_of(call);
  params.softmax_scale = float(call.softmax_scale());
  params.softcap = float(call.score.softcap);
  FwdProblem const problem = problem_of_cache(call);
  read_cache(params.cache, call, problem.cache.capacity);
  params.o = target_.view();
  int64_t counters = 0;
  for (FwdProblem const& of_launch : launches_of_cache(problem)) {
    Launch& launch = launches_.emplace_back(Launch{params, plan_cache(of_launch), {}});
    require_built(launch.plan.variant);
    launch.params.problem = of_launch;
    launch.params.schedule = launch.plan.schedule;
    counters += launch.allocate_parts(call.q.device_index, counters, stream);
  }
}

// Allocates the buffers of the parts and their counters. The counters of the stream are used if
// enough are left; `used` of them belong to earlier launches of the call. Returns how many counters
// the launch needs.
int64_t CacheLaunch::Launch::allocate_parts(int device, int64_t used, void* stream) {
  FwdConfig const& config = kFwdVariants[plan.variant];
  CacheSchedule const& cache = params.schedule.cache;
  bool const is_latent = params.problem.kind.is_latent;
  int64_t const part_floats = cache.slots * cache.rows * config.part_row_floats();
  int64_t const tile_floats = is_latent ? cache.slots * (kSharedTileBytes / 4) : 0;
  int64_t const floats = round_up(part_floats, 4) + tile_floats;
  int64_t const counters = is_latent ? 2 : round_up(2 * cache.slots * config.part_counters(), 2);
  bool const has_own_counters = used + counters > kLaunchCounters;
  int64_t const size = floats + (has_own_counters ? counters : 0);
  parts = allocate(kOp, &size, 1, Dtype::kFloat32, device);
  params.cache.parts = static_cast<float*>(mutable_data(parts));
  params.cache.shared_tiles = params.cache.parts + (floats - tile_floats);
  params.cache.arrived = has_own_counters ? reinterpret_cast<int*>(params.cache.parts + floats)
                                          : launch_counters(stream) + used;
  if (has_own_counters) {
    clear_counters(params.cache.arrived, counters, stream);
  }
  return counters;
}

void CacheLaunch::run(void* stream) const {
  for (Launch const& launch : launches_) {
    launch_variant(launch.params, launch.plan.variant, stream);
    if (launch.params.schedule.cache.parts_apart > 0) {
      int const columns = kFwdVariants[launch.plan.variant].head_dim_v;
      launch_combine(combine_params(launch.params, columns), stream);
    }
  }
  target_.finish();
}

}  // namespace fa3
