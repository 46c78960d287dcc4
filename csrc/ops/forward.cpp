// The forward ops on CUDA: read, check, allocate, run, return. No synchronisation; everything runs
// on the current stream of q's device, so that a call can be captured in a CUDA graph.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>

#include <cmath>
#include <utility>

#include "attention_ops.h"
#include "call/cache_form.h"
#include "call/device_info.h"
#include "checks/checks.h"
#include "plan/shared_prefix.h"
#include "ops/append_launch.h"
#include "ops/boxed_stack.h"
#include "ops/library.h"
#include "ops/prefix_run.h"

namespace fa3 {
namespace {

// kForward: without a cache and without e4m3. kAnyDtype: without a cache.
enum class Rules { kForward, kAnyDtype, kCache };

// A prefix of one sequence is not shared.
bool has_prefix(AttentionCall const& call) {
  return call.prefix.shared_prefix > 0 && batch_of(call) > 1;
}

bool is_fp8(AttentionCall const& call) {
  ScaleArguments const& scales = call.scales;
  return call.q.dtype == Dtype::kFloat8E4M3 || scales.q_descale || scales.k_descale ||
         scales.v_descale || call.fp8.float16_out || call.fp8.promote;
}

void check_on_cache(AttentionCall const& call, OpTensors const& tensors) {
  throw_if(check_cache(call));
  if (has_prefix(call)) {
    throw_if(check_cache(call_of_prefix(call, as_one_sequence(call.q))));
  }
  if (appends(call)) {
    throw_if(check_append(call));
    bool const sets_k_scales = tensors.k_scales || !call.by_page.descale_by_page;
    throw_if(check_append_kernel(call, sets_k_scales && tensors.v_scales));
  }
}

// A result that was given or not asked for is empty. The LSE of `_fwd_no_lse` is not even that: an
// allocation takes a tenth of the host time of a call. So ops return the same empty tensors again,
// but not in grad mode, where autograd marks the tensors that an op returns.
template <class Op>
ForwardResults allocate_results(AttentionCall const& call, OpTensors& tensors) {
  auto const empty = [&](EmptyResult result, Dtype dtype) {
    return empty_result(result, dtype, call.q.device_index, !aoti_torch_grad_mode_is_enabled());
  };
  auto const allocate_asked = [&](EmptyResult result, bool is_asked) {
    return is_asked ? allocate_rows(call) : empty(result, Dtype::kFloat32);
  };
  ForwardResults results;
  results.has_lse = returns<Op>("lse") && (!call.on_cache || call.splits.return_lse);
  results.out = tensors.out ? std::move(tensors.out) : allocate_out(call);
  if (call.out) {
    results.returned_out = empty(EmptyResult::kOut, call.out->dtype);
  }
  if (returns<Op>("lse")) {
    results.lse = allocate_asked(EmptyResult::kLse, results.has_lse);
  }
  if (returns<Op>("max_logits")) {
    results.max_logits = allocate_asked(EmptyResult::kMaxLogits, call.execution.return_max_logits);
  }
  if (returns<Op>("rotated") && !call.rotary.rotary_cos) {
    results.rotated = empty(EmptyResult::kRotated, call.q.dtype);
  }
  return results;
}

// Whether there is a row in a sequence, and a key that some query may see, or a sink.
bool has_work(AttentionCall const& call) {
  auto const& cu_seqlens_q = call.lengths.cu_seqlens_q;
  bool const has_sequence = call.on_cache || !cu_seqlens_q || cu_seqlens_q->size[0] > 1;
  bool const has_sink = !call.on_cache && call.score.sinks;
  return !is_empty(call.q) && has_sequence && (has_sink || !is_empty(call.k));
}

void clear(ForwardResults const& results) {
  require(aoti_torch_zero_(results.out.get()), "fill out");
  for (OwnedTensor const* rows : {&results.lse, &results.max_logits}) {
    if (*rows) {
      require(aoti_torch_aten_fill__Scalar(rows->get(), -INFINITY), "fill a result");
    }
  }
}

// All is planned and allocated before the first launch, so that a call that fails leaves the cache
// as it was.
void run(AttentionCall& call, OpTensors& tensors, ForwardResults& results) {
  void* stream = nullptr;
  require(aoti_torch_get_current_cuda_stream(call.q.device_index, &stream),
          "read the current stream");
  std::optional<AppendLaunch> append;
  std::optional<ForwardRun> attention;
  std::optional<PrefixRun> with_prefix;
  if (call.on_cache && appends(call)) {
    append.emplace(call, tensors);
  }
  ForwardInputs const inputs{tensors.q, tensors.k, tensors.v, tensors.qv};
  if (has_work(call) && has_prefix(call)) {
    with_prefix.emplace(call, inputs, results, stream);
  } else if (has_work(call)) {
    call.prefix.shared_prefix = 0;
    attention.emplace(call, inputs, results, stream);
  }
  if (append) {
    append->run(stream);
  }
  if (with_prefix) {
    with_prefix->run(stream);
  } else if (attention) {
    attention->run(stream);
  } else {
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
  call.device = limits_of(device_info_of(call.q));
  if (returns<Op>("rotated")) {
    count_appended(call, tensors);
  }
  if (kRules == Rules::kCache) {
    check_on_cache(call, tensors);
  } else {
    bool const has_fp8_rules = kRules == Rules::kAnyDtype && is_fp8(call);
    throw_if(has_fp8_rules ? check_fp8(call) : check_forward(call));
  }
  DeviceGuard const guard(call.q.device_index);
  ForwardResults results = allocate_results<Op>(call, tensors);
  run(call, tensors, results);
  if (call.out) {
    results.out = std::move(results.returned_out);
  }
  if (call.rotary.rotary_cos) {
    results.rotated = std::move(tensors.q);
  }
  Op::box(stack, results);
}

template <class Op, Rules kRules>
constexpr BoxedOp op() {
  return {Op::kName, &boxed_forward<Op, kRules>};
}

constexpr BoxedOp kOps[] = {op<ops::fwd, Rules::kForward>(),
                            op<ops::_fwd, Rules::kForward>(),
                            op<ops::_fwd_no_lse, Rules::kForward>(),
                            op<ops::fwd_general, Rules::kForward>(),
                            op<ops::attend, Rules::kAnyDtype>(),
                            op<ops::attend_cache, Rules::kCache>(),
                            op<ops::append_and_attend, Rules::kCache>()};

}  // namespace

std::span<BoxedOp const> forward_ops() { return kOps; }

}  // namespace fa3
