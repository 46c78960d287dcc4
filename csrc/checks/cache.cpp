// Calls on a KV cache: attention, and appends of new keys with rotary.
#include "call/cache_form.h"
#include "call/tma_rules.h"
#include "checks/attention.h"
#include "checks/checks.h"
#include "core/tree_mask.h"
#include "plan/variants.h"

namespace fa3 {
namespace {

// The head dims of the kernel for absorbed MLA.
constexpr int kLatentRotaryDim = 64;
constexpr int kLatentDim = 512;
static_assert(
    search_candidates(Dtype::kBFloat16, kLatentKernel, {kLatentRotaryDim, kLatentDim}).count == 1);

constexpr char const* kSlots = ", the slots of a sequence";

Solver cache_solver(Call const& call) {
  CacheArguments const& cache = call.cache;
  Solver solver = solver_of(call, call.q.dtype == Dtype::kFloat8E4M3);
  if (!solver.lacks("bk")) {
    solver.op = "flash_attn_with_kvcache";
  }
  solver.rename("e", call.is_paged()         ? Letter("N")
                     : cache.cache_batch_idx ? Letter("E")
                                             : Letter("B"));
  solver.rename("c", call.is_paged() ? Letter("P") : Letter("C"));
  solver.rename("bt", cache.cache_batch_idx ? Letter("R") : Letter("B"));
  solver.rename("bs", call.by_page.descale_by_page ? Letter("N") : Letter("B"));
  solver.pack(bool(cache.cu_seqlens_k_new), "bn", "sn", "Sn", "Tn");
  solver.bind("Sk", capacity_of(call), "k_cache");
  return solver;
}

bool check_latent(Solver& solver, Call const& call) {
  int64_t const dims[] = {solver["D"], solver["Dv"]};
  return !call.has_latents() ||
         ((!solver.on_cuda() || (dims[0] == kLatentRotaryDim && dims[1] == kLatentDim) ||
           solver.refuse(text("head dims of ", kLatentRotaryDim, " (q and k_cache) and ",
                              kLatentDim, " (qv and v_cache) with qv"),
                         text(dims[0], " and ", dims[1]))) &&
          (solver["Hk"] == 1 || solver.refuse("one KV head with qv", text(solver["Hk"]))));
}

// Latents have a scale by key: one, or one for each kLatentScaleColumns of v_cache.
bool check_scales(Solver& solver, Call const& call) {
  if (!call.has_latents() || !call.converts()) {
    return check_rows<kCacheScalePass>(solver, call);
  }
  auto const& scale = call.scales.v_descale;
  int64_t const columns = solver["Dv"];
  int64_t const blocks = columns % kLatentScaleColumns == 0 ? columns / kLatentScaleColumns : 1;
  solver.bind("Z", scale && scale->size[2] == blocks ? blocks : 1, "v_cache");
  return check_rows<kLatentScalePass>(solver, call);
}

// Pages hold keys, and what the host knows of the lengths. appended: new keys of each sequence.
bool check_lengths(Solver& solver, Call const& call, int64_t appended) {
  CacheArguments const& cache = call.cache;
  bool const has_length = cache.cache_length != -1;
  int64_t const before = has_length ? cache.cache_length : 0;
  int64_t const capacity = solver["Sk"];
  return (!call.is_paged() || solver.in_range({"k_cache", call.k}, 1, "page size", {1})) &&
         solver.in_range("cache_seqlens", before, {0, capacity, 1, kSlots}) &&
         (!has_length || !cache.cache_seqlens ||
          solver.refuse("cache_seqlens to be a tensor or a number", "both")) &&
         solver.in_range("the number of new keys", appended, {0}) &&
         ((appended == 0 && !cache.cu_seqlens_k_new) || has_length || cache.cache_seqlens ||
          solver.refuse("cache_seqlens with k and v", "None",
                        "it says where in the cache they go")) &&
         (before + appended <= capacity ||
          solver.refuse(text("room for ", appended, " new keys behind ", before),
                        text(capacity, " slots of a sequence")));
}

// Kernels move 16 bytes at a time.
bool check_chunks(Solver& solver, NamedTensor const& tensor) {
  auto const& [name, meta] = tensor;
  return !solver.on_cuda() || is_empty(meta) || has_chunks(meta) ||
         solver.refuse(
             text(name, " and its strides at multiples of ", kTmaAlignment, " bytes"),
             text("address ", meta.address, ", strides ", shape_text(meta.stride, meta.rank)),
             "it is never copied: allocate it whole, with a padded head_dim");
}

// A row of kTreeWords for each query.
bool check_tree(Solver& solver, Call const& call) {
  static_assert(kTreeWords == 4);
  if (!call.tree.tree_mask) {
    return true;
  }
  TensorMeta const& tree = *call.tree.tree_mask;
  int const queries = tree.rank - 2;
  int64_t const most = queries > 0 ? kTreeColumns : kUnlimited;
  bool const has_rows = (tree.size[queries] <= 1 || tree.stride[queries] == kTreeWords) &&
                        (queries == 0 || tree.size[0] <= 1 || tree.stride[0] % kTreeWords == 0) &&
                        tree.address % 16 == 0;
  return (tree.size[queries] <= most ||
          solver.refuse(text("at most ", most, " queries of a sequence with tree_mask"),
                        text(tree.size[queries]))) &&
         (has_rows || solver.refuse("tree_mask with contiguous rows, at a multiple of 16 bytes",
                                    text("strides ", shape_text(tree.stride, tree.rank)),
                                    "call tree_mask.contiguous()"));
}

bool check_on_cache(Solver& solver, Call const& call) {
  if (solver.lacks("bk")) {
    return check_rules<kPackedCachePass>(solver, call) && check_attention(solver, call) &&
           check_tree(solver, call);
  }
  TensorMeta const* const out = pointer_to(call.out);
  if (call.converts()) {
    solver.dtypes[kKeys] = set_of(call.k);  // converts() has compared it
    solver.dtypes[kValues] = kE4M3;
  }
  return check_rows<kCallPass | kCachePass>(solver, call) &&
         check_rules<kCallPass | kCachePass>(solver, call) && check_latent(solver, call) &&
         check_limits(solver, call) && check_scales(solver, call) &&
         check_lengths(solver, call, call.cache.appended) &&
         solver.in_range("shared_prefix", call.prefix.shared_prefix,
                         {0, solver["Sk"], 1, kSlots}) &&
         check_chunks(solver, {"k_cache", call.k}) && check_chunks(solver, {"v_cache", call.v}) &&
         solver.apart("out", out, "k_cache", &call.k, may_share_memory) &&
         solver.apart("out", out, "v_cache", &call.v, may_share_memory) &&
         check_apart<kCallPass | kCachePass>(solver, call, "out", out) && check_tree(solver, call);
}

// ----------------------------------------------------------------------------------------- append
// Latents alone become e4m3: k_cache keeps 16 bits, and new rows have its dtype.
bool quantises_latents(Call const& call) {
  return call.v_new && set_of(call.v) == kE4M3 && set_of(*call.v_new) != kE4M3 &&
         set_of(call.k) != kE4M3;
}

// New rows have the dtype of their cache, or for e4m3 one dtype of 16 bits, on a CPU also of more.
void set_append_types(Solver& solver, Call const& call) {
  DtypeSet const known = kE4M3 | k16Bits | (solver.on_cuda() ? 0 : kCpuOnly);
  bool const is_quantised = call.k_new && set_of(call.k) == kE4M3 && (set_of(*call.k_new) & known);
  auto const& cos = call.rotary.rotary_cos;
  bool const has_wide_tables = solver.is_fp8() && cos && (set_of(*cos) & k16Bits);
  solver.dtypes[kAnchor] = solver.dtypes[kKeys] = solver.dtypes[kValues] = known;
  solver.dtypes[kNewKeys] = set_of(is_quantised ? *call.k_new : call.k);
  solver.dtypes[kNewValues] = set_of(is_quantised              ? *call.k_new
                                     : quantises_latents(call) ? call.k
                                                               : call.v);
  solver.dtypes[kTables] = set_of(has_wide_tables ? *cos : call.q);
}

bool check_written(Solver& solver, char const* name, TensorMeta const* meta) {
  return !meta || !may_overlap(*meta) ||
         solver.refuse(text(name, " with memory for every element, to write to it"),
                       text("strides ", shape_text(meta->stride, meta->rank)),
                       "do not pass an expanded tensor");
}

// rotary_dim is that of the tables. The host knows positions if cache_seqlens is a number.
bool check_rotary(Solver& solver, Call const& call, int64_t appended) {
  if (!call.rotary.rotary_cos) {
    return true;
  }
  int const step = !solver.on_cuda() ? 2 : set_of(call.q) == kE4M3 ? 32 : 16;  // 16 byte pairs
  bool const has_own = call.q.rank == 4 && call.rotary.rotary_per_query;
  int64_t const need = held_by_all(call) + std::max(appended, has_own ? call.q.size[1] : 1);
  return (!call.k_new || call.q.dtype == call.k_new->dtype ||
          solver.refuse(text("q.dtype to be that of k, ", call.k_new->dtype_name),
                        call.q.dtype_name, "rotary_cos and rotary_sin rotate both")) &&
         solver.in_range({"rotary_cos", *call.rotary.rotary_cos}, 0, "positions", {1}) &&
         solver.in_range("rotary_dim, twice rotary_cos.size(1),", 2 * solver["Dr"],
                         {step, solver["D"], step, ", the head_dim"},
                         "append columns of cos = 1 and sin = 0") &&
         (call.rotary.rotary_seqlens || call.cache.cache_seqlens ||
          solver.in_range("the positions of rotary_cos", solver["L"], {need}));
}

// Tensors that an append writes: the caches, and scales per page or latent row. kTensors
// (attention.h) checks all other scales. sets_scales: whether the call gave those to write.
bool check_memory(Solver& solver, Call const& call, bool sets_scales) {
  TensorMeta const* const k_scale = pointer_to(call.scales.k_descale);
  TensorMeta const* const v_scale = pointer_to(call.scales.v_descale);
  bool const sets_pages = call.by_page.descale_by_page && set_of(call.k) != set_of(*call.k_new);
  bool const sets_latents = quantises_latents(call);
  return check_written(solver, "k_cache", &call.k) && check_written(solver, "v_cache", &call.v) &&
         solver.apart("v_cache", &call.v, "k_cache", &call.k) &&
         (!sets_latents || v_scale ||
          solver.refuse("v_descale with 16-bit v for a v_cache of float8_e4m3fn", "None")) &&
         (!(sets_latents || sets_pages) ||
          ((sets_scales ||
            solver.refuse("k_scales or v_scales, those that new keys set", "None")) &&
           check_written(solver, "v_descale", v_scale))) &&
         (!sets_pages || (check_written(solver, "k_descale", k_scale) &&
                          solver.apart("v_descale", v_scale, "k_descale", k_scale)));
}

bool check_count(Solver& solver, NamedTensor const& tensor) {
  auto const& [name, meta] = tensor;
  double const tokens = double(meta.size[0]) * (meta.rank == 4 ? double(meta.size[1]) : 1.0);
  double const columns = double(meta.size[meta.rank - 2]) * double(meta.size[meta.rank - 1]);
  return solver.in_int(tokens, kMostIndex, "the tokens of ", name) &&
         solver.in_int(columns, kMostIndex, "the columns of all heads of ", name);
}

bool check_kernel(Solver& solver, Call const& call) {
  auto const check_columns = [&](NamedTensor const& cache) {
    Range const columns = {0, kUnlimited, kTmaAlignment / element_bytes(cache.meta.dtype)};
    return solver.in_range(cache, 3, "head_dim", columns, "pad the head_dim with zeros");
  };
  return (!call.rotary.rotary_cos ||
          (check_chunks(solver, {"rotary_cos", *call.rotary.rotary_cos}) &&
           check_chunks(solver, {"rotary_sin", *call.rotary.rotary_sin}) &&
           check_count(solver, {"q", call.q}))) &&
         (!call.k_new ||
          (check_columns({"k_cache", call.k}) && check_columns({"v_cache", call.v}) &&
           check_count(solver, {"k", *call.k_new}) && check_count(solver, {"v", *call.v_new})));
}

bool check_rows_to_append(Solver& solver, Call const& call, bool sets_scales) {
  int64_t const appended = call.k_new && call.k_new->rank == 4 ? call.k_new->size[1] : 0;
  set_append_types(solver, call);
  return check_rules<kAppendPass>(solver, call) &&
         check_rows<kCallPass | kCachePass | kAppendPass>(solver, call) &&
         check_lengths(solver, call, appended) &&
         (!call.k_new || check_memory(solver, call, sets_scales)) &&
         check_rotary(solver, call, appended) && (!solver.on_cuda() || check_kernel(solver, call));
}

}  // namespace

std::string check_cache(Call const& call) {
  Solver solver = cache_solver(call);
  check_on_cache(solver, call);
  return solver.error;
}

std::string check_append(Call const& call, bool sets_scales) {
  Solver solver = cache_solver(call);
  check_rows_to_append(solver, call, sets_scales);
  return solver.error;
}

}  // namespace fa3
