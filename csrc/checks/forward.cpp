// Calls of the forward, dense or packed, and what attention of any kind shares.
#include <cmath>

#include "checks/checks.h"
#include "checks/rules.h"
#include "plan/variants.h"

namespace fa3 {
namespace {

using Call = AttentionCall;
using Score = ScoreArguments;
using Lengths = LengthArguments;

// Tile and key indices are 32-bit, with room for a tile past the end.
constexpr int64_t kMaxLength = int64_t(1) << 30;

TensorMeta const* given_out(Call const& call) { return call.given_out(); }

// Dense, packed. Names are those of the public functions: s_aux are the sinks.
constexpr Row<Call> kTable[] = {
    {"q", at<&Call::q>, kAnchor, kColumns, {"B Sq Hq D", "Tq Hq D"}},
    {"k", at<&Call::k>, kKeys, kColumns, {"B Sk Hk D", "Tk Hk D"}},
    {"v", at<&Call::v>, kValues, kColumns, {"B Sk Hk Dv", "Tk Hk Dv"}},
    {"out", &given_out, kOut, kOwnColumns, {"B Sq Hq Dv", "Tq Hq Dv"}},
    {"cu_seqlens_q", at<&Lengths::cu_seqlens_q>, kInt32, kList, {"", "B+1"}},
    {"cu_seqlens_k", at<&Lengths::cu_seqlens_k>, kInt32, kList, {"", "B+1"}},
    {"seqused_q", at<&Lengths::seqused_q>, kInt32, kList, {"", "B"}},
    {"seqused_k", at<&Lengths::seqused_k>, kInt32, kList, {"", "B"}},
};

constexpr Row<Call> kSinks[] = {
    {"s_aux", at<&Score::sinks>, kWide, kList, {"Hq"}},
};

template <class CandidatesByHeadDim>
constexpr bool every_head_dim_has_a_variant(CandidatesByHeadDim const& candidates) {
  for (int head_dim = 8; head_dim <= kMaxHeadDim; head_dim += 8) {
    if (candidates[head_dim / 8].count == 0) {
      return false;
    }
  }
  return true;
}

// But for latent caches, which have head dims of their own (checks/cache.cpp).
constexpr bool every_problem_has_a_variant() {
  for (int dtype = 0; dtype < kKernelDtypes; ++dtype) {
    for (int kind = 0; kind < kBuiltKindCount; ++kind) {
      if (!kBuiltKinds[kind].kind.is_latent &&
          !every_head_dim_has_a_variant(kFwdCandidates[dtype][kind])) {
        return false;
      }
    }
  }
  return true;
}
static_assert(every_problem_has_a_variant(),
              "csrc/plan/variants.py: the largest head dim lacks a variant");

// Packed tensors come with both lists of starts, and only they have used lengths.
std::string check_form(Solver const& solver, Call const& call) {
  Lengths const& lengths = call.lengths;
  if (bool(lengths.cu_seqlens_q) != bool(lengths.cu_seqlens_k)) {
    return solver.refuse("cu_seqlens_q and cu_seqlens_k together",
                         lengths.cu_seqlens_q ? "cu_seqlens_k of None" : "cu_seqlens_q of None");
  }
  if (!call.is_packed() && (lengths.seqused_q || lengths.seqused_k)) {
    return solver.refuse("seqused_q and seqused_k only with cu_seqlens_q and cu_seqlens_k",
                         lengths.seqused_q ? "seqused_q alone" : "seqused_k alone");
  }
  return {};
}

std::string check_tensors(Solver& solver, Call const& call) {
  return call.is_packed() ? check_rows<kTable, 1>(solver, call, " with cu_seqlens_q")
                          : check_rows<kTable, 0>(solver, call);
}

std::string check_query_tiles(Solver const& solver, Call const& call) {
  return call.is_packed() ? check_tiles(solver, "q", "Tq", "Hq")
                          : check_tiles(solver, "q", "Sq", "Hq");
}

std::string check_out(Solver const& solver, Call const& call) {
  return call.given_out() ? check_own_memory<kTable>(solver, call) : "";
}

// ----------------------------------------------------------------------------------------- limits
std::string check_heads(Solver const& solver, Call const& call) {
  int64_t const heads_k = solver["Hk"];
  if (heads_k < 1) {
    return solver.refuse(
        text(call.k_name(), ".size(", call.k.rank - 2, "), the heads, to be at least 1"),
        text(heads_k));
  }
  if (solver["Hq"] % heads_k != 0) {
    return solver.refuse(
        text("the heads of q to be a multiple of the heads of ", call.k_name(), ", ", heads_k),
        text(solver["Hq"]),
        text("tensors are ",
             call.q.rank == 3 ? "(total, heads, head_dim)" : "(batch, seqlen, heads, head_dim)"));
  }
  return {};
}

struct HeadDimRule {
  int step;
  int most;
  bool is_fp8;
  int64_t head_dim;  // head_dim of q and k if it limits that of v, else 0
};

std::string check_head_dim(Solver const& solver, NamedTensor const& tensor,
                           HeadDimRule const& rule) {
  auto const [step, most, is_fp8, head_dim] = rule;
  int const last = tensor.meta.rank - 1;
  int64_t const got = tensor.meta.size[last];
  if (got >= step && got <= most && got % step == 0) [[likely]] {
    return {};
  }
  bool const is_q = tensor.name[0] == 'q';
  return solver.refuse(text(tensor.name, ".size(", last, "), the head_dim",
                            is_q ? "" : " of the values", ", to be a multiple of ", step, " from ",
                            step, " to ", most, is_fp8 ? " with float8_e4m3fn" : "",
                            head_dim > 0 ? text(" with a head_dim of ", head_dim) : ""),
                       text(got),
                       got <= 0 || got >= kMaxHeadDim ? ""
                       : is_q ? "pad q, k and v with zeros, and pass softmax_scale"
                              : "pad v with zeros");
}

// FP8: TMA takes strides of 16 bytes, and MMAs take 16 columns at a time.
std::string check_head_dims(Solver const& solver, Call const& call) {
  bool const is_fp8 = solver.is_fp8();
  int64_t const head_dim = solver["D"];
  if (!solver.on_cuda()) {
    return head_dim >= 1 && solver["Dv"] >= 1
               ? ""
               : solver.refuse("head dims of at least 1",
                               text(head_dim, " (q, k) and ", solver["Dv"], " (v)"));
  }
  int const step = is_fp8 ? 16 : 8;
  bool const is_long = !is_fp8 && head_dim <= kLongValuesHeadDim;
  HeadDimRule const rule_of_v = {step, is_long ? kMaxLongValues : kMaxHeadDim, is_fp8,
                                 is_fp8 || is_long ? 0 : head_dim};
  std::string error = check_head_dim(solver, {"q", call.q}, {step, kMaxHeadDim, is_fp8, 0});
  return error.empty() ? check_head_dim(solver, {call.v_name(), call.v}, rule_of_v) : error;
}

std::string check_counts(Solver const& solver, Call const&) {
  for (Letter letter : {Letter("B"), Letter("Sq"), Letter("Tq"), Letter("Hq"), Letter("Sk"),
                        Letter("Tk"), Letter("Hk")}) {
    int64_t const size = solver[letter];
    if (size > kMaxLength && solver.on_cuda()) {
      return solver.refuse(text("the ", kLetters[letter.index].word, " of ",
                                solver.binders[letter.index], " to be at most ", kMaxLength),
                           text(size));
    }
  }
  return {};
}

std::string check_numbers(Solver const& solver, Call const& call) {
  double const given = call.score.softmax_scale.value_or(1.0);
  float const scale = float(given);
  if (!std::isfinite(scale) || scale <= 0.f) {
    return solver.refuse("softmax_scale to be a positive finite float32", text(given));
  }
  int64_t const margin = call.execution.sm_margin;
  int const sm_count = call.device.sm_count;
  if (margin < 0) {
    return solver.refuse("sm_margin to be 0 or more", text(margin));
  }
  if (sm_count > 0 && margin >= sm_count) {
    return solver.refuse(text("sm_margin to be less than the ", sm_count, " SMs of the device"),
                         text(margin), "it is the number of SMs to leave to other kernels");
  }
  return {};
}

std::string check_scores(Solver const& solver, Call const& call) {
  ScoreArguments const& score = call.score;
  if (score.window_left < -1 || score.window_right < -1) {
    return solver.refuse("window_size to be two numbers of -1 (no limit) or more",
                         text("(", score.window_left, ", ", score.window_right, ")"));
  }
  if (score.attention_chunk < 0) {
    return solver.refuse("attention_chunk to be 0 (none) or more", text(score.attention_chunk));
  }
  float const softcap = float(score.softcap);
  if (!std::isfinite(softcap) || softcap < 0.f || (softcap == 0.f && score.softcap != 0.0)) {
    return solver.refuse("softcap to be 0 (none) or a positive finite float32",
                         text(score.softcap));
  }
  return {};
}

}  // namespace

Solver solver_of(char const* op, Call const& call, bool is_fp8) {
  Solver solver(op, {"q", call.q});
  solver.set(kAnchor, is_fp8 ? kE4M3 : solver.on_cuda() ? k16Bits : k16Bits | kCpuOnly);
  if (is_fp8) {
    solver.set(kOut, k16Bits);
  }
  return solver;
}

std::string check_device(Solver const& solver, Call const&) {
  TensorMeta const& anchor = solver.anchor.meta;
  return anchor.device == DeviceType::kOther
             ? solver.refuse(text(solver.anchor.name, " on a CPU or CUDA device"),
                             device_text(anchor))
             : "";
}

std::string check_limits(Solver const& solver, Call const& call) {
  return first_error<check_heads, check_head_dims, check_counts, check_numbers, check_scores>(
      solver, call);
}

std::string check_sinks(Solver& solver, Call const& call) {
  return check_rows<kSinks>(solver, call);
}

std::string check_tiles(Solver const& solver, char const* name, Letter rows, Letter heads) {
  constexpr int64_t kMaxTiles = 1 << 29;  // 64 rows each; pack_gqa at most doubles the tiles
  double const batch = double(solver["B"]);
  double const count = double(solver[rows]);
  bool const is_packed = kLetters[rows.index].letter[0] == 'T';
  double const tiles =
      double(solver[heads]) *
      (is_packed ? std::floor(count / 64) + std::max(batch, 1.0) : batch * std::ceil(count / 64));
  if (!solver.on_cuda() || tiles <= double(kMaxTiles)) [[likely]] {
    return {};
  }
  return solver.refuse(
      text(is_packed ? "heads * (floor(total / 64) + batch)" : "batch * heads * ceil(seqlen / 64)",
           " of ", name, " to be at most ", kMaxTiles),
      text(int64_t(tiles)), "split the batch");
}

std::string check_attention(Solver& solver, Call const& call) {
  return first_error<check_form, check_device, check_tensors, check_limits, check_query_tiles,
                     check_sinks, check_out>(solver, call);
}

std::string check_forward(Call const& call) {
  Solver solver = solver_of(call.op(), call, false);
  return check_attention(solver, call);
}

}  // namespace fa3
