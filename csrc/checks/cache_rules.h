// Rules of a KV cache that the ops which read it and append to it share.
#pragma once

#include "checks/rules.h"

namespace fa3 {

// The head dims of the kernel for absorbed MLA.
constexpr int kLatentRotaryDim = 64;
constexpr int kLatentDim = 512;

// The queries, the cache, and the lists and tables that say what is where in it.
std::string check_cache_tensors(Solver& solver, AttentionCall const& call);

// Whether a call can have k_descale and v_descale by page. is_converted: a cache of e4m3 under, or
// for, 16 bits.
std::string check_by_page(Solver const& solver, AttentionCall const& call, bool is_converted);

// k_descale and v_descale.
std::string check_cache_scales(Solver& solver, AttentionCall const& call);

// The scales of latents of e4m3, by key: one, or one for each kLatentScaleColumns of v_cache.
std::string check_latent_scales(Solver& solver, AttentionCall const& call);

// What the host knows of the lengths. appended: new keys of each sequence.
std::string check_cache_lengths(Solver const& solver, AttentionCall const& call, int64_t appended);

// Kernels move 16 bytes at a time.
std::string check_cache_memory(Solver const& solver, AttentionCall const& call);

}  // namespace fa3
