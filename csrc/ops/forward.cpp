// The forward ops on CUDA: read, check, allocate, run, return. No synchronisation; everything runs
// on the current stream of q's device, so that a call can be captured in a CUDA graph.
#include <cmath>

#include "attention_ops.h"
#include "call/device_info.h"
#include "checks/checks.h"
#include "plan/shared_prefix.h"
#include "ops/append_launch.h"
#include "ops/boxed_stack.h"
#include "ops/library.h"
#include "ops/forward_run.h"

namespace fa3 {
namespace {

// kForward: without a cache and without e4m3. kAnyDtype: without a cache.
enum class Rules { kForward, kAnyDtype, kCache };

void check(AttentionCall const& call, OpTensors const& tensors, Rules rules) {
  if (rules != Rules::kCache) {
    return throw_if(check_call(call, rules == Rules::kAnyDtype && call.is_fp8()));
  }
  throw_if(check_cache(call));
  if (has_shared_prefix(call)) {
    throw_if(check_cache(call_of_prefix(call, as_one_sequence(call.q))));
  }
  if (appends(call)) {
    bool const sets_k_scales = tensors.k_scales || !call.by_page.descale_by_page;
    throw_if(check_append(call, sets_k_scales && tensors.v_scales));
  }
}

// An allocation takes a tenth of the host time of a call. So ops return the same empty tensors
// again, but not in grad mode, where autograd marks the tensors that an op returns.
OwnedTensor empty(EmptyResult result, Dtype dtype, AttentionCall const& call) {
  return empty_result(result, dtype, call.q.device_index, !aoti_torch_grad_mode_is_enabled());
}

// A result that was not asked for is empty.
template <class Op>
ForwardResults allocate_results(AttentionCall const& call, OpTensors& tensors) {
  auto const rows = [&](EmptyResult result, bool is_asked) {
    return is_asked ? allocate_rows(call.op(), call.q) : empty(result, Dtype::kFloat32, call);
  };
  ForwardResults results;
  results.out = tensors.out ? std::move(tensors.out) : allocate_out(call);
  if (returns<Op>("lse")) {
    results.lse = rows(EmptyResult::kLse, call.splits.return_lse);
  }
  if (returns<Op>("max_logits")) {
    results.max_logits = rows(EmptyResult::kMaxLogits, call.execution.return_max_logits);
  }
  return results;
}

// Whether there is a row in a sequence, and a key that some query may see, or a sink.
bool has_work(AttentionCall const& call) {
  bool const has_sequence = call.on_cache || call.batch() > 0;
  return !is_empty(call.q) && has_sequence && (call.sink_count() > 0 || !is_empty(call.k));
}

void clear(ForwardResults const& results) {
  fill(results.out, 0.0);
  fill(results.lse, -INFINITY);
  fill(results.max_logits, -INFINITY);
}

// All is planned and allocated before the first launch, so that a call that fails leaves the cache
// as it was.
void run(AttentionCall& call, OpTensors& tensors, ForwardResults const& results) {
  void* const stream = current_stream(call.q.device_index);
  std::optional<AppendLaunch> append;
  std::optional<ForwardRun> attention;
  if (call.on_cache && appends(call)) {
    append.emplace(call, tensors);
  }
  if (has_work(call) && !only_appends(call)) {
    attention.emplace(call, tensors, results, stream);
  }
  if (append) {
    append->run(stream);
  }
  fill(tensors.max_logits_out, -INFINITY);
  if (attention) {
    attention->run(stream);
  } else if (!only_appends(call)) {
    clear(results);
  }
}

template <class Op, Rules kRules>
void boxed_forward(StableIValue* stack, uint64_t, uint64_t) {
  BoxedStack values(stack);
  OpTensors tensors;
  AttentionCall call;
  Op::read(values, tensors, call);
  call.on_cache = kRules == Rules::kCache;
  call.splits.return_lse = returns<Op>("lse") && (!call.on_cache || call.splits.return_lse);
  call.device = limits_of(device_info_of(call.q));
  if (returns<Op>("rotated")) {
    count_appended(call, tensors);
  }
  check(call, tensors, kRules);
  DeviceGuard const guard(call.q.device_index);
  ForwardResults results = allocate_results<Op>(call, tensors);
  run(call, tensors, results);
  if (call.out) {
    results.out = empty(EmptyResult::kOut, call.out->dtype, call);
  }
  if (returns<Op>("rotated")) {
    results.rotated = call.rotary.rotary_cos ? std::move(tensors.q)
                                             : empty(EmptyResult::kRotated, call.q.dtype, call);
  }
  Op::box(stack, results);
}

template <class Op, Rules kRules>
constexpr BoxedOp kOp = {Op::kName, &boxed_forward<Op, kRules>};

using enum Rules;
constexpr BoxedOp kOps[] = {kOp<ops::fwd, kForward>,
                            kOp<ops::_fwd, kForward>,
                            kOp<ops::_fwd_no_lse, kForward>,
                            kOp<ops::fwd_general, kForward>,
                            kOp<ops::attend, kAnyDtype>,
                            kOp<ops::attend_cache, kCache>,
                            kOp<ops::append_and_attend, kCache>};

}  // namespace

std::span<BoxedOp const> forward_ops() { return kOps; }

}  // namespace fa3
