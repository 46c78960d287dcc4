// Calls of attention on a KV cache.
#include "call/cache_form.h"
#include "checks/cache_rules.h"
#include "checks/checks.h"
#include "core/tree_mask.h"
#include "plan/variants.h"

namespace fa3 {
namespace {

using Call = AttentionCall;
using Lengths = LengthArguments;
using Scales = ScaleArguments;
using Tree = TreeArguments;
using Latent = LatentArgument;

static_assert(
    search_candidates(Dtype::kBFloat16, kLatentKernel, {kLatentRotaryDim, kLatentDim}).count == 1);

// Dense, packed.
constexpr Row<Call> kTable[] = {
    {"seqused_q", at<&Lengths::seqused_q>, kInt32, kList, {"", "B"}},
    {"qv", at<&Latent::qv>, kLikeAnchor, kColumns, {"B Sq Hq Dv", "Tq Hq Dv"}},
    {"out", at<&Call::out>, kOut, kOwnColumns, {"B Sq Hq Dv", "Tq Hq Dv"}},
    {"q_descale", at<&Scales::q_descale>, kFloat32, kAny, {"B Hk", "B Hk"}},
};

static_assert(kTreeWords == 4);
constexpr Row<Call> kTree[] = {
    {"tree_mask", at<&Tree::tree_mask>, kInt32, kAny, {"B Sq 4", "Tq 4"}},
};

bool has_packed_queries(Call const& call) { return bool(call.lengths.cu_seqlens_q); }

std::string check_form(Solver const& solver, Call const& call) {
  LengthArguments const& lengths = call.lengths;
  if (lengths.seqused_k || (lengths.seqused_q && !lengths.cu_seqlens_q)) {
    return solver.refuse("seqused_k only with cu_seqlens_k, and seqused_q only with cu_seqlens_q",
                         lengths.seqused_k ? "seqused_k alone" : "seqused_q alone");
  }
  return {};
}

std::string check_latent_dtypes(Solver const& solver, Call const& call) {
  for (auto [name, meta] : {NamedTensor{"q", call.q}, NamedTensor{"k_cache", call.k}}) {
    if (call.latent.qv && meta.dtype == Dtype::kFloat8E4M3) {
      return solver.refuse(text(name, " of 16 bits with qv"), meta.dtype_name);
    }
  }
  return {};
}

// The head dims of absorbed MLA, and what it has not.
std::string check_latent(Solver const& solver, Call const& call) {
  if (!call.latent.qv) {
    return {};
  }
  int64_t const dims[] = {solver["D"], solver["Dv"]};
  if (solver.on_cuda() && (dims[0] != kLatentRotaryDim || dims[1] != kLatentDim)) {
    return solver.refuse(text("head dims of ", kLatentRotaryDim, " (q and k_cache) and ",
                              kLatentDim, " (qv and v_cache) with qv"),
                         text(dims[0], " and ", dims[1]));
  }
  if (solver["Hk"] != 1) {
    return solver.refuse("one KV head with qv", text(solver["Hk"]));
  }
  return call.score.softcap != 0.0 ? solver.refuse("softcap of 0 with qv", text(call.score.softcap))
                                   : "";
}

std::string check_rest(Solver& solver, Call const& call) {
  return has_packed_queries(call) ? check_rows<kTable, 1>(solver, call)
                                  : check_rows<kTable, 0>(solver, call);
}

std::string check_sizes(Solver const& solver, Call const& call) {
  std::string const error = check_limits(solver, call);
  return !error.empty()             ? error
         : has_packed_queries(call) ? check_tiles(solver, "q", "Tq", "Hq")
                                    : check_tiles(solver, "q", "Sq", "Hq");
}

// Scales are for tensors of e4m3.
std::string check_scales(Solver& solver, Call const& call) {
  struct Scaled {
    char const* name;
    std::optional<TensorMeta> const& scale;
    TensorMeta const& x;
  };
  bool const has_latents = call.latent.qv && call.converts();
  std::string error = has_latents ? check_latent_scales(solver, call)
                                  : check_by_page(solver, call, call.converts());
  if (!error.empty()) {
    return error;
  }
  ScaleArguments const& scales = call.scales;
  for (auto const& [name, scale, x] : {Scaled{"q_descale", scales.q_descale, call.q},
                                       Scaled{"k_descale", scales.k_descale, call.k},
                                       Scaled{"v_descale", scales.v_descale, call.v}}) {
    if (scale && x.dtype != Dtype::kFloat8E4M3) {
      return solver.refuse(
          text(name, " to be None"), "a tensor",
          text("it is for ", name[0] == 'q' ? "q" : "a cache", " of float8_e4m3fn"));
    }
  }
  return has_latents ? "" : check_cache_scales(solver, call);
}

std::string check_lengths(Solver const& solver, Call const& call) {
  return check_cache_lengths(solver, call, call.cache.appended);
}

std::string check_prefix(Solver const& solver, Call const& call) {
  int64_t const count = call.prefix.shared_prefix;
  int64_t const capacity = capacity_of(call);
  if (count < 0 || count > capacity) {
    return solver.refuse(
        text("shared_prefix to be from 0 to ", capacity, ", the slots of a sequence"), text(count));
  }
  return count > 0 && call.cache.cache_leftpad
             ? solver.refuse("shared_prefix of 0 with cache_leftpad", text(count))
             : "";
}

std::string check_out_memory(Solver const& solver, Call const& call) {
  if (!call.out) {
    return {};
  }
  TensorMeta const& out = *call.out;
  auto const& qv = call.latent.qv;
  char const* const other = may_share_memory(out, call.k)   ? "k_cache"
                            : may_share_memory(out, call.v) ? "v_cache"
                            : shares_memory(out, call.q)    ? "q"
                            : qv && shares_memory(out, *qv) ? "qv"
                                                            : nullptr;
  return other ? solver.refuse("out with memory of its own", text("the memory of ", other)) : "";
}

std::string check_splits(Solver const& solver, Call const& call) {
  SplitArguments const& splits = call.splits;
  int64_t const split_size = call.execution.split_size;
  if (splits.num_splits < 0 || splits.num_splits > kMaxSplits) {
    return solver.refuse(text("num_splits to be from 0 (by plan) to ", kMaxSplits),
                         text(splits.num_splits));
  }
  if (split_size < 0) {
    return solver.refuse("split_size to be 0 (none) or more", text(split_size));
  }
  return split_size > 0 && splits.num_splits > 1
             ? solver.refuse("num_splits of 0 or 1 with a split_size", text(splits.num_splits),
                             "split_size alone says where parts begin")
             : "";
}

// A row of kTreeWords for each query.
std::string check_tree(Solver& solver, Call const& call) {
  if (!call.tree.tree_mask) {
    return {};
  }
  std::string const error = has_packed_queries(call) ? check_rows<kTree, 1>(solver, call)
                                                     : check_rows<kTree, 0>(solver, call);
  if (!error.empty()) {
    return error;
  }
  TensorMeta const& tree = *call.tree.tree_mask;
  int const rank = tree.rank;
  if (rank == 3 && tree.size[1] > kTreeColumns) {
    return solver.refuse(text("at most ", kTreeColumns, " queries of a sequence with tree_mask"),
                         text(tree.size[1]));
  }
  int const rows = rank - 2;
  bool const fits = tree.stride[rank - 1] == 1 &&
                    (tree.size[rows] <= 1 || tree.stride[rows] == kTreeWords) &&
                    (rank == 2 || tree.size[0] <= 1 || tree.stride[0] % kTreeWords == 0) &&
                    tree.address % 16 == 0;
  return fits ? ""
              : solver.refuse("tree_mask with contiguous rows, at a multiple of 16 bytes",
                              text("strides ", shape_text(tree.stride, rank)),
                              "call tree_mask.contiguous()");
}

// ------------------------------------------------------------------------------------ packed keys
std::string check_no_cache(Solver const& solver, Call const& call) {
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
  return got ? solver.refuse("no argument of a cache with cu_seqlens_k", got,
                             "packed keys are no cache; seqused_k limits them")
             : "";
}

std::string check_packed_attention(Solver& solver, Call const& call) {
  return solver.is_fp8() ? check_scaled_attention(solver, call) : check_attention(solver, call);
}

}  // namespace

std::string check_cache(Call const& call) {
  Solver solver = solver_of(call.out ? "attend_cache_out" : "attend_cache", call,
                            call.q.dtype == Dtype::kFloat8E4M3);
  if (call.lengths.cu_seqlens_k) {
    return first_error<check_no_cache, check_packed_attention, check_splits, check_tree>(solver,
                                                                                         call);
  }
  if (call.converts()) {
    solver.set(kValues, kE4M3);
    // converts() has compared it: e4m3, or with qv the dtype of q.
    solver.set(kKeys, set_of(call.k.dtype));
  }
  return first_error<check_form, check_device, check_latent_dtypes, check_cache_tensors,
                     check_latent, check_rest, check_sizes, check_sinks, check_scales,
                     check_lengths, check_prefix, check_cache_memory, check_out_memory,
                     check_maxima, check_splits, check_tree>(solver, call);
}

}  // namespace fa3
