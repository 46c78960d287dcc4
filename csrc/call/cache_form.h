// Sizes of a call on a KV cache, whose checks hold.
#pragma once

#include "call/attention_call.h"

namespace fa3 {

// The most parts into which num_splits may divide the keys of a tile.
constexpr int64_t kMaxSplits = 256;

// Columns of v_cache that share a scale, where latents have one by key and block.
constexpr int kLatentScaleColumns = 128;

// Slots of a sequence; packed keys: of all sequences.
inline int64_t capacity_of(AttentionCall const& call) {
  return call.k.rank == 3 ? call.k.size[0] : call.k.size[1] * call.table_columns();
}

// Keys of each sequence before an append, where cache_seqlens is not given.
inline int64_t held_by_all(AttentionCall const& call) {
  return call.cache.cache_length < 0 ? capacity_of(call) : call.cache.cache_length;
}

// Keys of each sequence after an append, or 0 where the host does not know that.
inline int64_t known_keys(AttentionCall const& call) {
  CacheArguments const& cache = call.cache;
  bool const is_known = !cache.cache_seqlens && !cache.cache_leftpad && !cache.cu_seqlens_k_new;
  return is_known ? held_by_all(call) + cache.appended : 0;
}

}  // namespace fa3
