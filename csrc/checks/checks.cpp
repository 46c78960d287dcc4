#include "checks/checks.h"

#include <array>
#include <cmath>

#include "call/given_tensor.h"
#include "call/tensor_text.h"
#include "plan/variants.h"

namespace fa3 {
namespace {

// Tile and key indices are 32-bit, with room for a tile past the end.
constexpr int64_t kMaxLength = int64_t(1) << 30;

// Tiles of 64 rows. Packing query heads at most doubles their number.
constexpr double kMaxTiles = double(1 << 29);

std::array<NamedTensor, 3> inputs(AttentionCall const& call) {
  return {NamedTensor{"q", call.q}, NamedTensor{call.k_name(), call.k},
          NamedTensor{call.v_name(), call.v}};
}

bool on_cuda(AttentionCall const& call) { return call.q.device == DeviceType::kCuda; }

std::string refuse(AttentionCall const& call, std::string const& expected, std::string const& got,
                   std::string const& hint = "") {
  return error_text(call.op(), expected, got, hint);
}

std::string check_ranks(AttentionCall const& call) {
  for (auto [name, meta] : inputs(call)) {
    if (meta.rank != 4) {
      return refuse(call, text(name, " to have 4 dimensions (batch, seqlen, heads, head_dim)"),
                    text(meta.rank));
    }
  }
  return {};
}

std::string check_devices(AttentionCall const& call) {
  if (call.q.device == DeviceType::kOther) {
    return refuse(call, "q on a CPU or CUDA device", device_text(call.q));
  }
  for (auto [name, meta] : inputs(call)) {
    if (!same_device(meta, call.q)) {
      return refuse(call, text(name, " on the device of q, ", device_text(call.q)),
                    device_text(meta));
    }
  }
  return {};
}

std::string check_dtypes(AttentionCall const& call) {
  Dtype const dtype = call.q.dtype;
  bool const is_half = dtype == Dtype::kFloat16 || dtype == Dtype::kBFloat16;
  bool const is_wide = dtype == Dtype::kFloat32 || dtype == Dtype::kFloat64;
  if (on_cuda(call) && !is_half) {
    return refuse(call, "q.dtype to be float16 or bfloat16", call.q.dtype_name,
                  is_wide ? "convert q, k and v to bfloat16 or float16" : "");
  }
  if (!is_half && !is_wide) {
    return refuse(call, "q.dtype to be float16, bfloat16, float32 or float64", call.q.dtype_name);
  }
  for (auto [name, meta] : inputs(call)) {
    if (meta.dtype != dtype) {
      return refuse(call, text(name, ".dtype to be that of q, ", call.q.dtype_name),
                    meta.dtype_name);
    }
  }
  return {};
}

// A size of one tensor that another has to repeat.
struct SizeRule {
  char const* name;
  TensorMeta const& meta;
  int dim;
  char const* like_name;
  TensorMeta const& like;
};

std::string check_sizes(AttentionCall const& call) {
  char const* const k = call.k_name();
  char const* const v = call.v_name();
  SizeRule const rules[] = {
      {k, call.k, 0, "q", call.q}, {v, call.v, 0, "q", call.q}, {v, call.v, 1, k, call.k},
      {v, call.v, 2, k, call.k},   {k, call.k, 3, "q", call.q},
  };
  static constexpr char const* kDims[] = {"batch", "seqlen", "heads", "head_dim"};
  for (SizeRule const& rule : rules) {
    if (rule.meta.size[rule.dim] != rule.like.size[rule.dim]) {
      return refuse(call,
                    text(rule.name, ".size(", rule.dim, "), the ", kDims[rule.dim],
                         ", to be that of ", rule.like_name, ", ", rule.like.size[rule.dim]),
                    text(rule.meta.size[rule.dim]), "tensors are (batch, seqlen, heads, head_dim)");
    }
  }
  if (call.k.size[2] < 1) {
    return refuse(call, text(k, ".size(2), the heads, to be at least 1"), text(call.k.size[2]));
  }
  if (call.q.size[2] % call.k.size[2] != 0) {
    return refuse(call,
                  text("the heads of q to be a multiple of the heads of ", k, ", ", call.k.size[2]),
                  text(call.q.size[2]), "tensors are (batch, seqlen, heads, head_dim)");
  }
  return {};
}

template <class CandidatesByHeadDim>
constexpr bool every_head_dim_has_a_variant(CandidatesByHeadDim const& candidates) {
  for (int head_dim = 8; head_dim <= kMaxHeadDim; head_dim += 8) {
    if (candidates[head_dim / 8].count == 0) {
      return false;
    }
  }
  return true;
}

// But for latent caches, which have rules of their own (checks/checks_cache.cpp).
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

std::string check_head_dims(AttentionCall const& call) {
  int64_t const head_dim = call.q.size[3];
  int64_t const head_dim_v = call.v.size[3];
  if (!on_cuda(call)) {
    bool const fine = head_dim >= 1 && head_dim_v >= 1;
    std::string const got = text(head_dim, " (q, k) and ", head_dim_v, " (v)");
    return fine ? "" : refuse(call, "head dims of at least 1", got);
  }
  if (head_dim < 8 || head_dim > kMaxHeadDim || head_dim % 8 != 0) {
    return refuse(call,
                  text("q.size(", call.named_dim(3),
                       "), the head_dim, to be a multiple of 8 from 8 to ", kMaxHeadDim),
                  text(head_dim),
                  head_dim > 0 && head_dim < kMaxHeadDim
                      ? "pad q, k and v with zeros, and pass softmax_scale"
                      : "");
  }
  int const most_v = head_dim <= kLongValuesHeadDim ? kMaxLongValues : kMaxHeadDim;
  if (head_dim_v < 8 || head_dim_v > most_v || head_dim_v % 8 != 0) {
    return refuse(
        call,
        text(call.v_name(), ".size(",
             call.on_cache && !call.lengths.cu_seqlens_k ? 3 : call.named_dim(3),
             "), the head_dim of the values, to be a multiple of 8 from 8 to ", most_v,
             head_dim <= kLongValuesHeadDim ? "" : text(" with a head_dim of ", head_dim)),
        text(head_dim_v));
  }
  return {};
}

std::string check_strides(AttentionCall const& call) {
  if (!on_cuda(call)) {
    return {};
  }
  for (NamedTensor const& input : inputs(call)) {
    std::string const error = check_last_stride(call.op(), input);
    if (!error.empty()) {
      return error;
    }
  }
  return {};
}

std::string check_scalars(AttentionCall const& call) {
  double const given = call.score.softmax_scale.value_or(1.0);
  float const scale = float(given);
  if (!std::isfinite(scale) || scale <= 0.f) {
    return refuse(call, "softmax_scale to be a positive finite float32", text(given));
  }
  int64_t const margin = call.execution.sm_margin;
  int const sm_count = call.device.sm_count;
  if (margin < 0) {
    return refuse(call, "sm_margin to be 0 or more", text(margin));
  }
  if (sm_count > 0 && margin >= sm_count) {
    return refuse(call, text("sm_margin to be less than the ", sm_count, " SMs of the device"),
                  text(margin), "it is the number of SMs to leave to other kernels");
  }
  return {};
}

std::string check_counts(AttentionCall const& call) {
  if (!on_cuda(call)) {
    return {};
  }
  for (auto [name, meta] : inputs(call)) {
    for (int i = 0; i < 3; ++i) {
      if (meta.size[i] > kMaxLength) {
        return refuse(call, text(name, ".size(", call.named_dim(i), ") to be at most ", kMaxLength),
                      text(meta.size[i]));
      }
    }
  }
  TensorMeta const& q = call.q;
  double const tiles = double(q.size[0]) * double(q.size[2]) * double((q.size[1] + 63) / 64);
  if (tiles > kMaxTiles) {
    return refuse(call,
                  text("batch * heads * ceil(seqlen / 64) of q to be at most ", int64_t(kMaxTiles)),
                  text(int64_t(tiles)), "split the batch");
  }
  return {};
}

std::string check_out(AttentionCall const& call) {
  if (!call.given_out()) {
    return {};
  }
  TensorMeta const& out = *call.given_out();
  int64_t const wanted[5] = {call.q.size[0], call.q.size[1], call.q.size[2], call.v.size[3]};
  bool shapes_match = out.rank == 4;
  for (int i = 0; i < 4 && shapes_match; ++i) {
    shapes_match = out.size[i] == wanted[i];
  }
  if (!shapes_match) {
    return refuse(call, text("out to have the shape ", shape_text(wanted, 4)),
                  shape_text(out.size, std::min(out.rank, 5)));
  }
  if (out.dtype != call.q.dtype) {
    return refuse(call, text("out.dtype to be that of q, ", call.q.dtype_name), out.dtype_name);
  }
  if (!same_device(out, call.q)) {
    return refuse(call, text("out on the device of q, ", device_text(call.q)), device_text(out));
  }
  return check_given_memory(call.op(), {"out", out}, inputs(call));
}

using Check = std::string (*)(AttentionCall const&);

// In this order: each one may rely on those before it.
constexpr Check kChecks[] = {check_ranks,   check_devices,   check_dtypes,
                             check_sizes,   check_head_dims, check_strides,
                             check_scalars, check_counts,    check_out};

}  // namespace

std::string check_dense(AttentionCall const& call) { return first_error(kChecks, call); }

}  // namespace fa3
