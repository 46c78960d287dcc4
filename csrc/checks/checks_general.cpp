#include "checks/checks_general.h"

#include <cmath>

#include "call/given_tensor.h"
#include "checks/tensor_rule.h"

namespace fa3 {
namespace {

constexpr char const* kLayout = "(total, heads, head_dim)";

std::string refuse(AttentionCall const& call, std::string const& expected, std::string const& got,
                   std::string const& hint = "") {
  return error_text(call.op(), expected, got, hint);
}

// Packed tensors come with both lists of starts, and only they have used lengths.
std::string check_form(AttentionCall const& call) {
  LengthArguments const& lengths = call.lengths;
  if (bool(lengths.cu_seqlens_q) != bool(lengths.cu_seqlens_k)) {
    return refuse(call, "cu_seqlens_q and cu_seqlens_k together",
                  lengths.cu_seqlens_q ? "cu_seqlens_k of None" : "cu_seqlens_q of None");
  }
  if (!call.is_packed() && (lengths.seqused_q || lengths.seqused_k)) {
    return refuse(call, "seqused_q and seqused_k only with cu_seqlens_q and cu_seqlens_k",
                  lengths.seqused_q ? "seqused_q alone" : "seqused_k alone");
  }
  return {};
}

// A size of one packed tensor that another has to repeat.
struct SizeRule {
  char const* name;
  TensorMeta const& meta;
  int dim;
  char const* like_name;
  TensorMeta const& like;
};

std::string check_packed_sizes(AttentionCall const& call) {
  TensorMeta const& q = call.q;
  TensorMeta const& k = call.k;
  TensorMeta const& v = call.v;
  for (auto [name, meta] : {NamedTensor{"q", q}, NamedTensor{"k", k}, NamedTensor{"v", v}}) {
    if (meta.rank != 3) {
      return refuse(call, text(name, " to have 3 dimensions ", kLayout, " with cu_seqlens_q"),
                    text(meta.rank));
    }
  }
  static constexpr char const* kDims[] = {"total", "heads", "head_dim"};
  std::string const hint = text("tensors are ", kLayout);
  for (SizeRule const& rule :
       {SizeRule{"v", v, 0, "k", k}, SizeRule{"v", v, 1, "k", k}, SizeRule{"k", k, 2, "q", q}}) {
    if (rule.meta.size[rule.dim] != rule.like.size[rule.dim]) {
      return refuse(call,
                    text(rule.name, ".size(", rule.dim, "), the ", kDims[rule.dim],
                         ", to be that of ", rule.like_name, ", ", rule.like.size[rule.dim]),
                    text(rule.meta.size[rule.dim]), hint);
    }
  }
  if (k.size[1] < 1) {
    return refuse(call, "k.size(1), the heads, to be at least 1", text(k.size[1]));
  }
  if (q.size[1] % k.size[1] != 0) {
    return refuse(call, text("the heads of q to be a multiple of the heads of k, ", k.size[1]),
                  text(q.size[1]), hint);
  }
  return {};
}

// What check_dense() would name by the numbers of four dimensions.
std::string check_packed_strides(AttentionCall const& call) {
  TensorMeta const* const given = call.given_out();
  TensorMeta const& out = given ? *given : call.q;
  NamedTensor const all[] = {{"q", call.q}, {"k", call.k}, {"v", call.v}, {"out", out}};
  int const count = given ? 4 : 3;
  for (int i = 0; i < count && call.q.device == DeviceType::kCuda; ++i) {
    TensorMeta const& meta = all[i].meta;
    if (meta.size[2] > 1 && meta.stride[2] != 1) {
      return refuse(call, text(all[i].name, ".stride(2) to be 1, the head_dim contiguous"),
                    text(meta.stride[2]), text("call ", all[i].name, ".contiguous()"));
    }
  }
  bool const is_empty = out.size[0] == 0 || out.size[1] == 0 || out.size[2] == 0;
  for (int i = 0; i < 3 && given && !is_empty; ++i) {
    if (out.size[i] > 1 && out.stride[i] == 0) {
      return refuse(call, "out with memory for every element", text("out.stride(", i, ") of 0"),
                    "do not pass an expanded tensor");
    }
  }
  return {};
}

std::string check_packed_tensors(AttentionCall const& call) {
  std::string error = check_packed_sizes(call);
  if (error.empty() && call.given_out()) {
    error = check_tensor("fwd_out", like_out("out", *call.given_out(), call), call.q);
  }
  if (error.empty()) {
    error = check_packed_strides(call);
  }
  if (!error.empty()) {
    return error;
  }
  AttentionCall dense = call;
  for (TensorMeta* meta : {&dense.q, &dense.k, &dense.v}) {
    *meta = with_batch_of_one(*meta);
  }
  if (call.given_out()) {
    dense.out = with_batch_of_one(*call.out);
  }
  dense.has_batch = false;
  return check_dense(dense);
}

std::string check_tensors(AttentionCall const& call) {
  return call.is_packed() ? check_packed_tensors(call) : check_dense(call);
}

std::string check_used(AttentionCall const& call, NamedTensor const& used) {
  int64_t const batch = call.lengths.cu_seqlens_q->size[0] - 1;
  std::string const error = check_list(call.op(), used, call.q, "(batch)");
  if (error.empty() && used.meta.size[0] != batch) {
    return refuse(call, text(used.name, ".size(0) to be the batch, ", batch),
                  text(used.meta.size[0]));
  }
  return error;
}

std::string check_lengths(AttentionCall const& call) {
  if (!call.is_packed()) {
    return {};
  }
  LengthArguments const& lengths = call.lengths;
  TensorMeta const& starts = *lengths.cu_seqlens_q;
  TensorMeta const& starts_k = *lengths.cu_seqlens_k;
  for (auto list : {NamedTensor{"cu_seqlens_q", starts}, NamedTensor{"cu_seqlens_k", starts_k}}) {
    std::string const error = check_list(call.op(), list, call.q, "(batch + 1)");
    if (!error.empty()) {
      return error;
    }
  }
  if (starts.size[0] < 1) {
    return refuse(call, "cu_seqlens_q.size(0), the batch + 1, to be at least 1", "0");
  }
  if (starts_k.size[0] != starts.size[0]) {
    return refuse(
        call,
        text("cu_seqlens_k.size(0), the batch + 1, to be that of cu_seqlens_q, ", starts.size[0]),
        text(starts_k.size[0]));
  }
  std::string const error =
      lengths.seqused_q ? check_used(call, {"seqused_q", *lengths.seqused_q}) : "";
  return error.empty() && lengths.seqused_k ? check_used(call, {"seqused_k", *lengths.seqused_k})
                                            : error;
}

std::string check_sinks(AttentionCall const& call) {
  TensorMeta const& q = call.q;
  if (!call.score.sinks) {
    return {};
  }
  TensorMeta const& sinks = *call.score.sinks;
  if (sinks.rank != 1) {
    return refuse(call, "s_aux to have 1 dimension (heads_q)", text(sinks.rank));
  }
  int64_t const heads = q.size[call.is_packed() ? 1 : 2];
  if (sinks.size[0] != heads) {
    return refuse(call, text("s_aux.size(0) to be the heads of q, ", heads), text(sinks.size[0]));
  }
  if (sinks.dtype != wide_dtype(q)) {
    return refuse(call, text("s_aux.dtype to be ", wide_dtype_name(q)), sinks.dtype_name);
  }
  if (!same_device(sinks, q)) {
    return refuse(call, text("s_aux on the device of q, ", device_text(q)), device_text(sinks));
  }
  if (sinks.size[0] > 1 && sinks.stride[0] != 1) {
    return refuse(call, "s_aux to be contiguous", text("a stride of ", sinks.stride[0]),
                  "call s_aux.contiguous()");
  }
  return {};
}

std::string check_scores(AttentionCall const& call) {
  ScoreArguments const& score = call.score;
  if (score.window_left < -1 || score.window_right < -1) {
    return refuse(call, "window_size to be two numbers of -1 (no limit) or more",
                  text("(", score.window_left, ", ", score.window_right, ")"));
  }
  if (score.attention_chunk < 0) {
    return refuse(call, "attention_chunk to be 0 (none) or more", text(score.attention_chunk));
  }
  float const softcap = float(score.softcap);
  if (!std::isfinite(softcap) || softcap < 0.f || (softcap == 0.f && score.softcap != 0.0)) {
    return refuse(call, "softcap to be 0 (none) or a positive finite float32", text(score.softcap));
  }
  return {};
}

std::string check_query_tiles(AttentionCall const& call) {
  return call.is_packed() ? check_packed_tiles(call, {"q", call.q}) : "";
}

using Check = std::string (*)(AttentionCall const&);

// In this order: each one may rely on those before it.
constexpr Check kChecks[] = {check_form,        check_tensors, check_lengths,
                             check_query_tiles, check_sinks,   check_scores};

}  // namespace

std::string check_packed_tiles(AttentionCall const& call, NamedTensor const& rows) {
  constexpr double kMaxTiles = double(1 << 29);
  auto [name, meta] = rows;
  double const batch = double(call.lengths.cu_seqlens_q->size[0] - 1);
  double const tiles = double(meta.size[1]) * (std::floor(double(meta.size[0]) / 64) + batch);
  if (meta.device == DeviceType::kCuda && tiles > kMaxTiles) {
    return refuse(call,
                  text("heads * (floor(total / 64) + batch) of ", name, " to be at most ",
                       int64_t(kMaxTiles)),
                  text(int64_t(tiles)), "split the batch");
  }
  return {};
}

std::string check_forward(AttentionCall const& call) { return first_error(kChecks, call); }

}  // namespace fa3
