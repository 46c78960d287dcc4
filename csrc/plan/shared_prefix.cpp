#include "plan/shared_prefix.h"

namespace fa3 {
namespace {

// The first row alone.
void keep_first(std::optional<TensorMeta>& meta) {
  if (meta && meta->rank > 0 && meta->size[0] > 1) {
    meta->size[0] = 1;
  }
}

}  // namespace

AttentionCall call_of_prefix(AttentionCall const& call, TensorMeta const& q) {
  AttentionCall shared = call;
  shared.q = q;
  if (call.latent.qv) {
    shared.latent.qv = as_one_sequence(*call.latent.qv);
  }
  shared.out = shared.k_new = shared.v_new = std::nullopt;
  shared.lengths = {};
  shared.tree = {};
  shared.rotary = {};
  shared.score = {};
  shared.score.softmax_scale = call.softmax_scale();
  shared.score.softcap = call.score.softcap;
  shared.splits.return_lse = true;
  shared.prefix = {};
  shared.cache = {};
  shared.cache.cache_length = call.prefix.shared_prefix;
  shared.cache.page_table = call.cache.page_table;
  shared.cache.cache_batch_idx = call.cache.cache_batch_idx;
  keep_first(shared.cache.page_table);
  keep_first(shared.cache.cache_batch_idx);
  keep_first(shared.scales.q_descale);
  // Scales of keys belong to rows of the cache, those of heads to sequences.
  bool const is_by_row = !call.cache.page_table && !call.cache.cache_batch_idx;
  if (is_by_row) {
    shared.k.size[0] = shared.v.size[0] = 1;
  }
  if (is_by_row || !(call.by_page.descale_by_page || call.latent.qv)) {
    keep_first(shared.scales.k_descale);
    keep_first(shared.scales.v_descale);
  }
  return shared;
}

}  // namespace fa3
