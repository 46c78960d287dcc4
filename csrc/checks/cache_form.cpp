#include "checks/cache_form.h"

#include <cstring>

#include "call/tma_rules.h"

namespace fa3 {
namespace {

std::string check_sizes(char const* op, AttentionCall const& call) {
  TensorMeta const& k = call.k;
  TensorMeta const& v = call.v;
  bool const is_paged = bool(call.cache.page_table);
  for (auto [name, meta] : {NamedTensor{"k_cache", k}, NamedTensor{"v_cache", v}}) {
    if (meta.rank != 4) {
      return error_text(op,
                        text(name, " to have 4 dimensions (",
                             is_paged ? "pages, page size" : "batch, slots", ", heads, head_dim)"),
                        text(meta.rank));
    }
  }
  char const* const dims[] = {is_paged ? "pages" : "batch", is_paged ? "page size" : "slots",
                              "heads"};
  for (int dim = 0; dim < 3; ++dim) {
    if (v.size[dim] != k.size[dim]) {
      return error_text(op,
                        text("v_cache.size(", dim, "), the ", dims[dim],
                             ", to be that of k_cache, ", k.size[dim]),
                        text(v.size[dim]));
    }
  }
  if (is_paged && k.size[1] < 1) {
    return error_text(op, "k_cache.size(1), the page size, to be at least 1", text(k.size[1]));
  }
  return {};
}

struct SizedList {
  char const* name;
  std::optional<TensorMeta> const& list;
  int64_t size;
};

std::string check_lists(char const* op, AttentionCall const& call, TensorMeta const& like) {
  CacheArguments const& cache = call.cache;
  int64_t const batch = batch_of(call);
  SizedList const lists[] = {{"cu_seqlens_q", call.lengths.cu_seqlens_q, batch + 1},
                             {"cu_seqlens_k_new", cache.cu_seqlens_k_new, batch + 1},
                             {"cache_seqlens", cache.cache_seqlens, batch},
                             {"cache_batch_idx", cache.cache_batch_idx, batch},
                             {"cache_leftpad", cache.cache_leftpad, batch},
                             {"rotary_seqlens", call.rotary.rotary_seqlens, batch}};
  for (auto const& [name, list, size] : lists) {
    if (!list) {
      continue;
    }
    bool const has_ends = size != batch;
    std::string const error =
        check_list(op, {name, *list}, like, has_ends ? "(batch + 1)" : "(batch)");
    if (!error.empty()) {
      return error;
    }
    if (list->size[0] != size || size < (has_ends ? 1 : 0)) {
      return error_text(op,
                        text(name, ".size(0) to be the batch", has_ends ? " + 1" : "", ", ",
                             size < 1 ? int64_t(has_ends) : size),
                        text(list->size[0]));
    }
  }
  return {};
}

std::string check_table(char const* op, AttentionCall const& call, TensorMeta const& like) {
  TensorMeta const& table = *call.cache.page_table;
  // flash_attn_with_kvcache has picked these rows, where table and list are right.
  bool const has_rows = bool(call.cache.cache_batch_idx);
  if (table.rank != 2) {
    return error_text(op, "page_table to have 2 dimensions (batch, pages)", text(table.rank));
  }
  if (!has_rows && table.size[0] != batch_of(call)) {
    return error_text(op, text("page_table.size(0) to be the batch, ", batch_of(call)),
                      text(table.size[0]));
  }
  if (std::strcmp(table.dtype_name, "int32") != 0) {
    return error_text(op, "page_table.dtype to be int32", table.dtype_name,
                      "call page_table.int()");
  }
  if (!same_device(table, like)) {
    return error_text(op, text("page_table on the device of q, ", device_text(like)),
                      device_text(table));
  }
  if (table.size[1] > 1 && table.stride[1] != 1) {
    return error_text(op, "page_table.stride(1) to be 1", text(table.stride[1]),
                      "call page_table.contiguous()");
  }
  if (has_rows) {
    return error_text(op, "page_table with a row for each of cache_batch_idx",
                      text(table.size[0], " rows"), "flash_attn_with_kvcache picks them");
  }
  return {};
}

}  // namespace

std::string check_cache_form(char const* op, AttentionCall const& call, TensorMeta const& like) {
  std::string error = check_sizes(op, call);
  if (error.empty()) {
    error = check_lists(op, call, like);
  }
  if (!error.empty() || call.cache.page_table) {
    return error.empty() ? check_table(op, call, like) : error;
  }
  if (!call.cache.cache_batch_idx && call.k.size[0] != batch_of(call)) {
    return error_text(op,
                      text("k_cache.size(0) to be the batch, ", batch_of(call),
                           ", without page_table and cache_batch_idx"),
                      text(call.k.size[0]));
  }
  return {};
}

std::string check_by_page(char const* op, AttentionCall const& call, bool is_converted) {
  if (!call.by_page.descale_by_page) {
    return {};
  }
  if (!call.cache.page_table) {
    return error_text(op, "descale_by_page with page_table", "no pages",
                      "a dense cache has scales of (batch, heads_k)");
  }
  if (!is_converted) {
    return error_text(op, "descale_by_page with a cache of float8_e4m3fn, and q of 16 bits",
                      text(call.k.dtype_name, " and ", call.q.dtype_name));
  }
  ScaleArguments const& scales = call.scales;
  if (!scales.k_descale || !scales.v_descale) {
    return error_text(op, "k_descale and v_descale with descale_by_page",
                      text(scales.k_descale ? "v_descale" : "k_descale", " of None"));
  }
  return {};
}

std::string check_latent_scales(char const* op, AttentionCall const& call) {
  if (call.by_page.descale_by_page) {
    return error_text(op, "descale_by_page of False with qv", "True", "latents have scales by key");
  }
  if (!call.scales.v_descale) {
    return {};
  }
  TensorMeta const& scale = *call.scales.v_descale;
  int64_t const blocks = call.v.size[3] / kLatentScaleColumns;
  bool const has_blocks = scale.rank == 3 && scale.size[2] == blocks && blocks > 0 &&
                          call.v.size[3] % kLatentScaleColumns == 0;
  TensorRule const rule = {
      "v_descale",     scale,    3, {call.v.size[0], call.v.size[1], has_blocks ? blocks : 1},
      Dtype::kFloat32, "float32"};
  return check_tensor(op, rule, call.v);
}

std::string check_cache_lengths(char const* op, AttentionCall const& call, int64_t appended) {
  CacheArguments const& cache = call.cache;
  int64_t const capacity = capacity_of(call);
  bool const has_length = cache.cache_seqlens || cache.cache_length >= 0;
  if (cache.cache_length < -1 || (cache.cache_seqlens && cache.cache_length >= 0)) {
    return error_text(op, "cache_seqlens to be a tensor, or a number of 0 or more",
                      cache.cache_seqlens ? "both" : text(cache.cache_length));
  }
  if (appended < 0) {
    return error_text(op, "0 or more new keys", text(appended));
  }
  if (!has_length && (appended > 0 || cache.cu_seqlens_k_new)) {
    return error_text(op, "cache_seqlens with k and v", "None",
                      "it says where in the cache they go");
  }
  if (cache.cache_length > capacity) {
    return error_text(op, text("cache_seqlens of at most ", capacity, ", the slots of a sequence"),
                      text(cache.cache_length));
  }
  int64_t const before = cache.cache_length > 0 ? cache.cache_length : 0;
  if (before + appended > capacity) {
    return error_text(op, text("room for ", appended, " new keys behind ", before),
                      text(capacity, " slots of a sequence"));
  }
  return {};
}

std::string check_cache_memory(char const* op, AttentionCall const& call) {
  for (auto [name, meta] : {NamedTensor{"k_cache", call.k}, NamedTensor{"v_cache", call.v}}) {
    if (meta.device == DeviceType::kCuda && !is_empty(meta) && !tma_can_address(meta)) {
      return error_text(op, text(name, " at a multiple of 16 bytes, and so its strides"),
                        text("address ", meta.address, ", strides ", shape_text(meta.stride, 4)),
                        "a cache is never copied: allocate it with a padded head_dim");
    }
  }
  return {};
}

}  // namespace fa3
