#include "checks/cache_rules.h"

#include "call/cache_form.h"
#include "call/tma_rules.h"

namespace fa3 {
namespace {

using Call = AttentionCall;
using Lengths = LengthArguments;
using Scales = ScaleArguments;
using Rotary = RotaryArguments;
using Cache = CacheArguments;

// Dense, packed.
constexpr Row<Call> kQueries[] = {
    {"q", at<&Call::q>, kAnchor, kColumns, {"B Sq Hq D", "Tq Hq D"}},
    {"cu_seqlens_q", at<&Lengths::cu_seqlens_q>, kInt32, kList, {"", "B+1"}},
};

// A cache has an entry for each sequence, entries that cache_batch_idx picks, or pages.
enum CacheForm { kByBatch, kByIndex, kPaged, kPagedByIndex };

constexpr Row<Call> kCaches[] = {
    {"k_cache", at<&Call::k>, kKeys, kColumns, {"B C Hk D", "E C Hk D", "N P Hk D", "N P Hk D"}},
    {"v_cache",
     at<&Call::v>,
     kValues,
     kColumns,
     {"B C Hk Dv", "E C Hk Dv", "N P Hk Dv", "N P Hk Dv"}},
    {"page_table", at<&Cache::page_table>, kInt32, kList, {"", "", "B Np", "R Np"}},
};

constexpr Row<Call> kLists[] = {
    {"cache_seqlens", at<&Cache::cache_seqlens>, kInt32, kList, {"B"}},
    {"cache_batch_idx", at<&Cache::cache_batch_idx>, kInt32, kList, {"B"}},
    {"cache_leftpad", at<&Cache::cache_leftpad>, kInt32, kList, {"B"}},
    {"cu_seqlens_k_new", at<&Cache::cu_seqlens_k_new>, kInt32, kList, {"B+1"}},
    {"rotary_seqlens", at<&Rotary::rotary_seqlens>, kInt32, kList, {"B"}},
};

// By batch, by page.
constexpr Row<Call> kScales[] = {
    {"k_descale", at<&Scales::k_descale>, kFloat32, kAny, {"B Hk", "N Hk"}},
    {"v_descale", at<&Scales::v_descale>, kFloat32, kAny, {"B Hk", "N Hk"}},
};

constexpr Row<Call> kLatentScales[] = {
    {"v_descale", at<&Scales::v_descale>, kFloat32, kAny, {"B C Z", "E C Z", "N P Z", "N P Z"}},
};

CacheForm form_of(Call const& call) {
  bool const is_paged = bool(call.cache.page_table);
  bool const has_index = bool(call.cache.cache_batch_idx);
  return is_paged ? (has_index ? kPagedByIndex : kPaged) : has_index ? kByIndex : kByBatch;
}

template <auto const& kTable>
std::string check_by_form(Solver& solver, Call const& call) {
  switch (form_of(call)) {
    case kByBatch:
      return check_rows<kTable, kByBatch>(solver, call);
    case kByIndex:
      return check_rows<kTable, kByIndex>(solver, call);
    case kPaged:
      return check_rows<kTable, kPaged>(solver, call);
    case kPagedByIndex:
      return check_rows<kTable, kPagedByIndex>(solver, call);
  }
  return {};
}

std::string check_queries(Solver& solver, Call const& call) {
  return call.lengths.cu_seqlens_q ? check_rows<kQueries, 1>(solver, call, " with cu_seqlens_q")
                                   : check_rows<kQueries, 0>(solver, call);
}

std::string check_caches(Solver& solver, Call const& call) {
  return check_by_form<kCaches>(solver, call);
}

std::string check_lists(Solver& solver, Call const& call) {
  return check_rows<kLists>(solver, call);
}

std::string check_pages(Solver const& solver, Call const& call) {
  if (call.cache.page_table && solver["P"] < 1) {
    return solver.refuse("k_cache.size(1), the page size, to be at least 1", text(solver["P"]));
  }
  // flash_attn_with_kvcache has picked these rows, where table and list are right.
  if (form_of(call) == kPagedByIndex) {
    return solver.refuse("page_table with a row for each of cache_batch_idx",
                         text(solver["R"], " rows"), "flash_attn_with_kvcache picks them");
  }
  return {};
}

}  // namespace

std::string check_cache_tensors(Solver& solver, Call const& call) {
  std::string error =
      first_error<check_queries, check_caches, check_lists, check_pages>(solver, call);
  solver.bind("Sk", capacity_of(call), "k_cache");
  return error;
}

std::string check_by_page(Solver const& solver, Call const& call, bool is_converted) {
  if (!call.by_page.descale_by_page) {
    return {};
  }
  if (!call.cache.page_table) {
    return solver.refuse("descale_by_page with page_table", "no pages",
                         "a dense cache has scales of (batch, heads_k)");
  }
  if (!is_converted) {
    return solver.refuse("descale_by_page with a cache of float8_e4m3fn, and q of 16 bits",
                         text(call.k.dtype_name, " and ", call.q.dtype_name));
  }
  ScaleArguments const& scales = call.scales;
  if (!scales.k_descale || !scales.v_descale) {
    return solver.refuse("k_descale and v_descale with descale_by_page",
                         text(scales.k_descale ? "v_descale" : "k_descale", " of None"));
  }
  return {};
}

std::string check_cache_scales(Solver& solver, Call const& call) {
  return call.by_page.descale_by_page ? check_rows<kScales, 1>(solver, call)
                                      : check_rows<kScales, 0>(solver, call);
}

std::string check_latent_scales(Solver& solver, Call const& call) {
  if (call.by_page.descale_by_page) {
    return solver.refuse("descale_by_page of False with qv", "True", "latents have scales by key");
  }
  if (!call.scales.v_descale) {
    return {};
  }
  TensorMeta const& scale = *call.scales.v_descale;
  int64_t const blocks = solver["Dv"] / kLatentScaleColumns;
  bool const has_blocks = scale.rank == 3 && scale.size[2] == blocks && blocks > 0 &&
                          solver["Dv"] % kLatentScaleColumns == 0;
  solver.bind("Z", has_blocks ? blocks : 1, "v_cache");
  return check_by_form<kLatentScales>(solver, call);
}

std::string check_cache_lengths(Solver const& solver, Call const& call, int64_t appended) {
  Cache const& cache = call.cache;
  int64_t const capacity = capacity_of(call);
  bool const has_length = cache.cache_seqlens || cache.cache_length >= 0;
  if (cache.cache_length < -1 || (cache.cache_seqlens && cache.cache_length >= 0)) {
    return solver.refuse("cache_seqlens to be a tensor, or a number of 0 or more",
                         cache.cache_seqlens ? "both" : text(cache.cache_length));
  }
  if (appended < 0) {
    return solver.refuse("0 or more new keys", text(appended));
  }
  if (!has_length && (appended > 0 || cache.cu_seqlens_k_new)) {
    return solver.refuse("cache_seqlens with k and v", "None",
                         "it says where in the cache they go");
  }
  if (cache.cache_length > capacity) {
    return solver.refuse(text("cache_seqlens of at most ", capacity, ", the slots of a sequence"),
                         text(cache.cache_length));
  }
  int64_t const before = cache.cache_length > 0 ? cache.cache_length : 0;
  if (before + appended > capacity) {
    return solver.refuse(text("room for ", appended, " new keys behind ", before),
                         text(capacity, " slots of a sequence"));
  }
  return {};
}

std::string check_cache_memory(Solver const& solver, Call const& call) {
  for (auto [name, meta] : {NamedTensor{"k_cache", call.k}, NamedTensor{"v_cache", call.v}}) {
    if (meta.device == DeviceType::kCuda && !is_empty(meta) && !tma_can_address(meta)) {
      return solver.refuse(text(name, " and its strides at multiples of 16 bytes"),
                           text("address ", meta.address, ", strides ", shape_text(meta.stride, 4)),
                           "a cache is never copied: allocate it with a padded head_dim");
    }
  }
  return {};
}

}  // namespace fa3
