// Calls on a KV cache: attention, and appends of new keys with rotary.
#include "call/cache_form.h"
#include "call/tma_rules.h"
#include "checks/attention.h"
#include "checks/checks.h"
#include "core/tree_mask.h"
#include "plan/variants.h"

namespace fa3 {
namespace {

using attention::check_rules;
using attention::kTensors;
using attention::qv_of;
using Call = AttentionCall;
using Rotary = RotaryArguments;

// The head dims of the kernel for absorbed MLA.
constexpr int kLatentRotaryDim = 64;
constexpr int kLatentDim = 512;
static_assert(
    search_candidates(Dtype::kBFloat16, kLatentKernel, {kLatentRotaryDim, kLatentDim}).count == 1);

constexpr char const* kSlots = ", the slots of a sequence";

Solver cache_solver(Call const& call) {
  CacheArguments const& cache = call.cache;
  bool const is_paged = bool(cache.page_table);
  bool const has_index = bool(cache.cache_batch_idx);
  Solver solver = solver_of(call, call.q.dtype == Dtype::kFloat8E4M3);
  if (!solver.lacks("bk")) {
    solver.op = "flash_attn_with_kvcache";
  }
  solver.rename("e", is_paged ? Letter("N") : has_index ? Letter("E") : Letter("B"));
  solver.rename("c", is_paged ? Letter("P") : Letter("C"));
  solver.rename("bt", has_index ? Letter("R") : Letter("B"));
  solver.rename("bs", call.by_page.descale_by_page ? Letter("N") : Letter("B"));
  solver.pack(bool(cache.cu_seqlens_k_new), "bn", "sn", "Sn", "Tn");
  return solver;
}

bool check_pages(Solver& solver, Call const& call) {
  solver.bind("Sk", capacity_of(call), "k_cache");
  return !call.cache.page_table ||
         (solver.in_range({"k_cache", call.k}, 1, "page size", {1}) &&
          (!call.cache.cache_batch_idx ||
           solver.refuse("page_table with a row for each of cache_batch_idx",
                         text(solver["R"], " rows"), "flash_attn_with_kvcache picks them")));
}

bool check_latent(Solver& solver, Call const& call) {
  int64_t const dims[] = {solver["D"], solver["Dv"]};
  return !qv_of(call) ||
         ((!solver.on_cuda() || (dims[0] == kLatentRotaryDim && dims[1] == kLatentDim) ||
           solver.refuse(text("head dims of ", kLatentRotaryDim, " (q and k_cache) and ",
                              kLatentDim, " (qv and v_cache) with qv"),
                         text(dims[0], " and ", dims[1]))) &&
          (solver["Hk"] == 1 || solver.refuse("one KV head with qv", text(solver["Hk"]))));
}

// Latents have a scale by key: one, or one for each kLatentScaleColumns of v_cache.
bool check_scales(Solver& solver, Call const& call) {
  if (!qv_of(call) || !call.converts()) {
    return check_rows<kTensors, kCacheScalePass>(solver, call);
  }
  auto const& scale = call.scales.v_descale;
  int64_t const blocks = solver["Dv"] / kLatentScaleColumns;
  bool const has_blocks =
      scale && scale->size[2] == blocks && solver["Dv"] % kLatentScaleColumns == 0;
  solver.bind("Z", has_blocks ? std::max<int64_t>(blocks, 1) : 1, "v_cache");
  return check_rows<kTensors, kLatentScalePass>(solver, call);
}

// What the host knows of the lengths. appended: new keys of each sequence.
bool check_lengths(Solver& solver, Call const& call, int64_t appended) {
  CacheArguments const& cache = call.cache;
  int64_t const length = cache.cache_length;
  int64_t const before = std::max<int64_t>(length, 0);
  int64_t const capacity = solver["Sk"];
  bool const has_rows = appended > 0 || cache.cu_seqlens_k_new;
  return (length == -1 || solver.in_range("cache_seqlens", length, {0, capacity, 1, kSlots})) &&
         (length == -1 || !cache.cache_seqlens ||
          solver.refuse("cache_seqlens to be a tensor or a number", "both")) &&
         solver.in_range("the number of new keys", appended, {0}) &&
         (!has_rows || length >= 0 || cache.cache_seqlens ||
          solver.refuse("cache_seqlens with k and v", "None",
                        "it says where in the cache they go")) &&
         (before + appended <= capacity ||
          solver.refuse(text("room for ", appended, " new keys behind ", before),
                        text(capacity, " slots of a sequence")));
}

// Kernels move 16 bytes at a time.
bool check_strides(Solver& solver, NamedTensor const& cache) {
  auto const& [name, meta] = cache;
  return !solver.on_cuda() || is_empty(meta) || tma_can_address(meta) ||
         solver.refuse(text(name, " and its strides at multiples of 16 bytes"),
                       text("address ", meta.address, ", strides ", shape_text(meta.stride, 4)),
                       "a cache is never copied: allocate it with a padded head_dim");
}

bool check_out(Solver& solver, Call const& call) {
  TensorMeta const* const out = pointer_to(call.out);
  char const* const cache = out && may_share_memory(*out, call.k)   ? "k_cache"
                            : out && may_share_memory(*out, call.v) ? "v_cache"
                                                                    : nullptr;
  return (!cache || solver.refuse("out with memory of its own", text("the memory of ", cache))) &&
         solver.apart("out", out, "q", &call.q) && solver.apart("out", out, "qv", qv_of(call));
}

bool check_splits(Solver& solver, Call const& call) {
  return solver.in_range("num_splits", call.splits.num_splits, {0, kMaxSplits}) &&
         solver.in_range("split_size", call.execution.split_size, {0});
}

// A row of kTreeWords for each query.
bool check_tree(Solver& solver, Call const& call) {
  static_assert(kTreeWords == 4);
  if (!call.tree.tree_mask) {
    return true;
  }
  TensorMeta const& tree = *call.tree.tree_mask;
  int const words = tree.rank - 1;
  bool const is_dense = tree.rank == 3;
  bool const has_rows = tree.stride[words] == 1 &&
                        (tree.size[words - 1] <= 1 || tree.stride[words - 1] == kTreeWords) &&
                        (!is_dense || tree.size[0] <= 1 || tree.stride[0] % kTreeWords == 0) &&
                        tree.address % 16 == 0;
  return (!is_dense || tree.size[1] <= kTreeColumns ||
          solver.refuse(text("at most ", kTreeColumns, " queries of a sequence with tree_mask"),
                        text(tree.size[1]))) &&
         (has_rows || solver.refuse("tree_mask with contiguous rows, at a multiple of 16 bytes",
                                    text("strides ", shape_text(tree.stride, tree.rank)),
                                    "call tree_mask.contiguous()"));
}

bool check_packed_keys(Solver& solver, Call const& call) {
  return check_rules<kPackedCachePass>(solver, call) && check_attention(solver, call) &&
         check_splits(solver, call) && check_tree(solver, call);
}

bool check_on_cache(Solver& solver, Call const& call) {
  if (call.converts()) {
    solver.dtypes[kKeys] = set_of(call.k);  // converts() has compared it
    solver.dtypes[kValues] = kE4M3;
  }
  return check_device(solver) &&
         check_rows<kTensors, kQueryPass | kCachePass | kRestPass>(solver, call) &&
         check_pages(solver, call) && check_rules<kQueryPass | kCachePass>(solver, call) &&
         check_latent(solver, call) && check_limits(solver, call) && check_scales(solver, call) &&
         check_lengths(solver, call, call.cache.appended) &&
         solver.in_range("shared_prefix", call.prefix.shared_prefix,
                         {0, solver["Sk"], 1, kSlots}) &&
         check_strides(solver, {"k_cache", call.k}) && check_strides(solver, {"v_cache", call.v}) &&
         check_out(solver, call) && check_maxima(solver, call) && check_splits(solver, call) &&
         check_tree(solver, call);
}

// ----------------------------------------------------------------------------------------- append
bool rotates(Call const& call) { return call.rotary.rotary_cos && call.rotary.rotary_sin; }

bool has_rows(Call const& call) { return call.k_new && call.v_new; }

// 16-bit keys for a cache of e4m3; on a CPU also wider ones.
bool quantises(Call const& call, DtypeSet known) {
  return has_rows(call) && set_of(call.k) == kE4M3 && (set_of(*call.k_new) & known & ~kE4M3) != 0;
}

// Latents alone become e4m3: k_cache keeps 16 bits, and new rows have its dtype.
bool quantises_latents(Call const& call) {
  return has_rows(call) && set_of(call.v) == kE4M3 && set_of(*call.v_new) != kE4M3 &&
         set_of(call.k) != kE4M3;
}

// New rows have the dtype of their cache; those that are quantised have one dtype.
void set_append_types(Solver& solver, Call const& call) {
  DtypeSet const known = kE4M3 | k16Bits | (solver.on_cuda() ? 0 : kCpuOnly);
  bool const is_quantised = quantises(call, known);
  auto const& cos = call.rotary.rotary_cos;
  bool const has_wide_tables = solver.is_fp8() && cos && (set_of(*cos) & k16Bits);
  solver.dtypes[kAnchor] = solver.dtypes[kKeys] = solver.dtypes[kValues] = known;
  solver.dtypes[kNewKeys] = set_of(is_quantised ? *call.k_new : call.k);
  solver.dtypes[kNewValues] = set_of(is_quantised              ? *call.k_new
                                     : quantises_latents(call) ? call.k
                                                               : call.v);
  solver.dtypes[kTables] = set_of(has_wide_tables ? *cos : call.q);
}

// Whether two elements may share an address: dimensions that do not lie around one another. Those
// from the rank on have a size of 0.
bool may_overlap(TensorMeta const& meta) {
  int order[5] = {0, 1, 2, 3, 4};
  std::sort(order, order + 5, [&](int a, int b) { return meta.stride[a] < meta.stride[b]; });
  int64_t extent = 0;
  for (int dim : order) {
    if (meta.size[dim] > 1 && meta.stride[dim] <= extent) {
      return true;
    }
    extent += meta.size[dim] > 1 ? (meta.size[dim] - 1) * meta.stride[dim] : 0;
  }
  return false;
}

bool check_written(Solver& solver, char const* name, TensorMeta const* meta) {
  return !meta || is_empty(*meta) || !may_overlap(*meta) ||
         solver.refuse(text(name, " with memory for every element, to write to it"),
                       text("strides ", shape_text(meta->stride, meta->rank)),
                       "do not pass an expanded tensor");
}

// rotary_dim is that of the tables. The host knows the positions after a cache_seqlens that is a
// number.
bool check_rotary(Solver& solver, Call const& call, int64_t appended) {
  CacheArguments const& cache = call.cache;
  if (!rotates(call)) {
    return true;
  }
  constexpr int kStep = 16, kStepOfE4M3 = 32;  // the kernel rotates pairs of 16 bytes at a time
  int const step = !solver.on_cuda() ? 2 : call.q.dtype == Dtype::kFloat8E4M3 ? kStepOfE4M3 : kStep;
  bool const has_own = call.q.rank == 4 && call.rotary.rotary_per_query;
  int64_t const need = held_by_all(call) + std::max(appended, has_own ? call.q.size[1] : 1);
  return (!has_rows(call) || call.q.dtype == call.k_new->dtype ||
          solver.refuse(text("q.dtype to be that of k, ", call.k_new->dtype_name),
                        call.q.dtype_name, "rotary_cos and rotary_sin rotate both")) &&
         solver.in_range({"rotary_cos", *call.rotary.rotary_cos}, 0, "positions", {1}) &&
         solver.in_range("rotary_dim, twice rotary_cos.size(1),", 2 * solver["Dr"],
                         {step, solver["D"], step, ", the head_dim"},
                         "append columns of cos = 1 and sin = 0") &&
         (call.rotary.rotary_seqlens || cache.cache_seqlens ||
          solver.in_range("the positions of rotary_cos", solver["L"], {need}));
}

// Tensors that an append writes: the caches, and scales per page or latent row. kTensors
// (attention.h) checks all other scales.
bool check_memory(Solver& solver, Call const& call) {
  TensorMeta const* const k_scale = pointer_to(call.scales.k_descale);
  TensorMeta const* const v_scale = pointer_to(call.scales.v_descale);
  bool const sets_pages = call.by_page.descale_by_page && set_of(call.k) != set_of(*call.k_new);
  bool const sets_latents = quantises_latents(call);
  return check_written(solver, "k_cache", &call.k) && check_written(solver, "v_cache", &call.v) &&
         solver.apart("v_cache", &call.v, "k_cache", &call.k) &&
         (!sets_latents || v_scale ||
          solver.refuse("v_descale with 16-bit v for a v_cache of float8_e4m3fn", "None")) &&
         (!(sets_latents || sets_pages) || check_written(solver, "v_descale", v_scale)) &&
         (!sets_pages || (check_written(solver, "k_descale", k_scale) &&
                          solver.apart("v_descale", v_scale, "k_descale", k_scale)));
}

bool check_rows_to_append(Solver& solver, Call const& call) {
  int64_t const appended = has_rows(call) && call.k_new->rank == 4 ? call.k_new->size[1] : 0;
  set_append_types(solver, call);
  return check_rules<kAppendPass>(solver, call) &&
         check_rows<kTensors, kQueryPass | kCachePass | kAppendPass>(solver, call) &&
         check_pages(solver, call) && check_lengths(solver, call, appended) &&
         (!has_rows(call) || check_memory(solver, call)) && check_rotary(solver, call, appended);
}

// ----------------------------------------------------------------------------------------- kernel
// What kernels ask for besides: chunks of 16 bytes, and counts in an int.
bool check_chunks(Solver& solver, char const* name, TensorMeta const& meta) {
  return is_empty(meta) || has_chunks(meta) ||
         solver.refuse(
             text(name, " with contiguous columns, and its address and strides at multiples of ",
                  kTmaAlignment, " bytes on a GPU"),
             text("address ", meta.address, ", strides ", shape_text(meta.stride, meta.rank)),
             "allocate it whole, or pad the head_dim");
}

bool check_columns(Solver& solver, NamedTensor const& cache) {
  Range const columns = {0, kUnlimited, kTmaAlignment / element_bytes(cache.meta.dtype)};
  return solver.in_range(cache, 3, "head_dim", columns, "pad the head_dim with zeros");
}

bool check_count(Solver& solver, char const* name, TensorMeta const& meta) {
  constexpr int64_t kMost = int64_t(1) << 30;
  int const rank = meta.rank;
  double const tokens = double(meta.size[0]) * (rank == 4 ? double(meta.size[1]) : 1.0);
  double const columns = double(meta.size[rank - 2]) * double(meta.size[rank - 1]);
  return std::max(tokens, columns) <= double(kMost) ||
         solver.refuse(
             text(name, " with at most ", kMost, " tokens, and as many columns of all heads"),
             shape_text(meta.size, rank), "split the batch");
}

bool check_kernel(Solver& solver, Call const& call, bool sets_scales) {
  Rotary const& rotary = call.rotary;
  bool const is_quantised = has_rows(call) && call.v.dtype != call.v_new->dtype;
  bool const is_by_page = is_quantised && call.by_page.descale_by_page;
  bool const has_latents = is_quantised && !is_by_page && call.k.dtype == call.k_new->dtype;
  return (!rotates(call) || (check_chunks(solver, "rotary_cos", *rotary.rotary_cos) &&
                             check_chunks(solver, "rotary_sin", *rotary.rotary_sin) &&
                             check_count(solver, "q", call.q))) &&
         (!has_rows(call) ||
          (check_columns(solver, {"k_cache", call.k}) &&
           check_columns(solver, {"v_cache", call.v}) && check_count(solver, "k", *call.k_new) &&
           check_count(solver, "v", *call.v_new))) &&
         (sets_scales || !(has_latents || is_by_page) ||
          solver.refuse("k_scales or v_scales, those that new keys set", "None")) &&
         (!has_latents || solver.in_range({"v_cache", call.v}, 3, "head_dim with scales by key",
                                          {kLatentDim, kLatentDim}));
}

}  // namespace

std::string check_cache(Call const& call) {
  Solver solver = cache_solver(call);
  auto const check = solver.lacks("bk") ? check_packed_keys : check_on_cache;
  return error_of(std::move(solver), check, call);
}

std::string check_append(Call const& call) {
  return error_of(cache_solver(call), check_rows_to_append, call);
}

std::string check_append_kernel(Call const& call, bool sets_scales) {
  return error_of(cache_solver(call), check_kernel, call, sets_scales);
}

}  // namespace fa3
