#include "plan/shared_prefix.h"

#include "plan/plan_cache.h"
#include "plan/problem_of_call.h"

namespace fa3 {
namespace {

// The first row alone.
void keep_first(std::optional<TensorMeta>& meta) {
  if (meta && meta->rank > 0 && meta->size[0] > 1) {
    meta->size[0] = 1;
  }
}

// The first row for each of `count` sequences.
void repeat_first(TensorMeta& meta, int count) {
  meta.size[0] = count;
  meta.stride[0] = 0;
}

// Scales of pages or of single keys.
bool has_scales_of_keys(AttentionCall const& call) {
  bool found = call.by_page.descale_by_page;
  ScaleArguments scales = call.scales;
  scales.visit([&](char const*, std::optional<TensorMeta> const& scale) {
    found = found || (scale && scale->rank == 3);
  });
  return found;
}

// Splits the shared keys into parts of whole pages, as sequences.
void split_keys(AttentionCall& shared, int parts) {
  int64_t const keys = shared.cache.cache_length / parts;
  shared.cache.cache_length = keys;
  forbid_splits(shared);
  repeat_first(shared.q, parts);
  if (auto& table = shared.cache.page_table) {
    int64_t const pages = keys / shared.k.size[1];
    table->size[0] = parts;
    table->size[1] = pages;
    table->stride[0] = pages * table->stride[1];
  } else {
    for (TensorMeta* const meta : {&shared.k, &shared.v}) {
      meta->size[0] = parts;
      meta->size[1] = keys;
      meta->stride[0] = keys * meta->stride[1];
    }
  }
  shared.scales.visit([&](char const*, std::optional<TensorMeta>& scale) {
    if (scale) {
      repeat_first(*scale, parts);
    }
  });
}

}  // namespace

// WHY: the merge with the results of the own keys follows anyway and can add up these parts. A
// launch that splits the keys itself combines them in the last CTA of each tile. Time of a call
// with 64 sequences before and after (H200, 2026-11-28): 64 query heads, 8 KV heads and 32k shared
// keys 189 and 179 us; 8 query heads, 1 KV head and 8k shared keys 46.6 and 44.8 us.
int prefix_parts(AttentionCall const& call, TensorMeta const& q) {
  constexpr int kTileRows = 128;
  constexpr int kMostParts = 64;
  constexpr int kLeastKeys = 256;
  // Estimated fixed costs, as the number of keys that take the same time: of a tile, and of a
  // launch that splits the keys itself.
  constexpr int kKeysOfTile = 400;
  constexpr int kKeysOfSplits = 3000;
  int64_t const unit = call.is_paged() ? call.k.size[1] : kTileRows;
  int64_t const keys = call.prefix.shared_prefix;
  int64_t const rows = q.size[1] * (q.size[2] / call.k.size[2]);
  if (!splits_freely(call) || rows <= kFastRows || call.has_latents() ||
      call.cache.cache_batch_idx || has_scales_of_keys(call) || keys % unit != 0) {
    return 1;
  }
  int64_t const tiles = call.k.size[2] * ceil_div(rows, int64_t(kTileRows));
  int64_t const ctas = max_of(1, call.device.sm_count - call.execution.sm_margin);
  int64_t least = tiles * keys / ctas + kKeysOfSplits;
  int best = 1;
  for (int parts = 2; parts <= kMostParts && keys / parts >= kLeastKeys; ++parts) {
    int64_t const cost = ceil_div(tiles * parts, ctas) * (keys / parts + kKeysOfTile);
    if (keys / unit % parts == 0 && cost < least) {
      least = cost;
      best = parts;
    }
  }
  return best;
}

AttentionCall call_of_prefix(AttentionCall const& call, TensorMeta const& q, int parts) {
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
  if (parts > 1) {
    split_keys(shared, parts);
  }
  return shared;
}

}  // namespace fa3
