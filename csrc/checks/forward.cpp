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
  int const step = solver.is_fp8() ? 16 : 8;
  char const* const note = solver.is_fp8() ? " with float8_e4m3fn" : "";
  static_assert(kLongValuesHeadDim == 64);
  Range const long_values = {step, kMaxLongValues, step};
  Range const values = {step, kMaxHeadDim, step, *note ? note : " with a head_dim above 64"};
  bool const is_long = !solver.is_fp8() && head_dim <= kLongValuesHeadDim;
  auto const check_values = [&](Range const& range, char const* hint) {
    return solver.in_range({solver.binder("Dv"), call.v}, call.v.rank - 1, "head_dim of the values",
                           range, hint);
  };
  return solver.in_range({"q", call.q}, call.q.rank - 1, "head_dim",
                         {step, kMaxHeadDim, step, note},
                         head_dim <= 0 || head_dim > kMaxHeadDim
                             ? ""
                             : "pad q, k and v with zeros, and pass softmax_scale") &&
         check_values(is_long ? long_values : values, "") &&
         (!call.is_backward || check_values({-kUnlimited, kMaxHeadDim, 1, " for gradients"},
                                            "split the columns of v over two calls"));
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

// What a backward adds is checked as far as it is given: the planner asks about the inputs alone.
bool check_gradients(Solver& solver, Call const& call) {
  constexpr unsigned kPasses = kCallPass | kKeyPass | kGradientPass;
  return check_rows<kGradientPass>(solver, call) &&
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
