#include "ops/prefix_run.h"

#include <algorithm>

#include "checks/checks.h"
#include "plan/shared_prefix.h"
#include "ops/merge.h"

namespace fa3 {
namespace {

// Without a leading 1 where the call's tensors have no batch.
TensorMeta like_rank(TensorMeta meta, int rank) {
  if (meta.rank > rank) {
    meta.rank = rank;
    std::copy_n(meta.size + 1, rank, meta.size);
    std::copy_n(meta.stride + 1, rank, meta.stride);
  }
  return meta;
}

// All queries as one sequence, copied where their strides have no such view that TMA reads.
TensorMeta packed(char const* op, OwnedTensor const& tensor, TensorMeta const& meta,
                  OwnedTensor& copy) {
  if (!has_one_sequence(meta) || !tma_can_address(as_one_sequence(meta))) {
    copy = packed_copy(op, tensor, meta);
    return as_one_sequence(describe(copy));
  }
  return as_one_sequence(meta);
}

}  // namespace

PrefixRun::PrefixRun(AttentionCall const& call, ForwardInputs const& inputs,
                     ForwardResults const& results, void* stream)
    : results_(results), unread_lse_(results.has_lse ? OwnedTensor() : allocate_rows(call)) {
  char const* const op = call.op();
  AttentionCall own = call;
  own.fp8.float16_out = out_dtype_of(call) == Dtype::kFloat16;
  own.out = std::nullopt;
  AttentionCall shared = call_of_prefix(own, packed(op, inputs.q, call.q, q_copy_));
  if (call.latent.qv) {
    shared.latent.qv = packed(op, inputs.qv, *call.latent.qv, qv_copy_);
  }
  ForwardResults* const parts[] = {&of_shared_, &of_own_};
  AttentionCall const* const calls[] = {&shared, &own};
  merge_.out = describe(results.out);
  for (int i = 0; i < 2; ++i) {
    parts[i]->out = allocate_out(*calls[i]);
    parts[i]->lse = allocate_rows(*calls[i]);
    parts[i]->has_lse = true;
    merge_.part[i] = like_rank(describe(parts[i]->out), call.q.rank);
    merge_.lse[i] = like_rank(describe(parts[i]->lse), call.q.rank - 1);
  }
  throw_if(check_merge(merge_));
  OwnedTensor& q = q_copy_ ? q_copy_ : inputs.q;
  OwnedTensor& qv = qv_copy_ ? qv_copy_ : inputs.qv;
  shared_.emplace(shared, ForwardInputs{q, inputs.k, inputs.v, qv}, of_shared_, stream);
  own_.emplace(own, inputs, of_own_, stream);
}

// WHY own keys first: that launch starts early, the one on shared keys does not.
void PrefixRun::run(void* stream) const {
  own_->run(stream);
  shared_->run(stream);
  launch_merge(merge_, results_.out, unread_lse_ ? unread_lse_ : results_.lse);
}

}  // namespace fa3
