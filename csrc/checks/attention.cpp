// Calls of attention: without a cache, forward and backward; on a KV cache; appends of new keys
// with rotary.
#include "checks/attention.h"

#include <cmath>

#include "call/cache_form.h"
#include "checks/checks.h"
#include "plan/variants.h"

namespace fa3 {
namespace {

// FP8: TMA takes strides of 16 bytes, and MMAs take 16 columns at a time.
bool check_head_dims(Solver& solver, Call const& call) {
  if (!solver.on_cuda()) {
    return solver.in_range("D", {1}) && solver.in_range("Dv", {1});
  }
  int const step = solver.is_fp8() ? 16 : 8;
  char const* const note = solver.is_fp8()                                   ? " with float8_e4m3fn"
                           : call.execution.split_size > 0 && !call.on_cache ? " with split_size"
                           : call.choice.keys_chosen && !call.latent.qv      ? " with indices"
                           : call.has_lists() && call.has_softcap() ? " with mask and softcap"
                                                                    : "";
  Range const range = {step, *note ? kMaxNarrowHeadDim : kMaxHeadDim, step, note};
  bool const is_padded = solver["D"] % step == 0 || solver["D"] > range.most;
  bool const halves_values = solver["D"] <= kLongValuesHeadDim && !solver.is_fp8();
  return solver.in_range("D", range,
                         is_padded ? "" : "pad q, k and v with zeros, and pass softmax_scale") &&
         solver.in_range("Dv", halves_values ? Range{step, kMaxHeadDim, step} : range);
}

bool check_numbers(Solver& solver, Call const& call) {
  ScoreArguments const& score = call.score;
  int const sm_count = call.device.sm_count;
  auto const is_positive = [&](char const* name, double number) {
    return (std::isfinite(float(number)) && float(number) > 0.f) ||
           solver.refuse(text(name, " a positive finite float32"), text(number));
  };
  return is_positive("softmax_scale to be", score.softmax_scale.value_or(1.0)) &&
         (score.softcap == 0.0 || is_positive("softcap to be 0 (none) or", score.softcap)) &&
         solver.in_range("sm_margin", call.execution.sm_margin,
                         {0, sm_count > 0 ? sm_count - 1 : kUnlimited},
                         "it is the number of SMs to leave to other kernels") &&
         solver.in_range("window_size[0]", score.window_left, {-1}) &&
         solver.in_range("window_size[1]", score.window_right, {-1}) &&
         solver.in_range("attention_chunk", score.attention_chunk, {0}) &&
         solver.in_range("num_splits", call.splits.num_splits, {0, kMaxSplits}) &&
         solver.in_range("split_size", call.execution.split_size, {0});
}

// The number of tiles of q or k fits into an int; pack_gqa at most doubles it.
bool check_tiles(Solver& solver, bool is_packed, Letter rows, Letter heads) {
  double const full = double(solver[rows]) / 64, batch = double(solver["B"]);
  double const tiles =
      is_packed ? std::floor(full) + std::max(batch, 1.0) : batch * std::ceil(full);
  return solver.in_int(2 * tiles * double(solver[heads]), "twice the tiles of ",
                       solver.binder(rows), ", 64 rows each,");
}

Solver solver_of(Call const& call, bool is_fp8) {
  bool const on_cuda = call.q.device == DeviceType::kCuda;
  Solver solver(call.op(), {"q", call.q}, is_fp8 ? kE4M3 : on_cuda ? k16Bits : k16Bits | kCpuOnly);
  if (is_fp8) {
    solver.dtypes[kOut] = k16Bits;
  }
  solver.pack(call.has_packed_queries(), "b", "s", "Sq", "Tq");
  solver.pack(bool(call.lengths.cu_seqlens_k), "bk", "sk", "Sk", "Tk");
  solver.rename("bs", call.by_page.descale_by_page ? Letter("N") : Letter("B"));
  if (call.on_cache) {
    bool const is_paged = call.is_paged(), picks = bool(call.cache.cache_batch_idx);
    solver.rename("e", is_paged ? Letter("N") : picks ? Letter("E") : Letter("B"));
    solver.rename("c", is_paged ? Letter("P") : Letter("C"));
    solver.rename("bt", picks ? Letter("R") : Letter("B"));
    solver.pack(bool(call.cache.cu_seqlens_k_new), "bn", "sn", "Sn", "Tn");
    solver.bind("Sk", capacity_of(call), "k_cache");
    // Latents have a scale by key: one, or one for each kLatentScaleColumns of v_cache.
    int64_t const columns = call.v.size[3];
    solver.bind("Z", columns % kLatentScaleColumns ? 1 : columns / kLatentScaleColumns, "v_cache");
  }
  if (!call.on_cache || call.lengths.cu_seqlens_k) {
    // Blocks that have scales, and tiles that have lists; of packed sequences one after another.
    bool const is_packed = call.is_packed();
    auto const bind = [&](Letter letter, TensorMeta const& x, int size, char const* name,
                          int after = 0) {
      int64_t const rows = x.size[is_packed ? 0 : 1];
      int64_t const packed = rows / size + call.batch() + after;
      solver.bind(letter, is_packed ? packed : (rows + size - 1) / size, name);
    };
    solver.rename("bz", "Bz");
    solver.bind("Bz", is_packed ? 1 : call.batch(), "q");
    bind("Zq", call.q, kScaleBlockQueries, "q");
    bind("Zk", call.k, kScaleBlockKeys, "k");
    bind("Lq", call.q, call.listed_rows(), "q", 1);  // one for rows after all sequences
    bind("Lk", call.k, kListedKeys, "k", 1);
  }
  return solver;
}

bool check_limits(Solver& solver, Call const& call) {
  return (call.q.device != DeviceType::kOther ||
          solver.refuse("q on a CPU or CUDA device", device_text(call.q))) &&
         solver.in_range("Hk", {1}) &&
         solver.in_range("Hq", {0, kUnlimited, solver["Hk"], ", the KV heads"},
                         call.q.rank == 3 ? "tensors are (total, heads, head_dim)"
                                          : "tensors are (batch, seqlen, heads, head_dim)") &&
         check_head_dims(solver, call) &&
         solver.in_int(double(solver["sk"]), "the keys of a sequence") &&
         (!call.tree.tree_mask || call.has_packed_queries() ||
          solver.in_range("s", {0, kTreeColumns, 1, " with tree_mask"})) &&
         check_numbers(solver, call) && check_tiles(solver, solver.lacks("b"), "s", "Hq") &&
         (!call.is_backward || check_tiles(solver, solver.lacks("bk"), "sk", "Hk"));
}

bool check_attention(Solver& solver, Call const& call) {
  constexpr unsigned kPasses = kCallPass | kKeyPass;
  return check_rules<kPasses>(solver, call) && check_rows<kPasses>(solver, call) &&
         check_limits(solver, call) && (!solver.is_fp8() || check_rows<kScalePass>(solver, call)) &&
         (!solver.on_cuda() || call.has_lists() ||
          !(call.mask.mask_rows || call.mask.mask_blocks) ||
          solver.refuse("lists with mask_rows or mask_blocks", "None")) &&
         check_memory<kPasses>(solver, call);
}

// ---------------------------------------------------------------------------------------- a cache
// The sizes of the kernel for absorbed MLA.
bool check_latent(Solver& solver, Call const& call) {
  static_assert(search_candidates(Dtype::kBFloat16, kLatentKernel, {64, 512}).count == 1);
  auto const is = [&](Letter letter, int64_t size) {
    return solver.in_range(letter, {size, size, 1, " with qv"});
  };
  return !call.has_latents() ||
         (is("Hk", 1) && (!solver.on_cuda() || (is("D", 64) && is("Dv", 512))));
}

// Pages hold keys; what the host knows of the lengths.
bool check_lengths(Solver& solver, Call const& call) {
  CacheArguments const& cache = call.cache;
  bool const has_length = cache.cache_length != -1;
  int64_t const before = has_length ? cache.cache_length : 0;
  int64_t const capacity = solver["Sk"], step = call.is_paged() ? solver["P"] : 1;
  char const* const slots = ", the slots of a sequence";
  return (!call.is_paged() || solver.in_range("P", {1})) &&
         solver.in_range("cache_seqlens", before, {0, capacity, 1, slots}) &&
         solver.in_range("shared_prefix", call.prefix.shared_prefix, {0, capacity, step, slots},
                         step > 1 ? "share whole pages only" : "") &&
         (!has_length || !cache.cache_seqlens ||
          solver.refuse("cache_seqlens to be a tensor or a number", "both")) &&
         solver.in_range("the number of new keys", cache.appended,
                         {0, capacity - before, 1, ", the free slots of a sequence"});
}

bool check_on_cache(Solver& solver, Call const& call) {
  constexpr unsigned kPasses = kCallPass | kCachePass;
  if (solver.lacks("bk")) {
    return check_rules<kPackedPass>(solver, call) && check_attention(solver, call);
  }
  if (call.converts()) {
    solver.dtypes[kKeys] = set_of(call.k);  // converts() has compared it
    solver.dtypes[kValues] = kE4M3;
  }
  return check_rows<kPasses>(solver, call) && check_rules<kPasses>(solver, call) &&
         check_latent(solver, call) && check_limits(solver, call) &&
         (call.has_latents() && call.converts() ? check_rows<kLatentScalePass>(solver, call)
                                                : check_rows<kScalePass>(solver, call)) &&
         check_lengths(solver, call) && check_memory<kPasses>(solver, call);
}

// ----------------------------------------------------------------------------------------- append
// New rows have the dtype of their cache, or for e4m3 one dtype of 16 bits, on a CPU also of more;
// that of q, if both are rotated.
void set_append_types(Solver& solver, Call const& call) {
  DtypeSet const known = kE4M3 | k16Bits | (solver.on_cuda() ? 0 : kCpuOnly);
  bool const is_quantised = call.k_new && set_of(call.k) == kE4M3 && (set_of(*call.k_new) & known);
  auto const& cos = call.rotary.rotary_cos;
  bool const has_wide_tables = solver.is_fp8() && cos && (set_of(*cos) & k16Bits);
  solver.dtypes[kAnchor] = solver.dtypes[kKeys] = solver.dtypes[kValues] = known;
  solver.dtypes[kNewK] = set_of(cos ? call.q : is_quantised ? *call.k_new : call.k);
  solver.dtypes[kNewV] = set_of(is_quantised              ? *call.k_new
                                : quantises_latents(call) ? call.k
                                                          : call.v);
  solver.dtypes[kTables] = set_of(has_wide_tables ? *cos : call.q);
}

// rotary_dim is that of the tables. The host knows positions if cache_seqlens is a number.
bool check_rotary(Solver& solver, Call const& call) {
  int const step = !solver.on_cuda() ? 2 : is_fp8(call.q) ? 32 : 16;  // 16 byte pairs
  bool const has_own = call.q.rank == 4 && call.rotary.rotary_per_query;
  int64_t const rows = std::max(call.cache.appended, has_own ? call.q.size[1] : 1);
  bool const is_known = !call.rotary.rotary_seqlens && !call.cache.cache_seqlens;
  return !call.rotary.rotary_cos ||
         (solver.in_range("L", {is_known ? held_by_all(call) + rows : 1}) &&
          solver.in_range("rotary_dim, twice rotary_cos.size(1),", 2 * solver["Dr"],
                          {step, solver["D"], step, ", the head_dim"},
                          "append columns of cos = 1 and sin = 0"));
}

// Tensors that an append writes: the caches, and scales per page or latent row. kTensors
// (attention.h) checks all other scales. sets_scales: whether the call gave those to write.
bool check_written(Solver& solver, Call const& call, bool sets_scales) {
  bool const sets_pages = call.by_page.descale_by_page && set_of(call.k) != set_of(*call.k_new);
  bool const sets_values = sets_pages || quantises_latents(call);
  auto const is_written = [&](char const* name, TensorMeta const* meta) {
    return !meta || !may_overlap(*meta) ||
           solver.refuse(text(name, " with memory for every element, to write to it"),
                         text("strides ", shape_text(meta->stride, meta->rank)),
                         "do not pass an expanded tensor");
  };
  TensorMeta const* const k_scale = sets_pages ? pointer_to(call.scales.k_descale) : nullptr;
  TensorMeta const* const v_scale = sets_values ? pointer_to(call.scales.v_descale) : nullptr;
  return is_written("k_cache", &call.k) && is_written("v_cache", &call.v) &&
         solver.apart("v_cache", &call.v, "k_cache", &call.k) &&
         (!sets_values || sets_scales ||
          solver.refuse("k_scales or v_scales, those that new keys set", "None")) &&
         is_written("k_descale", k_scale) && is_written("v_descale", v_scale) &&
         solver.apart("v_descale", v_scale, "k_descale", k_scale);
}

bool check_kernel(Solver& solver, Call const& call) {
  Range const columns = {0, kUnlimited, call.converts() ? 16 : 1,
                         " to append to a cache of float8_e4m3fn"};
  auto const has_rows = [&](Letter batch, Letter rows, Letter heads, Letter head_dim) {
    double const tokens = double(solver.lacks(batch) ? 1 : solver["B"]) * double(solver[rows]);
    double const width = double(solver[heads]) * double(solver[head_dim]);
    return solver.in_int(std::max(tokens, width), "the tokens, or the columns of all heads, of ",
                         solver.binder(rows));
  };
  return (!call.rotary.rotary_cos || has_rows("b", "s", "Hq", "D")) &&
         (!call.k_new || (solver.in_range("D", columns, "pad it with zeros") &&
                          solver.in_range("Dv", columns, "pad it with zeros") &&
                          has_rows("bn", "sn", "Hk", "D") && has_rows("bn", "sn", "Hk", "Dv")));
}

}  // namespace

std::string check_call(Call const& call, bool is_fp8) {
  Solver solver = solver_of(call, is_fp8);
  return check_attention(solver, call) ? "" : solver.error;
}

std::string check_cache(Call const& call) {
  Solver solver = solver_of(call, is_fp8(call.q));
  return check_on_cache(solver, call) ? "" : solver.error;
}

std::string check_append(Call const& call, bool sets_scales) {
  Solver solver = solver_of(call, is_fp8(call.q));
  set_append_types(solver, call);
  bool const is_fine = check_rules<kAppendPass>(solver, call) &&
                       check_rows<kCallPass | kCachePass | kAppendPass>(solver, call) &&
                       (!call.k_new || check_written(solver, call, sets_scales)) &&
                       check_rotary(solver, call) && check_memory<kAppendPass>(solver, call) &&
                       (!solver.on_cuda() || check_kernel(solver, call));
  return is_fine ? "" : solver.error;
}

}  // namespace fa3
