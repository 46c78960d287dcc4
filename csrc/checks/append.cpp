// Calls that append to a KV cache or rotate queries.
#include "call/cache_form.h"
#include "call/tma_rules.h"
#include "checks/cache_rules.h"
#include "checks/checks.h"

namespace fa3 {
namespace {

using Call = AttentionCall;
using Rotary = RotaryArguments;

// The kernel rotates pairs of 16 bytes at a time.
constexpr int kRotaryStep = 16;
constexpr int kRotaryStepOfE4M3 = 32;

// Dense, packed.
constexpr Row<Call> kNewRows[] = {
    {"k", at<&Call::k_new>, kNewKeys, kColumns, {"B Sn Hk D", "Tn Hk D"}},
    {"v", at<&Call::v_new>, kNewValues, kColumns, {"B Sn Hk Dv", "Tn Hk Dv"}},
};

constexpr Row<Call> kRotary[] = {
    {"rotary_cos", at<&Rotary::rotary_cos>, kTables, kList, {"L Dr"}},
    {"rotary_sin", at<&Rotary::rotary_sin>, kTables, kList, {"L Dr"}},
};

bool rotates(Call const& call) { return call.rotary.rotary_cos && call.rotary.rotary_sin; }

bool has_rows(Call const& call) { return call.k_new && call.v_new; }

DtypeSet set_of(TensorMeta const& meta) { return fa3::set_of(meta.dtype); }

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
Solver append_solver(Call const& call) {
  Solver solver("append_and_attend", {"q", call.q});
  DtypeSet const known = kE4M3 | k16Bits | (solver.on_cuda() ? 0 : kCpuOnly);
  for (Type type : {kAnchor, kKeys, kValues}) {
    solver.set(type, known);
  }
  bool const is_quantised = quantises(call, known);
  solver.set(kNewKeys, set_of(is_quantised ? *call.k_new : call.k));
  solver.set(kNewValues, set_of(is_quantised              ? *call.k_new
                                : quantises_latents(call) ? call.k
                                                          : call.v));
  DtypeSet const own = set_of(call.q);
  bool const has_wide_tables =
      own == kE4M3 && call.rotary.rotary_cos && (set_of(*call.rotary.rotary_cos) & k16Bits);
  solver.set(kTables, has_wide_tables ? set_of(*call.rotary.rotary_cos) : own);
  return solver;
}

std::string check_given(Solver const& solver, Call const& call) {
  if (bool(call.k_new) != bool(call.v_new)) {
    return solver.refuse("k and v together", call.k_new ? "k alone" : "v alone");
  }
  return !has_rows(call) && call.cache.cu_seqlens_k_new
             ? solver.refuse("cu_seqlens_k_new with k and v", "cu_seqlens_k_new alone")
             : "";
}

std::string check_new_rows(Solver& solver, Call const& call) {
  return call.cache.cu_seqlens_k_new
             ? check_rows<kNewRows, 1>(solver, call, " with cu_seqlens_k_new")
             : check_rows<kNewRows, 0>(solver, call);
}

// New keys of each sequence; packed: the host does not know.
int64_t added_of(Call const& call) {
  return has_rows(call) && call.k_new->rank == 4 ? call.k_new->size[1] : 0;
}

std::string check_lengths(Solver const& solver, Call const& call) {
  return check_cache_lengths(solver, call, added_of(call));
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

// Tensors that are written, of which the second is not the first.
std::string check_written(Solver const& solver, NamedTensor const& first,
                          NamedTensor const& second) {
  for (auto const& [name, meta] : {first, second}) {
    if (!is_empty(meta) && may_overlap(meta)) {
      return solver.refuse(text(name, " with memory for every element, to write to it"),
                           text("strides ", shape_text(meta.stride, meta.rank)),
                           "do not pass an expanded tensor");
    }
  }
  bool const is_one = &first.meta != &second.meta && shares_memory(first.meta, second.meta);
  return is_one ? solver.refuse(text(second.name, " with memory of its own, to write to it"),
                                text("the memory of ", first.name))
                : "";
}

std::string check_memory(Solver const& solver, Call const& call) {
  if (!has_rows(call)) {
    return {};
  }
  std::string const error = check_written(solver, {"k_cache", call.k}, {"v_cache", call.v});
  return error.empty() ? check_cache_memory(solver, call) : error;
}

// ----------------------------------------------------------------------------------------- rotary
std::string check_tables(Solver& solver, Call const& call) {
  Rotary const& rotary = call.rotary;
  if (bool(rotary.rotary_cos) != bool(rotary.rotary_sin)) {
    return solver.refuse("rotary_cos and rotary_sin together",
                         rotary.rotary_cos ? "rotary_sin of None" : "rotary_cos of None");
  }
  std::string const error = check_rows<kRotary>(solver, call);
  return error.empty() && rotates(call) && solver["L"] < 1
             ? solver.refuse("rotary_cos.size(0), the positions, to be at least 1", "0")
             : error;
}

// What is rotated has one dtype.
std::string check_rotated(Solver const& solver, Call const& call) {
  if (!rotates(call) || !has_rows(call) || call.q.dtype == call.k_new->dtype) {
    return {};
  }
  return solver.refuse(text("q.dtype to be that of k, ", call.k_new->dtype_name), call.q.dtype_name,
                       "rotary_cos and rotary_sin rotate both");
}

std::string check_rotary_dim(Solver const& solver, Call const& call) {
  if (!rotates(call)) {
    return {};
  }
  int64_t const dim = 2 * solver["Dr"];
  if (dim < 2 || dim > solver["D"]) {
    return solver.refuse(
        text("a rotary_dim, twice rotary_cos.size(1), from 2 to the head_dim, ", solver["D"]),
        text(dim));
  }
  int const step = call.q.dtype == Dtype::kFloat8E4M3 ? kRotaryStepOfE4M3 : kRotaryStep;
  return solver.on_cuda() && dim % step != 0
             ? solver.refuse(
                   text("a rotary_dim, twice rotary_cos.size(1), that is a multiple of ", step),
                   text(dim), "append columns of cos = 1 and sin = 0")
             : "";
}

// Positions that the host knows: those after a cache_seqlens that is a number.
std::string check_positions(Solver const& solver, Call const& call) {
  CacheArguments const& cache = call.cache;
  if (!rotates(call) || call.rotary.rotary_seqlens || cache.cache_seqlens) {
    return {};
  }
  int64_t const first = held_by_all(call);
  bool const has_own = call.q.rank == 4 && call.rotary.rotary_per_query;
  int64_t const need = first + std::max(added_of(call), has_own ? call.q.size[1] : 1);
  return solver["L"] < need
             ? solver.refuse(text("rotary_cos of at least ", need, " positions"), text(solver["L"]))
             : "";
}

// ----------------------------------------------------------------------------------------- scales
// They are set with the rows.
std::string check_scales_of_latents(Solver& solver, Call const& call) {
  if (solver["Hk"] != 1 || !call.scales.v_descale) {
    return solver.refuse(
        "one KV head and v_descale with 16-bit keys, for a v_cache of "
        "float8_e4m3fn",
        call.scales.v_descale ? text(solver["Hk"], " heads") : "None", "such a cache is for qv");
  }
  NamedTensor const scale = {"v_descale", *call.scales.v_descale};
  std::string const error = check_latent_scales(solver, call);
  return error.empty() ? check_written(solver, scale, scale) : error;
}

std::string check_scales(Solver& solver, Call const& call) {
  if (quantises_latents(call)) {
    return check_scales_of_latents(solver, call);
  }
  if (!has_rows(call) || set_of(call.k) == set_of(*call.k_new)) {
    return {};  // those of attention
  }
  std::string error = check_by_page(solver, call, true);
  error = error.empty() ? check_cache_scales(solver, call) : error;
  return error.empty() && call.by_page.descale_by_page
             ? check_written(solver, {"k_descale", *call.scales.k_descale},
                             {"v_descale", *call.scales.v_descale})
             : error;
}

// ----------------------------------------------------------------------------------------- kernel
std::string check_chunks(Solver const& solver, NamedTensor const& tensor) {
  auto const& [name, meta] = tensor;
  return is_empty(meta) || has_chunks(meta)
             ? ""
             : solver.refuse(
                   text(name,
                        " with contiguous columns, and its address and strides at "
                        "multiples of ",
                        kTmaAlignment, " bytes on a GPU"),
                   text("address ", meta.address, ", strides ", shape_text(meta.stride, meta.rank)),
                   "allocate it whole, or pad the head_dim");
}

std::string check_cache_columns(Solver const& solver, NamedTensor const& cache) {
  int64_t const columns = cache.meta.size[3];
  int64_t const step = kTmaAlignment / element_bytes(cache.meta.dtype);
  return columns % step == 0
             ? check_chunks(solver, cache)
             : solver.refuse(text(cache.name, ".size(3) to be a multiple of ", step, " on a GPU"),
                             text(columns), "pad the head_dim with zeros");
}

std::string check_count(Solver const& solver, NamedTensor const& rows) {
  constexpr int64_t kMost = int64_t(1) << 30;
  auto const& [name, meta] = rows;
  int const rank = meta.rank;
  double const tokens = double(meta.size[0]) * (rank == 4 ? double(meta.size[1]) : 1.0);
  double const columns = double(meta.size[rank - 2]) * double(meta.size[rank - 1]);
  return std::max(tokens, columns) <= double(kMost)
             ? ""
             : solver.refuse(text(name, " with at most ", kMost,
                                  " tokens, and as many columns of "
                                  "all heads"),
                             shape_text(meta.size, rank), "split the batch");
}

std::string check_rotary_memory(Solver const& solver, Call const& call) {
  if (!rotates(call)) {
    return {};
  }
  std::string error = check_chunks(solver, {"rotary_cos", *call.rotary.rotary_cos});
  error = error.empty() ? check_chunks(solver, {"rotary_sin", *call.rotary.rotary_sin}) : error;
  return error.empty() ? check_count(solver, {"q", call.q}) : error;
}

std::string check_row_memory(Solver const& solver, Call const& call) {
  if (!has_rows(call)) {
    return {};
  }
  std::string error = check_cache_columns(solver, {"k_cache", call.k});
  error = error.empty() ? check_cache_columns(solver, {"v_cache", call.v}) : error;
  error = error.empty() ? check_count(solver, {"k", *call.k_new}) : error;
  return error.empty() ? check_count(solver, {"v", *call.v_new}) : error;
}

}  // namespace

std::string check_append(Call const& call) {
  Solver solver = append_solver(call);
  return first_error<check_given, check_device, check_cache_tensors, check_new_rows, check_lengths,
                     check_memory, check_rotated, check_tables, check_rotary_dim, check_positions,
                     check_scales>(solver, call);
}

std::string check_append_kernel(Call const& call, bool sets_scales) {
  Solver const solver("append_and_attend", {"q", call.q});
  std::string const error = first_error<check_rotary_memory, check_row_memory>(solver, call);
  bool const is_quantised = has_rows(call) && call.v.dtype != call.v_new->dtype;
  bool const is_by_page = call.by_page.descale_by_page;
  bool const has_latents = is_quantised && !is_by_page && call.k.dtype == call.k_new->dtype;
  if (!error.empty() || !is_quantised) {
    return error;
  }
  if ((has_latents || is_by_page) && !sets_scales) {
    return solver.refuse("k_scales or v_scales, those that new keys set", "None");
  }
  return has_latents && call.v.size[3] != kLatentDim
             ? solver.refuse(
                   text("v_cache.size(3) to be ", kLatentDim, ", for scales by key, on a GPU"),
                   text(call.v.size[3]))
             : "";
}

}  // namespace fa3
