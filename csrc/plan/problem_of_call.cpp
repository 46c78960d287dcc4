#include "plan/problem_of_call.h"

#include <algorithm>
#include <limits>

#include "call/cache_form.h"
#include "call/given_tensor.h"

namespace fa3 {
namespace {

int limit_of(int64_t window_side) {
  bool const is_none = window_side < 0 || window_side > IntervalMask::kNoLimit;
  return is_none ? IntervalMask::kNoLimit : int(window_side);
}

// The length of the longest sequence: the caller's hint, if possible, else the total.
int longest(int64_t hint, int64_t total) { return int(hint > 0 ? std::min(hint, total) : total); }

// Sizes of the queries and head dims. INVARIANT: packed sequences of q, and of k and v without a
// cache, have three dimensions.
void set_sizes(FwdProblem& problem, AttentionCall const& call) {
  TensorMeta const& q = call.q;
  TensorMeta const& k = call.k;
  problem.dtype = q.dtype;
  problem.is_packed = q.rank == 3;
  problem.batch = int(call.batch());
  problem.heads_q = int(q.size[q.rank - 2]);
  problem.head_dim = int(q.size[q.rank - 1]);
  problem.heads_k = int(k.size[k.rank - 2]);
  problem.head_dim_v = int(call.v.size[k.rank - 1]);
  problem.total_q = problem.is_packed ? int(q.size[0]) : 0;
  problem.seqlen_q =
      problem.is_packed ? longest(call.lengths.max_seqlen_q, problem.total_q) : int(q.size[1]);
}

void set_keys(FwdProblem& problem, AttentionCall const& call) {
  LengthArguments const& lengths = call.lengths;
  if (problem.is_packed) {
    problem.has_unused = lengths.seqused_q || lengths.seqused_k;
    problem.total_k = int(call.k.size[0]);
    problem.seqlen_k = longest(lengths.max_seqlen_k, problem.total_k);
  } else {
    problem.seqlen_k = int(call.k.size[1]);
  }
}

PackGqa pack_gqa_of(std::optional<bool> asked) {
  return !asked ? PackGqa::kHeuristic : *asked ? PackGqa::kAlways : PackGqa::kNever;
}

// Removes limits that mask nothing, by the lengths of a dense call. Packed lengths are only a hint.
void drop_idle_limits(FwdProblem& problem) {
  IntervalMask& mask = problem.mask;
  if (mask.left >= problem.seqlen_k - 1) {
    mask.left = IntervalMask::kNoLimit;
  }
  if (mask.right > 0 && mask.right >= problem.seqlen_q - 1) {
    mask.right = IntervalMask::kNoLimit;
  }
  // A query before key 0 is in no chunk; without chunks it might see keys after its own.
  bool const all_stand_at_keys = problem.seqlen_q <= problem.seqlen_k || mask.right == 0;
  if (mask.is_chunked && int(mask.chunk.divisor) >= problem.seqlen_k && all_stand_at_keys) {
    mask.is_chunked = false;
  }
}

IntervalMask mask_of_call(ScoreArguments const& score) {
  IntervalMask mask;
  mask.left = limit_of(score.window_left);
  mask.right = score.causal ? 0 : limit_of(score.window_right);
  if (score.attention_chunk > 0) {
    mask.is_chunked = true;
    mask.chunk = FastDiv(int(std::min<int64_t>(score.attention_chunk, IntervalMask::kNoLimit)));
  }
  return mask;
}

void set_execution(FwdProblem& problem, AttentionCall const& call) {
  problem.promote = call.fp8.promote;
  problem.pack_gqa = pack_gqa_of(call.execution.pack_gqa);
  problem.sm_margin = int(call.execution.sm_margin);
  problem.split_size = int(std::min<int64_t>(call.execution.split_size, IntervalMask::kNoLimit));
  problem.deterministic = call.gradients.deterministic;
  problem.device = call.device;
}

// Keys of the only sequence, if each query sees all and the host knows their number; else 0.
int keys_of_all(AttentionCall const& call, FwdProblem const& problem) {
  IntervalMask const& mask = problem.mask;
  bool const is_one = problem.batch == 1 && !problem.is_packed && call.k.rank == 4;
  bool const is_full = mask.left == IntervalMask::kNoLimit &&
                       mask.right == IntervalMask::kNoLimit && !mask.is_chunked &&
                       !call.tree.tree_mask;
  bool const is_plain =
      is_full && call.sink_count() == 0 && !problem.kind.is_latent && !call.choice.keys_chosen;
  return is_one && is_plain && call.prefix.shared_prefix == 0
             ? int(std::min(known_keys(call), int64_t(problem.cache.capacity)))
             : 0;
}

void set_cache(FwdProblem& problem, AttentionCall const& call) {
  TensorMeta const& k = call.k;
  CacheProblem& cache = problem.cache;
  // Without pages or slots both are 0, and then so is the capacity, however long a page table is.
  if (!is_empty(k)) {
    constexpr int64_t kMostPages = std::numeric_limits<int>::max();  // ids are int32
    bool const has_packed_keys = k.rank == 3;
    cache.entries = has_packed_keys ? 1 : int(std::min(k.size[0], kMostPages));
    cache.page_size = int(k.size[has_packed_keys ? 0 : 1]);
    cache.capacity = int(std::min<int64_t>(capacity_of(call), IntervalMask::kNoLimit));
  }
  cache.num_splits = int(call.splits.num_splits);
  cache.is_chosen = call.choice.keys_chosen;
  problem.seqlen_k = cache.capacity;
  problem.mask = mask_of_call(call.score);
  problem.kind = call.has_latents()   ? kLatentKernel
                 : call.has_softcap() ? kCacheSoftcapKernel
                                      : kCacheKernel;
  problem.converts = call.converts();
  cache.keys_of_all = keys_of_all(call, problem);
}

// Attention without a cache.
void set_mask(FwdProblem& problem, AttentionCall const& call) {
  ScoreArguments const& score = call.score;
  problem.mask = mask_of_call(score);
  if (!problem.is_packed) {
    drop_idle_limits(problem);
  }
  IntervalMask const& mask = problem.mask;
  bool const is_limited = mask.left < IntervalMask::kNoLimit || mask.is_chunked ||
                          (mask.right > 0 && mask.right < IntervalMask::kNoLimit);
  // FP8 kernels without a mask rely on each row seeing a key.
  bool const has_no_keys = problem.dtype == Dtype::kFloat8E4M3 && problem.seqlen_k == 0;
  bool const has_row_features =
      !call.is_backward && (call.sink_count() > 0 || call.execution.return_max_logits);
  bool const has_lists = call.has_lists();
  problem.listed_rows = has_lists && !call.is_backward ? call.listed_rows() : 0;
  bool const is_general = is_limited || problem.is_packed || has_row_features || has_no_keys;
  problem.kind = has_lists            ? (call.has_softcap() ? kListsSoftcapKernel : kListsKernel)
                 : call.has_softcap() ? kSoftcapKernel
                 : is_general         ? kGeneralKernel
                 : mask.right == 0    ? kCausalKernel
                                      : kFullKernel;
}

}  // namespace

FwdProblem problem_of(AttentionCall const& call) {
  FwdProblem problem;
  set_sizes(problem, call);
  if (call.on_cache) {
    set_cache(problem, call);
  } else {
    set_keys(problem, call);
    set_mask(problem, call);
  }
  set_execution(problem, call);
  return problem;
}

bool splits_freely(AttentionCall const& call) {
  return call.splits.num_splits == 0 && call.execution.split_size == 0;
}

void forbid_splits(AttentionCall& call) { call.splits.num_splits = 1; }

}  // namespace fa3
