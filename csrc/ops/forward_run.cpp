#include "ops/forward_run.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>

#include <algorithm>
#include <stdexcept>

#include "core/cache_keys.h"
#include "core/tree_mask.h"
#include "plan/plan_cache.h"
#include "plan/problem_of_call.h"
#include "plan/registry.h"
#include "plan/variants.h"
#include "fwd_built.inc"
#include "fwd_registry.inc"
#include "ops/merge.h"
#include "schedule/counters.h"
#include "schedule/prepare.h"

namespace fa3 {
namespace {

// ------------------------------------------------------------------------------------------- views
// Scales without a cache may lie by blocks, (batch, heads, blocks); the first dimension is 1 with
// packed sequences.
ScaleView dense_scale_view(std::optional<TensorMeta> const& scale, bool is_packed) {
  ScaleView view = scale_view(scale);
  if (scale && scale->rank == 3) {
    view.batch_stride = is_packed ? 0 : scale->stride[0];
    view.block_stride = scale->stride[2];
    view.by_kv_head = false;
  }
  return view;
}

void view_scales(FwdParams& params, AttentionCall const& call) {
  ScaleArguments const& scales = call.scales;
  auto const view = [&](std::optional<TensorMeta> const& scale) {
    return call.on_cache ? scale_view(scale) : dense_scale_view(scale, call.is_packed());
  };
  params.q_scale = view(scales.q_descale);
  params.k_scale = view(scales.k_descale);
  params.v_scale = view(scales.v_descale);
  params.scales_by_page = call.by_page.descale_by_page;
}

void view_cache(CacheTensors& tensors, AttentionCall const& call, int capacity) {
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

float* floats_of(OwnedTensor const& tensor) { return static_cast<float*>(mutable_data(tensor)); }

// A row of zeros for K and V, which no query sees.
OwnedTensor view_no_keys(char const* op, FwdParams& params, int device) {
  FwdProblem const& problem = params.problem;
  int64_t const row = std::max(problem.head_dim, problem.head_dim_v);
  int64_t const sizes[] = {problem.heads_k, row};
  OwnedTensor zeros = allocate(op, sizes, 2, problem.dtype, device);
  require(aoti_torch_zero_(zeros.get()), "fill a row of zeros");
  params.k = params.v = TensorView{mutable_data(zeros), 0, row, row};
  return zeros;
}

// ------------------------------------------------------------------------------------------ launch
// The kernel that combines the parts of a latent cache follows in a launch of its own.
void launch_kernels(FwdParams& params, int variant, void* stream) {
  if (!kFwdVariants[variant].kind.is_latent) {
    kFwdLaunchers[variant](params, stream);
    return;
  }
  LaunchPair pair(params.cache.arrived, stream);
  params.cache.arrived = pair.counters();
  kFwdLaunchers[variant](params, stream);
  pair.complete();
}

// A launch for each part of v's columns that one can take: mostly one.
void launch_variant(FwdParams const& params, int variant, void* stream) {
  FwdConfig const& config = kFwdVariants[variant];
  int const all = params.problem.head_dim_v;
  int const step = launch_columns(params.problem);
  for (int first = 0; first < all; first += step) {
    FwdParams part = params;
    part.problem.head_dim_v = std::min(step, all - first);
    constexpr int kOutBytes = 2;
    part.v.data = static_cast<char*>(params.v.data) + first * element_bytes(config.dtype_kv);
    part.o.data = static_cast<char*>(params.o.data) + first * kOutBytes;
    if (part.problem.is_packed && !config.kind.is_cache()) {
      launch_prepare(prepare_params(part, config.consumer_warpgroups), stream);
    }
    launch_kernels(part, variant, stream);
  }
}

}  // namespace

Dtype out_dtype_of(AttentionCall const& call) {
  bool const is_fp8 = call.q.dtype == Dtype::kFloat8E4M3;
  return call.out               ? call.out->dtype
         : !is_fp8              ? call.q.dtype
         : call.fp8.float16_out ? Dtype::kFloat16
                                : Dtype::kBFloat16;
}

OwnedTensor allocate_out(AttentionCall const& call) {
  TensorMeta const& q = call.q;
  int64_t size[4];
  std::copy_n(q.size, q.rank, size);
  size[q.rank - 1] = call.v.size[call.v.rank - 1];
  return allocate(call.op(), size, q.rank, out_dtype_of(call), q.device_index);
}

OwnedTensor allocate_rows(AttentionCall const& call) {
  TensorMeta const& q = call.q;
  int64_t const packed[] = {q.size[1], q.size[0]};
  int64_t const dense[] = {q.size[0], q.size[2], q.size[1]};
  return allocate(call.op(), q.rank == 3 ? packed : dense, q.rank - 1, Dtype::kFloat32,
                  q.device_index);
}

ForwardRun::ForwardRun(AttentionCall const& call, ForwardInputs const& inputs,
                       ForwardResults const& results, void* stream)
    : target_(call.op(), results.out) {
  first_.params.problem = call.on_cache ? problem_of_cache(call) : problem_of(call);
  view(call, inputs, results);
  if (!call.on_cache) {
    first_.plan_dense(call, stream);
    return;
  }
  auto const problems = launches_of_cache(first_.params.problem);
  if (problems.size() > 1) {
    second_.emplace().params = first_.params;
    second_->params.problem = problems[1];
  }
  first_.params.problem = problems[0];
  int64_t const counters = first_.plan_on_cache(call, 0, stream);
  if (second_) {
    second_->plan_on_cache(call, counters, stream);
  }
}

void ForwardRun::view(AttentionCall const& call, ForwardInputs const& inputs,
                      ForwardResults const& results) {
  char const* const op = call.op();
  FwdParams& params = first_.params;
  params.out_dtype = out_dtype_of(call);
  params.o = target_.view();
  params.lse = results.has_lse ? floats_of(results.lse) : nullptr;
  params.max_logits = call.execution.return_max_logits ? floats_of(results.max_logits) : nullptr;
  params.q = readable(op, inputs.q, call.q);
  if (call.latent.qv) {
    params.qv = readable(op, inputs.qv, *call.latent.qv);
  }
  if (is_empty(call.k)) {
    zeros_ = view_no_keys(op, params, call.q.device_index);
  } else {
    params.k = readable(op, inputs.k, call.k);
    params.v = readable(op, inputs.v, call.v);
  }
  view_scales(params, call);
  params.sinks = data_of<float>(call.score.sinks);
  params.lengths = lengths_of(call);
  params.softmax_scale = float(call.softmax_scale());
  params.softcap = float(call.score.softcap);
  if (call.on_cache) {
    view_cache(params.cache, call, params.problem.cache.capacity);
  }
}

void ForwardRun::Launch::set_plan(FwdPlan const& plan) {
  if (!kFwdLaunchers[plan.variant]) {
    throw std::runtime_error(missing_variant_text("fwd", plan.variant, kFwdBuilt));
  }
  variant = plan.variant;
  params.schedule = plan.schedule;
}

void ForwardRun::Launch::plan_dense(AttentionCall const& call, void* stream) {
  set_plan(plan_forward(params.problem));
  params.ticket_counter = launch_counters(stream);
  if (int64_t const ints = params.schedule.workspace_ints; ints > 0) {
    workspace = allocate(call.op(), &ints, 1, Dtype::kFloat32, call.q.device_index);
    params.workspace = static_cast<int*>(mutable_data(workspace));
  }
}

int64_t ForwardRun::Launch::plan_on_cache(AttentionCall const& call, int64_t used_counters,
                                          void* stream) {
  set_plan(plan_cache(params.problem));
  FwdConfig const& config = kFwdVariants[variant];
  CacheSchedule const& cache = params.schedule.cache;
  bool const is_latent = params.problem.kind.is_latent;
  int64_t const part_floats = cache.slots * cache.rows * config.part_row_floats();
  int64_t const tile_floats = is_latent ? cache.slots * (kSharedTileBytes / 4) : 0;
  int64_t const floats = round_up(part_floats, 4) + tile_floats;
  int64_t const counters = is_latent ? 2 : round_up(2 * cache.slots * config.part_counters(), 2);
  bool const has_own_counters = used_counters + counters > kLaunchCounters;
  int64_t const size = floats + (has_own_counters ? counters : 0);
  workspace = allocate(call.op(), &size, 1, Dtype::kFloat32, call.q.device_index);
  params.cache.parts = floats_of(workspace);
  params.cache.shared_tiles = params.cache.parts + (floats - tile_floats);
  params.cache.arrived = has_own_counters ? reinterpret_cast<int*>(params.cache.parts + floats)
                                          : launch_counters(stream) + used_counters;
  if (has_own_counters) {
    clear_counters(params.cache.arrived, counters, stream);
  }
  return counters;
}

void ForwardRun::run(void* stream) const {
  for (Launch const* launch : {&first_, second_ ? &*second_ : nullptr}) {
    if (launch != nullptr) {
      launch_variant(launch->params, launch->variant, stream);
      launch_combine_parts(launch->params, kFwdVariants[launch->variant].head_dim_v, stream);
    }
  }
  target_.finish();
}

}  // namespace fa3
