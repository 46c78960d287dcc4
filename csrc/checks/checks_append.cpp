// What an append to a KV cache must look like: check_append() of checks/checks_cache.h.
#include <algorithm>

#include "checks/cache_form.h"
#include "checks/checks.h"
#include "checks/checks_cache.h"
#include "checks/tensor_rule.h"

namespace fa3 {
namespace {

constexpr char const* kOp = "append_and_attend";
// The kernel rotates pairs of 16 bytes at a time.
constexpr int kRotaryStep = 16;
constexpr int kRotaryStepOfE4M3 = 32;

std::string refuse(std::string const& expected, std::string const& got,
                   std::string const& hint = "") {
  return error_text(kOp, expected, got, hint);
}

struct Named {
  char const* name;
  std::optional<TensorMeta> const& meta;
};

bool rotates(AttentionCall const& call) { return call.rotary.rotary_cos && call.rotary.rotary_sin; }

bool has_rows(AttentionCall const& call) { return call.k_new && call.v_new; }

std::string check_given(AttentionCall const& call) {
  if (bool(call.k_new) != bool(call.v_new)) {
    return refuse("k and v together", call.k_new ? "k alone" : "v alone");
  }
  return !has_rows(call) && call.cache.cu_seqlens_k_new
             ? refuse("cu_seqlens_k_new with k and v", "cu_seqlens_k_new alone")
             : "";
}

std::string check_ranks(AttentionCall const& call) {
  int const rank = call.cache.cu_seqlens_k_new ? 3 : 4;
  for (auto [name, meta] : {Named{"k", call.k_new}, Named{"v", call.v_new}}) {
    if (meta && meta->rank != rank) {
      return refuse(text(name, " to have ", rank, " dimensions ",
                         rank == 3 ? "(total, heads, head_dim) with cu_seqlens_k_new"
                                   : "(batch, new, heads, head_dim)"),
                    text(meta->rank));
    }
  }
  int const rank_q = call.lengths.cu_seqlens_q ? 3 : 4;
  return call.q.rank == rank_q
             ? ""
             : refuse(text("q to have ", rank_q, " dimensions"), text(call.q.rank));
}

std::string check_form(AttentionCall const& call) {
  std::string const error = check_cache_form(kOp, call, call.k);
  if (!error.empty()) {
    return error;
  }
  bool const is_dense = has_rows(call) && call.k_new->rank == 4;
  if (is_dense && call.k_new->size[0] != batch_of(call)) {
    return refuse(text("k.size(0) to be the batch, ", batch_of(call)), text(call.k_new->size[0]));
  }
  return {};
}

// New keys of more than 8 bits for a cache of e4m3.
bool quantises(AttentionCall const& call) {
  if (!has_rows(call)) {
    return false;
  }
  Dtype const dtype = call.k_new->dtype;
  bool const is_wide = dtype == Dtype::kFloat32 || dtype == Dtype::kFloat64;
  bool const has_16_bits = dtype == Dtype::kFloat16 || dtype == Dtype::kBFloat16;
  return call.k.dtype == Dtype::kFloat8E4M3 &&
         (has_16_bits || (is_wide && call.k.device != DeviceType::kCuda));
}

// The same for latents alone: new rows have the dtype of k_cache.
bool quantises_latents(AttentionCall const& call) {
  return has_rows(call) && call.v.dtype == Dtype::kFloat8E4M3 &&
         call.v_new->dtype != Dtype::kFloat8E4M3 && call.k.dtype != Dtype::kFloat8E4M3;
}

std::string check_dtype(NamedTensor const& tensor, NamedTensor const& like) {
  return tensor.meta.dtype == like.meta.dtype ? ""
                                              : refuse(text(tensor.name, ".dtype to be that of ",
                                                            like.name, ", ", like.meta.dtype_name),
                                                       tensor.meta.dtype_name);
}

// New rows have the dtype of their cache; those that are quantised have one dtype. What is rotated
// has one dtype too.
std::string check_dtypes_of_rows(AttentionCall const& call) {
  if (!has_rows(call)) {
    return {};
  }
  NamedTensor const q = {"q", call.q};
  NamedTensor const k_cache = {"k_cache", call.k};
  NamedTensor const k = {"k", *call.k_new};
  NamedTensor const v = {"v", *call.v_new};
  bool const is_quantised = quantises(call);
  NamedTensor const of_v = is_quantised ? k
                           : quantises_latents(call) || call.v.dtype == call.k.dtype
                               ? k_cache
                               : NamedTensor{"v_cache", call.v};
  std::string error = is_quantised ? "" : check_dtype(k, k_cache);
  error = error.empty() ? check_dtype(v, of_v) : error;
  return error.empty() && rotates(call) ? check_dtype(q, is_quantised ? k : k_cache) : error;
}

std::string check_dtypes(AttentionCall const& call) {
  TensorMeta const& cache = call.k;
  bool const is_wide = cache.dtype == Dtype::kFloat32 || cache.dtype == Dtype::kFloat64;
  if (cache.dtype == Dtype::kOther || (is_wide && cache.device == DeviceType::kCuda)) {
    return refuse("k_cache.dtype to be float16, bfloat16 or float8_e4m3fn", cache.dtype_name);
  }
  std::string const error = check_dtypes_of_rows(call);
  if (!error.empty()) {
    return error;
  }
  NamedTensor const all[] = {{"v_cache", call.v},
                             {"q", call.q},
                             {"k", has_rows(call) ? *call.k_new : call.k},
                             {"v", has_rows(call) ? *call.v_new : call.v}};
  for (auto [name, meta] : all) {
    if (!same_device(meta, cache)) {
      return refuse(text(name, " on the device of k_cache, ", device_text(cache)),
                    device_text(meta));
    }
  }
  return {};
}

// Heads and head_dim as in the cache, k and v of equally many rows.
std::string check_sizes(AttentionCall const& call) {
  if (!has_rows(call)) {
    return {};
  }
  struct Rule {
    char const* name;
    TensorMeta const& meta;
    char const* cache_name;
    TensorMeta const& cache;
  };
  for (auto const& [name, meta, cache_name, cache] :
       {Rule{"k", *call.k_new, "k_cache", call.k}, Rule{"v", *call.v_new, "v_cache", call.v}}) {
    int const last = meta.rank - 1;
    if (meta.size[last - 1] != cache.size[2] || meta.size[last] != cache.size[3]) {
      return refuse(text(name, " of the heads and the head_dim of ", cache_name, ", ",
                         shape_text(cache.size + 2, 2)),
                    shape_text(meta.size + last - 1, 2));
    }
  }
  int const row_dims = call.k_new->rank - 2;
  if (!std::equal(call.k_new->size, call.k_new->size + row_dims, call.v_new->size)) {
    return refuse(text("v of the rows of k, ", shape_text(call.k_new->size, row_dims)),
                  shape_text(call.v_new->size, row_dims));
  }
  return {};
}

// New keys of each sequence; packed: the host does not know.
int64_t added_of(AttentionCall const& call) {
  return has_rows(call) && call.k_new->rank == 4 ? call.k_new->size[1] : 0;
}

std::string check_lengths(AttentionCall const& call) {
  return check_cache_lengths(kOp, call, added_of(call));
}

// Whether two elements may share an address: dimensions that do not lie around one another. Those
// from the rank on have a size of 0.
bool may_overlap(TensorMeta const& meta) {
  int order[4] = {0, 1, 2, 3};
  std::sort(order, order + 4, [&](int a, int b) { return meta.stride[a] < meta.stride[b]; });
  int64_t extent = 0;
  for (int dim : order) {
    if (meta.size[dim] > 1 && meta.stride[dim] <= extent) {
      return true;
    }
    extent += meta.size[dim] > 1 ? (meta.size[dim] - 1) * meta.stride[dim] : 0;
  }
  return false;
}

std::string check_own_memory(NamedTensor const& tensor) {
  auto [name, meta] = tensor;
  return is_empty(meta) || !may_overlap(meta)
             ? ""
             : refuse(text(name, " with memory for every element, to write to it"),
                      text("strides ", shape_text(meta.stride, meta.rank)),
                      "do not pass an expanded tensor");
}

std::string check_memory(AttentionCall const& call) {
  if (!has_rows(call)) {
    return {};
  }
  for (auto [name, meta] : {NamedTensor{"k_cache", call.k}, NamedTensor{"v_cache", call.v}}) {
    std::string const error = check_own_memory({name, meta});
    if (!error.empty()) {
      return error;
    }
  }
  if (call.k.address != 0 && call.k.address == call.v.address && !is_empty(call.k)) {
    return refuse("v_cache with memory of its own, to append to it", "the memory of k_cache");
  }
  NamedTensor const all[] = {
      {"k_cache", call.k}, {"v_cache", call.v}, {"k", *call.k_new}, {"v", *call.v_new}};
  for (auto [name, meta] : all) {
    int const last = meta.rank - 1;
    if (meta.device == DeviceType::kCuda && meta.size[last] > 1 && meta.stride[last] != 1) {
      return refuse(text(name, ".stride(", last, ") to be 1, the head_dim contiguous"),
                    text(meta.stride[last]), text("call ", name, ".contiguous()"));
    }
  }
  return check_cache_memory(kOp, call);
}

std::string check_table(AttentionCall const& call, NamedTensor const& table) {
  auto [name, meta] = table;
  TensorMeta const& cos = *call.rotary.rotary_cos;
  if (meta.rank != 2) {
    return refuse(text(name, " to have 2 dimensions (positions, rotary_dim / 2)"), text(meta.rank));
  }
  if (!std::equal(meta.size, meta.size + 2, cos.size)) {
    return refuse(text(name, " to have the shape of rotary_cos, ", shape_text(cos.size, 2)),
                  shape_text(meta.size, 2));
  }
  bool const is_16_bit = meta.dtype == Dtype::kFloat16 || meta.dtype == Dtype::kBFloat16;
  bool const is_wide_table = call.q.dtype == Dtype::kFloat8E4M3 && is_16_bit;
  if (meta.dtype != call.q.dtype && !is_wide_table) {
    return refuse(text(name, ".dtype to be that of q, ", call.q.dtype_name), meta.dtype_name);
  }
  if (meta.dtype != cos.dtype) {
    return refuse(text(name, ".dtype to be that of rotary_cos, ", cos.dtype_name), meta.dtype_name);
  }
  if (!same_device(meta, call.k)) {
    return refuse(text(name, " on the device of k_cache, ", device_text(call.k)),
                  device_text(meta));
  }
  if (meta.size[1] > 1 && meta.stride[1] != 1) {
    return refuse(text(name, ".stride(1) to be 1"), text(meta.stride[1]),
                  text("call ", name, ".contiguous()"));
  }
  return {};
}

std::string check_rotary_dim(AttentionCall const& call) {
  int64_t const dim = 2 * call.rotary.rotary_cos->size[1];
  if (dim < 2 || dim > call.k.size[3]) {
    return refuse(
        text("a rotary_dim, twice rotary_cos.size(1), from 2 to the head_dim, ", call.k.size[3]),
        text(dim));
  }
  int const step = call.q.dtype == Dtype::kFloat8E4M3 ? kRotaryStepOfE4M3 : kRotaryStep;
  if (call.k.device == DeviceType::kCuda && dim % step != 0) {
    return refuse(text("a rotary_dim, twice rotary_cos.size(1), that is a multiple of ", step),
                  text(dim), "append columns of cos = 1 and sin = 0");
  }
  return {};
}

// Positions that the host knows: those after a cache_seqlens that is a number.
std::string check_positions(AttentionCall const& call) {
  CacheArguments const& cache = call.cache;
  if (call.rotary.rotary_seqlens || cache.cache_seqlens) {
    return {};
  }
  int64_t const rows = call.rotary.rotary_cos->size[0];
  int64_t const first = cache.cache_length >= 0 ? cache.cache_length : capacity_of(call);
  bool const has_own = call.q.rank == 4 && call.rotary.rotary_per_query;
  int64_t const need = first + std::max(added_of(call), has_own ? call.q.size[1] : 1);
  return rows < need ? refuse(text("rotary_cos of at least ", need, " positions"), text(rows)) : "";
}

std::string check_rotary(AttentionCall const& call) {
  RotaryArguments const& rotary = call.rotary;
  if (!rotary.rotary_cos && !rotary.rotary_sin) {
    return {};  // rotary_seqlens alone says nothing
  }
  if (!rotary.rotary_cos || !rotary.rotary_sin) {
    return refuse("rotary_cos and rotary_sin together",
                  rotary.rotary_cos ? "rotary_sin of None" : "rotary_cos of None");
  }
  std::string error = check_table(call, {"rotary_cos", *rotary.rotary_cos});
  if (error.empty()) {
    error = check_table(call, {"rotary_sin", *rotary.rotary_sin});
  }
  if (error.empty()) {
    error = check_rotary_dim(call);
  }
  return error.empty() ? check_positions(call) : error;
}

// They are set with the rows.
std::string check_scales_of_latents(AttentionCall const& call) {
  if (call.v.size[2] != 1 || !call.scales.v_descale) {
    return refuse("one KV head and v_descale with 16-bit keys, for a v_cache of float8_e4m3fn",
                  call.scales.v_descale ? text(call.v.size[2], " heads") : "None",
                  "such a cache is for qv");
  }
  std::string const error = check_latent_scales(kOp, call);
  return error.empty() ? check_own_memory({"v_descale", *call.scales.v_descale}) : error;
}

std::string check_scales(AttentionCall const& call) {
  if (quantises_latents(call)) {
    return check_scales_of_latents(call);
  }
  if (!quantises(call)) {
    return {};  // those of attention
  }
  std::string by_page = check_by_page(kOp, call, true);
  if (!by_page.empty()) {
    return by_page;
  }
  for (auto const& [name, scale] :
       {Named{"k_descale", call.scales.k_descale}, Named{"v_descale", call.scales.v_descale}}) {
    if (!scale) {
      continue;
    }
    TensorRule const rule = {
        name, *scale, 2, {rows_of_scales(call), call.k.size[2]}, Dtype::kFloat32, "float32"};
    std::string const error = check_tensor(kOp, rule, call.k);
    if (!error.empty()) {
      return error;
    }
    std::string const overlap =
        call.by_page.descale_by_page ? check_own_memory({name, *scale}) : "";
    if (!overlap.empty()) {
      return overlap;
    }
  }
  if (call.by_page.descale_by_page && call.scales.k_descale->address != 0 &&
      call.scales.k_descale->address == call.scales.v_descale->address) {
    return refuse("v_descale with memory of its own, to set those of new pages",
                  "the memory of k_descale");
  }
  return {};
}

using Check = std::string (*)(AttentionCall const&);

// In this order: each one may rely on those before it.
constexpr Check kChecks[] = {check_given,   check_ranks,  check_form,   check_dtypes, check_sizes,
                             check_lengths, check_memory, check_rotary, check_scales};

}  // namespace

std::string check_append(AttentionCall const& call) { return first_error(kChecks, call); }

}  // namespace fa3
