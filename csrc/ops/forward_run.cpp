#include "ops/forward_run.h"

#include <algorithm>

#include "call/cache_form.h"
#include "checks/checks.h"
#include "core/tree_mask.h"
#include "plan/plan_cache.h"
#include "plan/problem_of_call.h"
#include "plan/registry.h"
#include "plan/shared_prefix.h"
#include "plan/variants.h"
#include "fwd_built.inc"
#include "fwd_registry.inc"
#include "ops/merge.h"
#include "schedule/counters.h"
#include "schedule/prepare.h"

namespace fa3 {
namespace {

// The dtype of the given out, else that of q, or for e4m3 the one that the call asks for.
Dtype out_dtype_of(AttentionCall const& call) {
  return call.out                             ? call.out->dtype
         : call.q.dtype != Dtype::kFloat8E4M3 ? call.q.dtype
         : call.fp8.float16_out               ? Dtype::kFloat16
                                              : Dtype::kBFloat16;
}

void view_scales(FwdParams& params, AttentionCall const& call) {
  auto const view = [&](std::optional<TensorMeta> const& scale) {
    ScaleView view = scale_view(scale);
    // Scales without a cache may lie by blocks, (batch, heads, blocks); the first dimension is 1
    // with packed sequences.
    if (!call.on_cache && scale && scale->rank == 3) {
      view.batch_stride = call.is_packed() ? 0 : scale->stride[0];
      view.block_stride = scale->stride[2];
      view.by_kv_head = false;
    }
    return view;
  };
  params.q_scale = view(call.scales.q_descale);
  params.k_scale = view(call.scales.k_descale);
  params.v_scale = view(call.scales.v_descale);
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
  auto const at_most = [&](int64_t keys) { return int(std::min<int64_t>(keys, capacity)); };
  tensors.held_by_all = at_most(held_by_all(call));
  tensors.appended = at_most(cache.appended);
  tensors.first_slot = at_most(call.prefix.shared_prefix);
  if (auto const& tree = call.tree.tree_mask) {
    tensors.tree = data_of<uint32_t>(tree);
    tensors.tree_stride = tree->rank == 3 ? tree->stride[0] / kTreeWords : 0;
  }
}

float* floats_of(OwnedTensor const& tensor) { return static_cast<float*>(mutable_data(tensor)); }

// Replaces K and V by a row of zeros, which no query sees.
void view_no_keys(FwdParams& params, AttentionCall const& call, OpTensors& inputs) {
  int64_t const row = std::max(params.problem.head_dim, params.problem.head_dim_v);
  int64_t const sizes[] = {params.problem.heads_k, row};
  inputs.k = allocate(call.op(), sizes, 2, call.q.dtype, call.q.device_index);
  fill(inputs.k, 0.0);
  params.k = params.v = TensorView{mutable_data(inputs.k), 0, row, row};
}

void set_params(FwdParams& params, AttentionCall const& call, OpTensors& inputs,
                ForwardResults const& results, TensorView const& out) {
  char const* const op = call.op();
  params.problem = problem_of(call);
  params.out_dtype = out_dtype_of(call);
  params.o = out;
  params.lse = call.splits.return_lse ? floats_of(results.lse) : nullptr;
  params.max_logits = largest_rows(call, inputs.max_logits_out, results.max_logits);
  params.q = readable(op, inputs.q, call.q);
  if (call.latent.qv) {
    params.qv = readable(op, inputs.qv, *call.latent.qv);
  }
  if (is_empty(call.k)) {
    view_no_keys(params, call, inputs);
  } else {
    params.k = readable(op, inputs.k, call.k);
    params.v = readable(op, inputs.v, call.v);
  }
  view_scales(params, call);
  set_score(params, call);
  params.mask = view_mask(call.mask, call.mask.key_lists);
  if (call.on_cache) {
    view_cache(params.cache, call, params.problem.cache.capacity);
  }
}

// Copies queries whose strides have no view as one sequence that TMA reads.
void make_one_sequence(char const* op, OwnedTensor& tensor, TensorMeta& meta) {
  if (!has_one_sequence(meta) || !tma_can_address(as_one_sequence(meta))) {
    tensor = packed_copy(op, tensor, meta);
    meta = describe(tensor);
  }
}

}  // namespace

OwnedTensor allocate_out(AttentionCall const& call) {
  TensorMeta out = call.q;
  out.size[out.rank - 1] = call.v.size[call.v.rank - 1];
  return allocate(call.op(), out.size, out.rank, out_dtype_of(call), out.device_index);
}

ForwardRun::ForwardRun(AttentionCall& call, OpTensors& inputs, ForwardResults const& results,
                       void* stream)
    : results_(results) {
  if (has_shared_prefix(call)) {
    add_parts(call, inputs, stream);
  } else {
    call.prefix.shared_prefix = 0;
    target_.emplace(call.op(), results.out);
    add(call, inputs, results, target_->view(), stream);
  }
}

void ForwardRun::add_parts(AttentionCall& call, OpTensors& inputs, void* stream) {
  make_one_sequence(call.op(), inputs.q, call.q);
  if (call.latent.qv) {
    make_one_sequence(call.op(), inputs.qv, *call.latent.qv);
  }
  AttentionCall own = call;
  own.fp8.float16_out = out_dtype_of(call) == Dtype::kFloat16;
  own.out = std::nullopt;
  own.splits.return_lse = true;
  TensorMeta const queries = as_one_sequence(call.q);
  PrefixParts const split = prefix_parts(own, queries);
  AttentionCall const shared = call_of_prefix(own, queries, split);
  auto& [results, unread_lse, merge] = parts_.emplace();
  merge.out = with_batch(describe(results_.out));
  // WHY shared keys first: decode CTAs start on own keys as soon as an SM is free (is_second).
  for (int i = 0; i < 2; ++i) {
    AttentionCall const& part = i == 0 ? shared : own;
    results[i] = {allocate_out(part), allocate_rows(part.op(), part.q), {}, {}};
    add(part, inputs, results[i], Target(part.op(), results[i].out).view(), stream);
  }
  split.set_lengths(launches_[0]->params.cache, call.prefix.shared_prefix);
  auto& [own_params, variant, groups, workspace] = *launches_[1];
  if (count_ == 2 && groups.starts_early(own_params.problem, variant)) {
    split.set_second(own_params.problem.cache);
  }
  merge.set_first(describe(results[0].out), describe(results[0].lse), split.count);
  merge.set(1, describe(results[1].out), describe(results[1].lse));
  throw_if(check_merge(merge));
  unread_lse = call.splits.return_lse ? nullptr : allocate_rows(call.op(), call.q);
}

void ForwardRun::add(AttentionCall const& call, OpTensors& inputs, ForwardResults const& results,
                     TensorView const& out, void* stream) {
  int const first = count_++;
  FwdParams& params = launches_[first].emplace().params;
  set_params(params, call, inputs, results, out);
  if (call.on_cache) {
    auto const problems = launches_of_cache(params.problem);
    launches_[first]->groups = HeadGroups::of(params.problem, problems[0]);
    params.problem = problems[0];
    if (problems.size() > 1) {
      launches_[count_++].emplace(params).params.problem = problems[1];
    }
  }
  for (int i = first; i < count_; ++i) {
    launches_[i]->plan(call, used_counters_, stream);
  }
}

void ForwardRun::Launch::plan(AttentionCall const& call, int64_t& used_counters, void* stream) {
  FwdProblem const& problem = params.problem;
  FwdPlan const plan = call.on_cache ? plan_cache(problem) : plan_forward(problem);
  if (!kFwdLaunchers[plan.variant]) {
    throw std::runtime_error(missing_variant_text(call.op(), plan.variant, kFwdBuilt));
  }
  variant = plan.variant;
  params.schedule = plan.schedule;
  FwdConfig const& config = kFwdVariants[variant];
  CacheSchedule const& cache = params.schedule.cache;
  int64_t const part_floats = cache.slots * cache.rows * config.part_row_floats();
  int64_t const tile_floats = config.is_mla() ? cache.slots * (kSharedTileBytes / 4) : 0;
  int64_t const dense = plan.schedule.total_floats + plan.schedule.workspace_ints;
  int64_t const floats = dense + round_up(part_floats, 4) + tile_floats;
  int64_t const part_counters = round_up(2 * cache.slots * config.part_counters(), 2);
  int64_t const counters = !call.on_cache ? 1 : config.is_mla() ? 2 : part_counters;
  bool const has_own_counters = used_counters + counters > kLaunchCounters;
  int64_t const size = floats + (has_own_counters ? counters : 0);
  float* memory = nullptr;
  if (size > 0) {
    workspace = allocate(call.op(), &size, 1, Dtype::kFloat32, call.q.device_index);
    memory = floats_of(workspace);
  }
  int* zeros = launch_counters(stream) + used_counters;
  if (has_own_counters) {
    zeros = reinterpret_cast<int*>(memory + floats);
    clear_counters(zeros, counters, stream);
  }
  used_counters += counters;
  params.workspace = reinterpret_cast<int*>(memory + plan.schedule.total_floats);
  params.ticket_counter = params.cache.arrived = zeros;
  params.totals = params.cache.parts = memory;
  params.cache.shared_tiles = memory + (floats - tile_floats);
}

// A launch for each group of columns of v. Groups share a workspace: each waits for the one before.
void ForwardRun::Launch::run_group(int group, void* stream) const {
  FwdConfig const& config = kFwdVariants[variant];
  FwdParams own = groups.params_of(params, config, group);
  own.sinks += own.sinks ? group * own.problem.heads_q : 0;
  int const step = launch_columns(own.problem);
  for (int first = 0; first < own.problem.head_dim_v; first += step) {
    FwdParams part = params_of_columns(own, config, first, step);
    if (part.problem.is_packed && !config.kind.is_cache()) {
      launch_prepare(prepare_params(part, config.consumer_warpgroups), stream);
    }
    std::optional<LaunchPair> pair;
    if (config.is_mla()) {
      part.cache.arrived = pair.emplace(part.cache.arrived, stream).counters();
    }
    kFwdLaunchers[variant](part, stream);
    if (pair) {
      pair->complete();
    }
  }
}

void ForwardRun::run(void* stream) const {
  for (int i = 0; i < count_; ++i) {
    for (int group = 0; group < launches_[i]->groups.count; ++group) {
      launches_[i]->run_group(group, stream);
    }
  }
  if (parts_) {
    launch_merge(parts_->merge, results_.out,
                 parts_->unread_lse ? parts_->unread_lse : results_.lse);
  } else {
    target_->finish();
  }
}

}  // namespace fa3
