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

// Makes each part of the shared keys a sequence.
void split_keys(AttentionCall& shared, PrefixParts const& parts) {
  shared.cache.cache_length = parts.keys;
  forbid_splits(shared);
  repeat_first(shared.q, parts.count);
  if (auto& table = shared.cache.page_table) {
    int64_t const pages = parts.keys / shared.k.size[1];
    table->size[0] = parts.count;
    table->size[1] = pages;
    table->stride[0] = pages * table->stride[1];
  } else {
    for (TensorMeta* const meta : {&shared.k, &shared.v}) {
      meta->size[0] = parts.count;
      meta->size[1] = parts.keys;
      meta->stride[0] = parts.keys * meta->stride[1];
    }
  }
  shared.scales.visit([&](char const*, std::optional<TensorMeta>& scale) {
    if (scale) {
      repeat_first(*scale, parts.count);
    }
  });
}

// Estimates how long both launches take. The unit of time is what a tile of 128 rows takes for a
// key: 12 ns at head dim 128 (all constants: H200, 2026-11-29).
struct PrefixTimes {
  static constexpr int kTileRows = 128;
  static constexpr int kStart = 1400;    // fixed cost of a tile
  static constexpr int kSplit = 3000;    // extra cost of a launch that splits the keys itself
  static constexpr int kPart = 60;       // cost of merging one more part
  static constexpr int kSmallPage = 64;  // keys of smaller pages cost kSmallPagePercent
  static constexpr int kSmallPagePercent = 160;
  static constexpr int kOwnStart = 700;  // fixed cost of the launch on own keys
  static constexpr int kOwnKTile = 200;  // cost of a K tile of own keys, per KV head
  static constexpr int kOwnKTileKeys = 128;
  static constexpr int kUsualOwnKeys = 384;  // assumed: the lengths are on the device

  int64_t ctas;
  int64_t keys;   // shared keys; weighted by kSmallPagePercent in small pages
  int64_t tiles;  // tiles that the queries of all sequences fill
  int64_t own;    // time of all own keys on one CTA
  bool is_early;  // the CTAs that the parts leave free compute own keys meanwhile

  int64_t whole() const { return tiles * keys / ctas + kSplit + own / ctas + kOwnStart; }

  int64_t shared(PrefixParts const& parts) const {
    return ceil_div(tiles * parts.count, ctas) * (keys / parts.count + kStart);
  }

  int64_t in_parts(PrefixParts const& parts) const {
    int64_t const first = shared(parts);
    int64_t const free = ctas - tiles * parts.count;
    int64_t time = first + own / ctas + kOwnStart;
    if (is_early && free > 0) {
      time = min_of(time, max_of(first, own / free + kOwnStart));
    }
    return time + parts.count * kPart;
  }
};

// Whether the rows of a dense cache overlap in memory, as those of an expanded tensor do. Copies of
// the last part may read past the shared keys, into the next row.
bool has_overlapping_rows(AttentionCall const& call) {
  auto const overlap = [](TensorMeta const& x) { return x.stride[0] < x.size[1] * x.stride[1]; };
  return !call.is_paged() && (overlap(call.k) || overlap(call.v));
}

}  // namespace

// WHY: the merge with the results of the own keys follows anyway and can add up these parts. A
// launch that splits the keys itself combines them in the last CTA of each tile. Own keys are
// computed at the same time by the CTAs that the parts leave free (CacheLine::early_ctas). 64
// sequences with 128 to 512 own keys, one launch after the other / like this (H200, 2026-11-29): 32
// / 8 heads and 8k shared keys 88 / 64 us, 32k 129 / 114, 8 / 1 heads 45 / 34 and 59 / 49.
PrefixParts prefix_parts(AttentionCall const& call, TensorMeta const& q) {
  constexpr int kMostParts = 64;
  constexpr int kLeastKeys = 256;
  int64_t const unit = call.is_paged() ? call.k.size[1] : PrefixTimes::kTileRows;
  int64_t const keys = call.prefix.shared_prefix;
  int64_t const group = q.size[2] / call.k.size[2];
  int64_t const rows = q.size[1] * group;
  PrefixParts best;
  if (!splits_freely(call) || rows <= kFastRows || call.has_latents() ||
      call.cache.cache_batch_idx || has_scales_of_keys(call) || has_overlapping_rows(call) ||
      keys % unit != 0) {
    return best;
  }
  int64_t const tiles = call.k.size[2] * ceil_div(rows, int64_t(PrefixTimes::kTileRows));
  int64_t const ctas = max_of(1, call.device.sm_count - call.execution.sm_margin);
  int64_t const own_keys = min_of(capacity_of(call) - keys, int64_t(PrefixTimes::kUsualOwnKeys));
  int64_t const own_k_tiles =
      call.batch() * call.k.size[2] * ceil_div(own_keys, int64_t(PrefixTimes::kOwnKTileKeys));
  bool const has_small_pages = call.is_paged() && call.k.size[1] < PrefixTimes::kSmallPage;
  int64_t const percent = has_small_pages ? PrefixTimes::kSmallPagePercent : 100;
  PrefixTimes const times{
      ctas, keys * percent / 100, tiles, own_k_tiles * PrefixTimes::kOwnKTile,
      call.execution.sm_margin == 0 && problem_of(call).seqlen_q * group <= kFastRows};
  int64_t least = times.whole();
  for (int count = 2; count <= kMostParts && keys / count >= kLeastKeys; ++count) {
    int64_t const part_keys = ceil_div(keys / unit, int64_t(count)) * unit;
    PrefixParts const parts{int(ceil_div(keys, part_keys)), part_keys};
    if (parts.count > 1 && times.in_parts(parts) < least) {
      least = times.in_parts(parts);
      best = parts;
      best.ctas = int(min_of(tiles * parts.count, ctas));
      best.own_k_tiles = int(min_of(times.shared(parts) / PrefixTimes::kOwnKTile, int64_t(255)));
    }
  }
  return best;
}

AttentionCall call_of_prefix(AttentionCall const& call, TensorMeta const& q,
                             PrefixParts const& parts) {
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
  if (parts.count > 1) {
    split_keys(shared, parts);
  }
  return shared;
}

}  // namespace fa3
