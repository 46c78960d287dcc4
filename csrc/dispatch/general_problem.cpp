#include "dispatch/general_problem.h"

#include <algorithm>

namespace fa3 {
namespace {

int limit_of(int64_t window_side) {
  bool const is_none = window_side < 0 || window_side > IntervalMask::kNoLimit;
  return is_none ? IntervalMask::kNoLimit : int(window_side);
}

// How long the longest sequence may be: what the caller says, where that can be.
int longest(int64_t hint, int64_t total) { return int(hint > 0 ? std::min(hint, total) : total); }

void set_sizes(FwdProblem& problem, GeneralCall const& call, GeneralSizes const& sizes) {
  TensorMeta const& q = call.forward.q;
  TensorMeta const& k = call.forward.k;
  int const heads_dim = call.is_packed ? 1 : 2;
  problem.dtype = q.dtype;
  problem.heads_q = int(q.size[heads_dim]);
  problem.heads_k = int(k.size[heads_dim]);
  problem.head_dim = int(q.size[heads_dim + 1]);
  problem.head_dim_v = int(call.forward.v.size[heads_dim + 1]);
  problem.is_packed = call.is_packed;
  if (call.is_packed) {
    problem.batch = int(call.cu_seqlens_q.size[0]) - 1;
    problem.has_unused = call.has_seqused_q || call.has_seqused_k;
    problem.total_q = int(q.size[0]);
    problem.total_k = int(k.size[0]);
    problem.seqlen_q = longest(sizes.max_seqlen_q, problem.total_q);
    problem.seqlen_k = longest(sizes.max_seqlen_k, problem.total_k);
  } else {
    problem.batch = int(q.size[0]);
    problem.seqlen_q = int(q.size[1]);
    problem.seqlen_k = int(k.size[1]);
  }
}

// Dense: the lengths say which limits hide nothing. (What the caller says of packed lengths is but
// a hint.)
void drop_idle_limits(FwdProblem& problem, IntervalMask& mask) {
  if (mask.left >= problem.seqlen_k - 1) {
    mask.left = IntervalMask::kNoLimit;
  }
  if (mask.right > 0 && mask.right >= problem.seqlen_q - 1) {
    mask.right = IntervalMask::kNoLimit;
  }
  // A query before key 0 is in no chunk; without chunks it might see keys behind its own.
  bool const all_stand_at_keys = problem.seqlen_q <= problem.seqlen_k || mask.right == 0;
  if (mask.is_chunked && int(mask.chunk.divisor) >= problem.seqlen_k && all_stand_at_keys) {
    mask.is_chunked = false;
  }
}

}  // namespace

FwdProblem general_problem(GeneralCall const& call, GeneralSizes const& sizes,
                           bool has_row_features) {
  FwdProblem problem;
  set_sizes(problem, call, sizes);
  IntervalMask mask;
  mask.left = limit_of(call.window_left);
  mask.right = call.causal ? 0 : limit_of(call.window_right);
  if (call.attention_chunk > 0) {
    mask.is_chunked = true;
    mask.chunk = FastDiv(int(std::min<int64_t>(call.attention_chunk, IntervalMask::kNoLimit)));
  }
  if (!problem.is_packed) {
    drop_idle_limits(problem, mask);
  }
  problem.mask = mask;
  bool const is_limited = mask.left < IntervalMask::kNoLimit || mask.is_chunked ||
                          (mask.right > 0 && mask.right < IntervalMask::kNoLimit);
  // FP8 kernels without a mask rely on each row seeing a key.
  bool const has_no_keys = problem.dtype == Dtype::kFloat8E4M3 && problem.seqlen_k == 0;
  bool const is_general = is_limited || problem.is_packed || has_row_features || has_no_keys;
  problem.kind = call.softcap > 0  ? kSoftcapKernel
                 : is_general      ? kGeneralKernel
                 : mask.right == 0 ? kCausalKernel
                                   : kFullKernel;
  return problem;
}

}  // namespace fa3
