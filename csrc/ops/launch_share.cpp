#include "ops/launch_share.h"

namespace fa3 {
namespace {

constexpr int kOutBytes = 2;

void advance(TensorView& tensor, int64_t elements, int bytes) {
  tensor.data = static_cast<char*>(tensor.data) + elements * bytes;
}

void skip_heads(ScaleView& scale, int64_t heads) {
  scale.data = scale.data ? scale.data + heads * scale.head_stride : nullptr;
}

}  // namespace

FwdParams HeadGroups::params_of(FwdParams const& first, FwdConfig const& config, int group) const {
  FwdProblem const& problem = first.problem;
  int64_t const q_head = int64_t(group) * problem.heads_q;
  int64_t const kv_head = int64_t(group) * all_heads_k / count;
  FwdParams own = first;
  advance(own.q, q_head * own.q.head_stride, element_bytes(config.dtype_q));
  advance(own.k, kv_head * own.k.head_stride, element_bytes(config.dtype_k()));
  advance(own.v, kv_head * own.v.head_stride, element_bytes(config.dtype_kv()));
  advance(own.o, q_head * own.o.head_stride, kOutBytes);
  skip_heads(own.q_scale, own.q_scale.by_kv_head ? kv_head : q_head);
  skip_heads(own.k_scale, kv_head);
  skip_heads(own.v_scale, kv_head);
  int const rows = problem.is_packed ? problem.total_q : problem.seqlen_q;
  own.lse_heads = problem.heads_q * count;
  own.lse = first.lse ? first.lse + q_head * rows : nullptr;
  own.max_logits = first.max_logits ? first.max_logits + q_head * rows : nullptr;
  return own;
}

FwdParams params_of_columns(FwdParams const& all, FwdConfig const& config, int first, int count) {
  FwdParams own = all;
  own.problem.head_dim_v = min_of(count, all.problem.head_dim_v - first);
  advance(own.v, first, element_bytes(config.dtype_kv()));
  advance(own.o, first, kOutBytes);
  return own;
}

}  // namespace fa3
