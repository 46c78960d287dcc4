// Calls without a cache, forward and backward, and what attention of any kind shares.
#include <cmath>

#include "call/cache_form.h"
#include "checks/attention.h"
#include "checks/checks.h"
#include "plan/variants.h"

namespace fa3 {
namespace {

bool check_heads(Solver& solver, Call const& call) {
  char const* const k = solver.binder("Hk");
  int64_t const heads_k = solver["Hk"];
  return solver.in_range({k, call.k}, call.k.rank - 2, "heads", {1}) &&
         (solver["Hq"] % heads_k == 0 ||
          solver.refuse(text("the heads of q to be a multiple of the heads of ", k, ", ", heads_k),
                        text(solver["Hq"]),
                        text("tensors are ", call.q.rank == 3 ? "(total" : "(batch, seqlen",
                             ", heads, head_dim)")));
}

// FP8: TMA takes strides of 16 bytes, and MMAs take 16 columns at a time.
bool check_head_dims(Solver& solver, Call const& call) {
  int64_t const head_dim = solver["D"];
  if (!solver.on_cuda()) {
    return (head_dim >= 1 && solver["Dv"] >= 1) ||
           solver.refuse("head dims of at least 1",
                         text(head_dim, " (q, k) and ", solver["Dv"], " (v)"));
  }
  bool const is_folded = call.execution.split_size > 0 && !call.on_cache;
  int const step = solver.is_fp8() ? 16 : 8;
  bool const is_listed = call.mask.key_lists || call.mask.query_lists;
  bool const is_chosen = call.choice.keys_chosen && !call.latent.qv;
  char const* const note = solver.is_fp8() ? " with float8_e4m3fn"
                           : is_folded     ? " with split_size"
                           : is_chosen     ? " with indices"
                           : is_listed     ? " with mask"
                                           : "";
  int64_t const most = *note ? kMaxNarrowHeadDim : kMaxHeadDim;
  bool const may_halve_values = head_dim <= kLongValuesHeadDim && !solver.is_fp8();
  auto const has_columns = [&](NamedTensor const& tensor, char const* word, Range const& range,
                               char const* hint) {
    return solver.in_range(tensor, tensor.meta.rank - 1, word, range, hint);
  };
  NamedTensor const q{"q", call.q};
  NamedTensor const v{solver.binder("Dv"), call.v};
  char const* const of_values = "head_dim of the values";
  Range const of_gradients = {-kUnlimited, is_listed ? kMaxListedGradients : kMaxNarrowHeadDim, 1,
                              is_listed ? " for gradients with mask" : " for gradients"};
  bool const is_in_range = head_dim > 0 && head_dim <= most;
  return has_columns(q, "head_dim", {step, most, step, note},
                     is_in_range ? "pad q, k and v with zeros, and pass softmax_scale" : "") &&
         has_columns(v, of_values, {step, may_halve_values ? kMaxHeadDim : most, step, note}, "") &&
         (!call.is_backward ||
          (has_columns(q, "head_dim", of_gradients, "") &&
           has_columns(v, of_values, of_gradients, "split the columns of v over two calls")));
}

// Tile and key indices are 32-bit.
bool check_counts(Solver& solver) {
  for (Letter letter : {Letter("B"), Letter("s"), Letter("Hq"), Letter("sk"), Letter("Hk")}) {
    if (solver[letter] > kMostIndex && solver.on_cuda()) {
      return solver.refuse_number(
          {-kUnlimited, kMostIndex},
          text("the ", solver.word({letter}), " of ", solver.binder(letter)), solver[letter]);
    }
  }
  return true;
}

// Positive and finite as a float32.
bool is_positive(double number) { return std::isfinite(float(number)) && float(number) > 0.f; }

bool check_numbers(Solver& solver, Call const& call) {
  ScoreArguments const& score = call.score;
  double const scale = score.softmax_scale.value_or(1.0);
  int const sm_count = call.device.sm_count;
  return (is_positive(scale) ||
          solver.refuse("softmax_scale to be a positive finite float32", text(scale))) &&
         (score.softcap == 0.0 || is_positive(score.softcap) ||
          solver.refuse("softcap to be 0 (none) or a positive finite float32",
                        text(score.softcap))) &&
         solver.in_range("sm_margin", call.execution.sm_margin,
                         {0, sm_count > 0 ? sm_count - 1 : kUnlimited},
                         "it is the number of SMs to leave to other kernels") &&
         solver.in_range("window_size[0]", score.window_left, {-1}) &&
         solver.in_range("window_size[1]", score.window_right, {-1}) &&
         solver.in_range("attention_chunk", score.attention_chunk, {0}) &&
         solver.in_range("num_splits", call.splits.num_splits, {0, kMaxSplits}) &&
         solver.in_range("split_size", call.execution.split_size, {0}) &&
         // flash_attn3/ops/fp8.py says so in the same words.
         (!solver.is_fp8() || !solver.on_cuda() || !call.execution.return_max_logits ||
          solver.refuse("return_max_logits to be False with float8_e4m3fn on a GPU", "True",
                        "the FP8 kernels do not compute maximum logits; use bfloat16 or float16"));
}

// The number of tiles of q or k fits into an int. rows: of a sequence, or of all in packed ones.
bool check_tiles(Solver& solver, char const* name, bool is_packed, int64_t rows, int64_t heads) {
  constexpr int64_t kMost = 1 << 29;  // 64 rows each; pack_gqa at most doubles the tiles
  double const batch = double(solver["B"]);
  double const per_head = is_packed ? std::floor(double(rows) / 64) + std::max(batch, 1.0)
                                    : batch * std::ceil(double(rows) / 64);
  return solver.in_int(
      double(heads) * per_head, kMost,
      is_packed ? "heads * (floor(total / 64) + batch)" : "batch * heads * ceil(seqlen / 64)",
      " of ", name);
}

// Scales are for each sequence and KV head, or for each block of rows and head.
bool check_scales(Solver& solver, Call const& call) {
  bool const is_packed = call.is_packed();
  int64_t const batch = solver["B"];
  auto const blocks = [&](int64_t rows, int64_t size) {
    return is_packed ? rows / size + batch : (rows + size - 1) / size;
  };
  solver.bind("Bz", is_packed ? 1 : batch, "q");
  solver.bind("Zq", blocks(solver["s"], kScaleBlockQueries), "q");
  solver.bind("Zk", blocks(solver["sk"], kScaleBlockKeys), "k");
  return check_rows<kScalePass>(solver, call);
}

// A batch or head size of 1 serves all. Kernels read lists, and rows as int4, but no blocks.
bool check_mask(Solver& solver, Call const& call) {
  MaskArguments const& mask = call.mask;
  bool const is_packed = call.is_packed();
  auto const fits = [&](char const* name, std::optional<TensorMeta> const& tensor, int rank,
                        auto const& has_sizes, std::string_view dtype = "int32") {
    return !tensor ||
           (tensor->rank == rank && has_sizes(*tensor) && tensor->dtype_name == dtype &&
            same_device(*tensor, call.q)) ||
           solver.refuse(text(name, " to be that of an AttentionMask made for these lengths"),
                         shape_text(tensor->size, tensor->rank));
  };
  auto const is_shared = [&](TensorMeta const& t, int64_t batch) {
    return (t.size[0] == 1 || t.size[0] == batch) && (t.size[1] == 1 || t.size[1] == solver["Hq"]);
  };
  auto const are_blocks = [&](TensorMeta const& t) { return is_shared(t, solver["B"]); };
  auto const are_lists = [&](char const* name, std::optional<TensorMeta> const& lists, Letter rows,
                             int64_t tile) {
    int64_t const tiles =
        is_packed ? solver[rows] / tile + solver["B"] : (solver[rows] + tile - 1) / tile;
    int64_t const batch = is_packed ? 1 : solver["B"];
    return fits(name, lists, 4, [&](TensorMeta const& t) {
      return is_shared(t, batch) && t.size[2] == tiles && t.size[3] > kListHeader &&
             t.stride[3] == 1;
    });
  };
  bool const has_lists = bool(call.is_backward ? mask.query_lists : mask.key_lists);
  return fits("mask_rows", mask.mask_rows, is_packed ? 2 : 3,
              [&](TensorMeta const& t) {
                return t.size[t.rank - 1] == 4 && t.stride[t.rank - 1] == 1 &&
                       t.size[t.rank - 2] == solver["s"] && t.stride[t.rank - 2] == 4 &&
                       (t.stride[0] | t.address / 4) % 4 == 0 &&
                       (is_packed || t.size[0] == 1 || t.size[0] == solver["B"]);
              }) &&
         fits("mask_blocks", mask.mask_blocks, 4, are_blocks, "bool") &&
         are_lists("key_lists", mask.key_lists, "s", kListedRows) &&
         are_lists("query_lists", mask.query_lists, "sk", kListedKeys) &&
         (has_lists == (mask.mask_rows || mask.mask_blocks) || !solver.on_cuda() ||
          solver.refuse("lists with mask_rows or mask_blocks", "one without the other"));
}

// What a backward adds is checked as far as it is given: the planner asks about the inputs alone.
bool check_gradients(Solver& solver, Call const& call) {
  constexpr unsigned kPasses = kCallPass | kKeyPass | kGradientPass;
  return check_rules<kGradientPass>(solver, call) && check_rows<kGradientPass>(solver, call) &&
         check_apart<kPasses>(solver, call, "dq", pointer_to(call.dq)) &&
         check_apart<kPasses>(solver, call, "dk", pointer_to(call.dk)) &&
         check_apart<kPasses>(solver, call, "dv", pointer_to(call.dv));
}

}  // namespace

Solver solver_of(Call const& call, bool is_fp8) {
  bool const on_cuda = call.q.device == DeviceType::kCuda;
  Solver solver(call.op(), {"q", call.q}, is_fp8 ? kE4M3 : on_cuda ? k16Bits : k16Bits | kCpuOnly);
  if (is_fp8) {
    solver.dtypes[kOut] = k16Bits;
  }
  solver.pack(call.has_packed_queries(), "b", "s", "Sq", "Tq");
  solver.pack(bool(call.lengths.cu_seqlens_k), "bk", "sk", "Sk", "Tk");
  return solver;
}

bool check_limits(Solver& solver, Call const& call) {
  return (call.q.device != DeviceType::kOther ||
          solver.refuse("q on a CPU or CUDA device", device_text(call.q))) &&
         check_heads(solver, call) && check_head_dims(solver, call) && check_counts(solver) &&
         check_numbers(solver, call) &&
         check_tiles(solver, "q", solver.lacks("b"), solver["s"], solver["Hq"]) &&
         (!call.is_backward ||
          check_tiles(solver, "k", solver.lacks("bk"), solver["sk"], solver["Hk"]));
}

bool check_attention(Solver& solver, Call const& call) {
  return check_rules<kCallPass | kKeyPass>(solver, call) &&
         check_rows<kCallPass | kKeyPass>(solver, call) && check_limits(solver, call) &&
         check_mask(solver, call) &&
         check_apart<kCallPass | kKeyPass>(solver, call, "out", call.given_out()) &&
         (!solver.is_fp8() || check_scales(solver, call)) &&
         (!call.is_backward || check_gradients(solver, call));
}

std::string check_call(Call const& call, bool is_fp8) {
  Solver solver = solver_of(call, is_fp8);
  check_attention(solver, call);
  return solver.error;
}

}  // namespace fa3
