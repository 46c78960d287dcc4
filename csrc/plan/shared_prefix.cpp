#include "plan/shared_prefix.h"

#include "plan/problem_of_call.h"

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
  shared.latent.visit([](char const*, std::optional<TensorMeta>& queries) {
    queries = queries ? std::optional(as_one_sequence(*queries)) : std::nullopt;
  });
  shared.out = shared.k_new = shared.v_new = std::nullopt;
  shared.lengths = {};
  shared.tree = {};
  shared.rotary = {};
  shared.score = call.unmasked_score();
  shared.prefix = {};
  shared.cache = {};
  shared.cache.cache_length = call.prefix.shared_prefix;
  shared.cache.page_table = call.cache.page_table;
  shared.cache.cache_batch_idx = call.cache.cache_batch_idx;
  keep_first(shared.cache.page_table);
  keep_first(shared.cache.cache_batch_idx);
  // Scales by page and by key belong to the cache, others to sequences.
  bool const is_by_row = !call.is_paged() && !call.cache.cache_batch_idx;
  if (is_by_row) {
    shared.k.size[0] = shared.v.size[0] = 1;
  }
  shared.scales.visit([&](char const*, std::optional<TensorMeta>& scale) {
    bool const is_by_key = scale && scale->rank == 3;
    if (is_by_row || !(call.by_page.descale_by_page || is_by_key)) {
      keep_first(scale);
    }
  });
  return shared;
}

}  // namespace fa3
