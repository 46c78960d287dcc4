#include "checks/checks_cache.h"

#include <algorithm>
#include <cstring>

#include "checks/cache_form.h"
#include "checks/checks_fp8.h"
#include "checks/checks_general.h"
#include "plan/variants.h"
#include "core/tree_mask.h"

namespace fa3 {
namespace {

// The head dims of the kernel for absorbed MLA.
constexpr int kLatentRotaryDim = 64;
constexpr int kLatentDim = 512;
static_assert(
    search_candidates(Dtype::kBFloat16, kLatentKernel, {kLatentRotaryDim, kLatentDim}).count == 1);

std::string refuse(AttentionCall const& call, std::string const& expected, std::string const& got,
                   std::string const& hint = "") {
  return error_text(call.out ? "attend_cache_out" : "attend_cache", expected, got, hint);
}

std::string check_splits(AttentionCall const& call) {
  SplitArguments const& splits = call.splits;
  if (splits.num_splits < 0 || splits.num_splits > kMaxSplits) {
    return refuse(call, text("num_splits to be from 0 (by plan) to ", kMaxSplits),
                  text(splits.num_splits));
  }
  if (splits.split_size < 0) {
    return refuse(call, "split_size to be 0 (none) or more", text(splits.split_size));
  }
  if (splits.split_size > 0 && splits.num_splits > 1) {
    return refuse(call, "num_splits of 0 or 1 with a split_size", text(splits.num_splits),
                  "split_size alone says where parts begin");
  }
  return {};
}

std::string check_prefix(AttentionCall const& call) {
  int64_t const count = call.prefix.shared_prefix;
  int64_t const capacity = capacity_of(call);
  if (count < 0 || count > capacity) {
    return refuse(call,
                  text("shared_prefix to be from 0 to ", capacity, ", the slots of a sequence"),
                  text(count));
  }
  if (count > 0 && call.cache.cache_leftpad) {
    return refuse(call, "shared_prefix of 0 with cache_leftpad", text(count));
  }
  return {};
}

// Attention of e4m3 tensors has rules of its own.
std::string check_as_forward(AttentionCall const& call) {
  return call.q.dtype == Dtype::kFloat8E4M3 ? check_fp8(call) : check_forward(call);
}

// Under wider queries, e4m3 keys have the rules of the queries' dtype.
AttentionCall with_wide_keys(AttentionCall call) {
  if (call.converts()) {
    call.k.dtype = call.v.dtype = call.q.dtype;  // K of latents has it already
    call.k.dtype_name = call.v.dtype_name = call.q.dtype_name;
  }
  return call;
}

// Packed keys: there is no cache.
std::string check_packed_keys(AttentionCall const& call) {
  CacheArguments const& cache = call.cache;
  char const* const got = cache.page_table                                 ? "page_table"
                          : cache.cache_batch_idx                          ? "cache_batch_idx"
                          : cache.cache_leftpad                            ? "cache_leftpad"
                          : call.prefix.shared_prefix != 0                 ? "shared_prefix"
                          : call.by_page.descale_by_page                   ? "descale_by_page"
                          : cache.cache_seqlens || cache.cache_length >= 0 ? "cache_seqlens"
                          : cache.cu_seqlens_k_new || cache.appended != 0  ? "appended keys"
                          : call.latent.qv                                 ? "qv"
                                                                           : nullptr;
  if (got) {
    return refuse(call, "no argument of a cache with cu_seqlens_k", got,
                  "packed keys are no cache; seqused_k limits them");
  }
  AttentionCall packed = call;
  packed.on_cache = true;
  return check_as_forward(packed);
}

std::string check_ranks(AttentionCall const& call) {
  LengthArguments const& lengths = call.lengths;
  int const rank = lengths.cu_seqlens_q ? 3 : 4;
  if (call.q.rank != rank) {
    return refuse(call,
                  rank == 3 ? "q to have 3 dimensions (total, heads, head_dim) with cu_seqlens_q"
                            : "q to have 4 dimensions (batch, seqlen, heads, head_dim)",
                  text(call.q.rank));
  }
  if (lengths.seqused_k || (lengths.seqused_q && !lengths.cu_seqlens_q)) {
    return refuse(call, "seqused_k only with cu_seqlens_k, and seqused_q only with cu_seqlens_q",
                  lengths.seqused_k ? "seqused_k alone" : "seqused_q alone");
  }
  return {};
}

std::string check_seqused(AttentionCall const& call) {
  if (!call.lengths.seqused_q) {
    return {};
  }
  TensorMeta const& used = *call.lengths.seqused_q;
  std::string const error = check_list("attend_cache", {"seqused_q", used}, call.q, "(batch)");
  int64_t const batch = batch_of(call);
  return error.empty() && used.size[0] != batch
             ? refuse(call, text("seqused_q.size(0) to be the batch, ", batch), text(used.size[0]))
             : error;
}

std::string check_tiles(AttentionCall const& call) {
  return call.lengths.cu_seqlens_q ? check_packed_tiles(call, {"q", call.q}) : "";
}

// The head dims of absorbed MLA, and what it has not.
std::string check_latent_limits(AttentionCall const& call) {
  TensorMeta const& q = call.q;
  int64_t const dims[] = {q.size[q.rank - 1], call.v.size[3]};
  bool const has_its_dims = dims[0] == kLatentRotaryDim && dims[1] == kLatentDim;
  if (q.device == DeviceType::kCuda && !has_its_dims) {
    return refuse(call,
                  text("head dims of ", kLatentRotaryDim, " (q and k_cache) and ", kLatentDim,
                       " (qv and v_cache) with qv"),
                  text(dims[0], " and ", dims[1]));
  }
  if (call.k.size[2] != 1) {
    return refuse(call, "one KV head with qv", text(call.k.size[2]));
  }
  for (auto [name, meta] : {NamedTensor{"q", q}, NamedTensor{"k_cache", call.k}}) {
    if (meta.dtype == Dtype::kFloat8E4M3) {
      return refuse(call, text(name, " of 16 bits with qv"), meta.dtype_name);
    }
  }
  return call.score.softcap != 0.0 ? refuse(call, "softcap of 0 with qv", text(call.score.softcap))
                                   : "";
}

// qv is like q, with the head dim of the values.
std::string check_latent(AttentionCall const& call) {
  if (!call.latent.qv) {
    return {};
  }
  std::string const error = check_latent_limits(call);
  if (!error.empty()) {
    return error;
  }
  TensorMeta const& q = call.q;
  TensorMeta const& qv = *call.latent.qv;
  int const last = q.rank - 1;
  TensorRule rule = {"qv", qv, q.rank, {}, q.dtype, q.dtype_name};
  std::copy(q.size, q.size + last, rule.size);
  rule.size[last] = call.v.size[3];
  char const* const op = call.out ? "attend_cache_out" : "attend_cache";
  std::string const mismatch = check_tensor(op, rule, q);
  if (mismatch.empty() && q.device == DeviceType::kCuda && qv.stride[last] != 1) {
    return refuse(call, text("qv.stride(", last, ") to be 1, the head_dim contiguous"),
                  text(qv.stride[last]), "call qv.contiguous()");
  }
  return mismatch;
}

// All that a cache does not change, by the rules of a dense batch.
std::string check_as_dense(AttentionCall const& call) {
  AttentionCall dense = with_wide_keys(call);
  dense.on_cache = true;
  dense.lengths = {};
  dense.scales = {};
  if (call.q.rank == 3) {
    dense.q = with_batch_of_one(call.q);
    dense.has_batch = false;
    if (call.out && call.out->rank == 3) {
      dense.out = with_batch_of_one(*call.out);
    }
  }
  for (TensorMeta* meta : {&dense.k, &dense.v}) {
    meta->size[0] = dense.q.size[0];
    meta->size[1] = capacity_of(call);
  }
  return check_as_forward(dense);
}

std::string check_out(AttentionCall const& call) {
  if (!call.out) {
    return {};
  }
  int64_t wanted[5] = {};
  int const last = call.q.rank - 1;
  std::copy(call.q.size, call.q.size + last, wanted);
  wanted[last] = call.v.size[3];
  TensorMeta const& out = *call.out;
  bool const fits = out.rank == call.q.rank && std::equal(out.size, out.size + out.rank, wanted);
  if (!fits) {
    return refuse(call, text("out to have the shape ", shape_text(wanted, call.q.rank)),
                  shape_text(out.size, std::min(out.rank, 5)));
  }
  for (auto [name, cache] : {NamedTensor{"k_cache", call.k}, NamedTensor{"v_cache", call.v}}) {
    if (may_share_memory(out, cache)) {
      return refuse(call, "out with memory of its own", text("the memory of ", name));
    }
  }
  return {};
}

std::string check_scales(AttentionCall const& call) {
  struct Named {
    char const* name;
    std::optional<TensorMeta> const& scale;
  };
  char const* const op = call.out ? "attend_cache_out" : "attend_cache";
  std::string const by_own = call.latent.qv && call.converts()
                                 ? check_latent_scales(op, call)
                                 : check_by_page(op, call, call.converts());
  if (!by_own.empty()) {
    return by_own;
  }
  for (auto const& [name, scale] :
       {Named{"q_descale", call.scales.q_descale}, Named{"k_descale", call.scales.k_descale},
        Named{"v_descale", call.scales.v_descale}}) {
    if (!scale) {
      continue;
    }
    bool const is_of_q = name[0] == 'q';
    TensorMeta const& scaled = is_of_q ? call.q : name[0] == 'k' ? call.k : call.v;
    if (scaled.dtype != Dtype::kFloat8E4M3) {
      return refuse(call, text(name, " to be None"), "a tensor",
                    text("it is for ", is_of_q ? "q" : "a cache", " of float8_e4m3fn"));
    }
    if (call.latent.qv) {
      continue;  // v_descale
    }
    int64_t const rows = is_of_q ? batch_of(call) : rows_of_scales(call);
    TensorRule const rule = {name, *scale, 2, {rows, call.k.size[2]}, Dtype::kFloat32, "float32"};
    std::string const error = check_tensor("attend_cache", rule, call.q);
    if (!error.empty()) {
      return error;
    }
  }
  return {};
}

// A row of kTreeWords for each query.
std::string check_tree(AttentionCall const& call) {
  if (!call.tree.tree_mask) {
    return {};
  }
  TensorMeta const& tree = *call.tree.tree_mask;
  TensorMeta const& q = call.q;
  int const rank = q.rank == 4 ? 3 : 2;
  TensorRule const rule = {
      "tree_mask",   tree,   rank, {q.size[0], rank == 3 ? q.size[1] : kTreeWords, kTreeWords},
      Dtype::kOther, "int32"};
  std::string const error = check_tensor("attend_cache", rule, q);
  if (!error.empty()) {
    return error;
  }
  if (std::strcmp(tree.dtype_name, "int32") != 0) {
    return refuse(call, "tree_mask.dtype to be int32", tree.dtype_name, "see pack_tree_mask");
  }
  if (rank == 3 && q.size[1] > kTreeColumns) {
    return refuse(call, text("at most ", kTreeColumns, " queries of a sequence with tree_mask"),
                  text(q.size[1]));
  }
  int const rows = rank - 2;
  bool const fits = tree.stride[rank - 1] == 1 &&
                    (tree.size[rows] <= 1 || tree.stride[rows] == kTreeWords) &&
                    (rank == 2 || tree.stride[0] % kTreeWords == 0) && tree.address % 16 == 0;
  return fits ? ""
              : refuse(call, "tree_mask with contiguous rows, at a multiple of 16 bytes",
                       text("strides ", shape_text(tree.stride, rank)),
                       "call tree_mask.contiguous()");
}

std::string check_form(AttentionCall const& call) {
  return check_cache_form(call.out ? "attend_cache_out" : "attend_cache", call, call.q);
}

std::string check_lengths(AttentionCall const& call) {
  return check_cache_lengths(call.out ? "attend_cache_out" : "attend_cache", call,
                             call.cache.appended);
}

std::string check_memory(AttentionCall const& call) {
  return check_cache_memory(call.out ? "attend_cache_out" : "attend_cache", call);
}

using Check = std::string (*)(AttentionCall const&);

// In this order: each one may rely on those before it.
constexpr Check kChecks[] = {check_ranks,   check_form,     check_seqused, check_latent,
                             check_out,     check_as_dense, check_tiles,   check_scales,
                             check_lengths, check_prefix,   check_memory,  check_splits,
                             check_tree};
constexpr Check kChecksOfPackedKeys[] = {check_packed_keys, check_splits, check_tree};

}  // namespace

std::string check_cache(AttentionCall const& call) {
  return call.lengths.cu_seqlens_k ? first_error(kChecksOfPackedKeys, call)
                                   : first_error(kChecks, call);
}

}  // namespace fa3
