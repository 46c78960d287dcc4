// Rules of a KV cache that the ops which read it and append to it share.
#pragma once

#include "checks/tensor_rule.h"

namespace fa3 {

// Slots of a sequence.
inline int64_t capacity_of(AttentionCall const& call) {
  return call.k.size[1] * (call.cache.page_table ? call.cache.page_table->size[1] : 1);
}

// Sequences; check_cache_form() holds.
inline int64_t batch_of(AttentionCall const& call) {
  return call.lengths.cu_seqlens_q     ? call.lengths.cu_seqlens_q->size[0] - 1
         : call.q.rank == 4            ? call.q.size[0]
         : call.cache.cu_seqlens_k_new ? call.cache.cu_seqlens_k_new->size[0] - 1
         : call.k_new                  ? call.k_new->size[0]
                                       : 0;
}

// Ranks and sizes of the cache, and the lists and tables that say what is where in it. like: the
// tensor on whose device they are.
std::string check_cache_form(char const* op, AttentionCall const& call, TensorMeta const& like);

// Whether a call can have k_descale and v_descale by page. is_converted: a cache of e4m3 under, or
// for, 16 bits.
std::string check_by_page(char const* op, AttentionCall const& call, bool is_converted);

// Rows of k_descale and v_descale; check_by_page() holds.
inline int64_t rows_of_scales(AttentionCall const& call) {
  return call.by_page.descale_by_page ? call.k.size[0] : batch_of(call);
}

// The scales of latents of e4m3, by key: one, or one for each kLatentScaleColumns of v_cache.
constexpr int kLatentScaleColumns = 128;
std::string check_latent_scales(char const* op, AttentionCall const& call);

// What the host knows of the lengths. appended: new keys of each sequence.
std::string check_cache_lengths(char const* op, AttentionCall const& call, int64_t appended);

// Kernels move 16 bytes at a time.
std::string check_cache_memory(char const* op, AttentionCall const& call);

}  // namespace fa3
