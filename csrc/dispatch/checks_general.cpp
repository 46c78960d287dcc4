#include "dispatch/checks_general.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "dispatch/checks_backward.h"
#include "dispatch/tensor_rule.h"

namespace fa3 {
namespace {

constexpr char const* kLayout = "(total, heads, head_dim)";

std::string refuse(GeneralCall const& call, std::string const& expected, std::string const& got,
                   std::string const& hint = "") {
  return error_text(op_of(call.forward), expected, got, hint);
}

bool is_given(TensorMeta const& meta) { return meta.dtype_name[0] != '\0'; }

// Packed tensors come with both lists of starts, and only they have used lengths.
std::string check_form(GeneralCall const& call) {
  if (call.is_packed && !(is_given(call.cu_seqlens_q) && is_given(call.cu_seqlens_k))) {
    return refuse(call, "cu_seqlens_q and cu_seqlens_k together",
                  is_given(call.cu_seqlens_q) ? "cu_seqlens_k of None" : "cu_seqlens_q of None");
  }
  if (!call.is_packed && (call.has_seqused_q || call.has_seqused_k)) {
    return refuse(call, "seqused_q and seqused_k only with cu_seqlens_q and cu_seqlens_k",
                  call.has_seqused_q ? "seqused_q alone" : "seqused_k alone");
  }
  return {};
}

// The rule of a tensor that is like the output, and of one that is like the LSE.
TensorRule like_out(char const* name, TensorMeta const& meta, GeneralCall const& call) {
  TensorMeta const& q = call.forward.q;
  TensorMeta const& v = call.forward.v;
  if (call.is_packed) {
    return {name, meta, 3, {q.size[0], q.size[1], v.size[2], 0}, q.dtype, q.dtype_name};
  }
  return {name, meta, 4, {q.size[0], q.size[1], q.size[2], v.size[3]}, q.dtype, q.dtype_name};
}

TensorRule like_lse(char const* name, TensorMeta const& meta, GeneralCall const& call) {
  TensorMeta const& q = call.forward.q;
  char const* const dtype_name = wide_dtype_name(q);
  if (call.is_packed) {
    return {name, meta, 2, {q.size[1], q.size[0], 0, 0}, wide_dtype(q), dtype_name};
  }
  return {name, meta, 3, {q.size[0], q.size[2], q.size[1], 0}, wide_dtype(q), dtype_name};
}

struct Input {
  char const* name;
  TensorMeta const& meta;
};

// A size of one packed tensor that another has to repeat.
struct SizeRule {
  char const* name;
  TensorMeta const& meta;
  int dim;
  char const* like_name;
  TensorMeta const& like;
};

std::string check_packed_sizes(GeneralCall const& call) {
  TensorMeta const& q = call.forward.q;
  TensorMeta const& k = call.forward.k;
  TensorMeta const& v = call.forward.v;
  for (auto [name, meta] : {Input{"q", q}, Input{"k", k}, Input{"v", v}}) {
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

// What check_forward() would name by the numbers of four dimensions.
std::string check_packed_strides(GeneralCall const& call) {
  ForwardCall const& forward = call.forward;
  Input const all[] = {{"q", forward.q}, {"k", forward.k}, {"v", forward.v}, {"out", forward.out}};
  int const count = forward.has_out ? 4 : 3;
  for (int i = 0; i < count && forward.q.device == DeviceType::kCuda; ++i) {
    TensorMeta const& meta = all[i].meta;
    if (meta.size[2] > 1 && meta.stride[2] != 1) {
      return refuse(call, text(all[i].name, ".stride(2) to be 1, the head_dim contiguous"),
                    text(meta.stride[2]), text("call ", all[i].name, ".contiguous()"));
    }
  }
  TensorMeta const& out = forward.out;
  bool const is_empty = out.size[0] == 0 || out.size[1] == 0 || out.size[2] == 0;
  for (int i = 0; i < 3 && forward.has_out && !is_empty; ++i) {
    if (out.size[i] > 1 && out.stride[i] == 0) {
      return refuse(call, "out with memory for every element", text("out.stride(", i, ") of 0"),
                    "do not pass an expanded tensor");
    }
  }
  return {};
}

TensorMeta with_batch_of_one(TensorMeta meta) {
  std::copy_backward(meta.size, meta.size + 3, meta.size + 4);
  std::copy_backward(meta.stride, meta.stride + 3, meta.stride + 4);
  meta.size[0] = 1;
  meta.stride[0] = 0;
  meta.rank = 4;
  return meta;
}

std::string check_packed_tensors(GeneralCall const& call) {
  ForwardCall forward = call.forward;
  TensorMeta const& q = forward.q;
  std::string error = check_packed_sizes(call);
  if (error.empty() && forward.has_out) {
    error = check_tensor("fwd_out", like_out("out", forward.out, call), q);
  }
  if (error.empty()) {
    error = check_packed_strides(call);
  }
  if (!error.empty()) {
    return error;
  }
  for (TensorMeta* meta : {&forward.q, &forward.k, &forward.v, &forward.out}) {
    *meta = with_batch_of_one(*meta);
  }
  forward.has_batch = false;
  return check_forward(forward);
}

std::string check_tensors(GeneralCall const& call) {
  return call.is_packed ? check_packed_tensors(call) : check_forward(call.forward);
}

// A list with a number for each sequence: int32, contiguous, on the device of q. Its size is for
// the caller to check.
std::string check_list(GeneralCall const& call, Input const& list, char const* shape) {
  auto [name, meta] = list;
  if (meta.rank != 1) {
    return refuse(call, text(name, " to have 1 dimension ", shape), text(meta.rank));
  }
  if (std::strcmp(meta.dtype_name, "int32") != 0) {
    return refuse(call, text(name, ".dtype to be int32"), meta.dtype_name,
                  text("call ", name, ".int()"));
  }
  if (!same_device(meta, call.forward.q)) {
    return refuse(call, text(name, " on the device of q, ", device_text(call.forward.q)),
                  device_text(meta));
  }
  if (meta.size[0] > 1 && meta.stride[0] != 1) {
    return refuse(call, text(name, " to be contiguous"), text("a stride of ", meta.stride[0]),
                  text("call ", name, ".contiguous()"));
  }
  return {};
}

std::string check_used(GeneralCall const& call, Input const& used) {
  int64_t const batch = call.cu_seqlens_q.size[0] - 1;
  std::string const error = check_list(call, used, "(batch)");
  if (error.empty() && used.meta.size[0] != batch) {
    return refuse(call, text(used.name, ".size(0) to be the batch, ", batch),
                  text(used.meta.size[0]));
  }
  return error;
}

std::string check_lengths(GeneralCall const& call) {
  if (!call.is_packed) {
    return {};
  }
  TensorMeta const& starts = call.cu_seqlens_q;
  for (auto list : {Input{"cu_seqlens_q", starts}, Input{"cu_seqlens_k", call.cu_seqlens_k}}) {
    std::string const error = check_list(call, list, "(batch + 1)");
    if (!error.empty()) {
      return error;
    }
  }
  if (starts.size[0] < 1) {
    return refuse(call, "cu_seqlens_q.size(0), the batch + 1, to be at least 1", "0");
  }
  if (call.cu_seqlens_k.size[0] != starts.size[0]) {
    return refuse(
        call,
        text("cu_seqlens_k.size(0), the batch + 1, to be that of cu_seqlens_q, ", starts.size[0]),
        text(call.cu_seqlens_k.size[0]));
  }
  std::string const error =
      call.has_seqused_q ? check_used(call, {"seqused_q", call.seqused_q}) : "";
  return error.empty() && call.has_seqused_k ? check_used(call, {"seqused_k", call.seqused_k})
                                             : error;
}

std::string check_sinks(GeneralCall const& call) {
  TensorMeta const& q = call.forward.q;
  TensorMeta const& sinks = call.sinks;
  if (!call.has_sinks) {
    return {};
  }
  if (sinks.rank != 1) {
    return refuse(call, "s_aux to have 1 dimension (heads_q)", text(sinks.rank));
  }
  int64_t const heads = q.size[call.is_packed ? 1 : 2];
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

std::string check_scores(GeneralCall const& call) {
  if (call.window_left < -1 || call.window_right < -1) {
    return refuse(call, "window_size to be two numbers of -1 (no limit) or more",
                  text("(", call.window_left, ", ", call.window_right, ")"));
  }
  if (call.attention_chunk < 0) {
    return refuse(call, "attention_chunk to be 0 (none) or more", text(call.attention_chunk));
  }
  float const softcap = float(call.softcap);
  if (!std::isfinite(softcap) || softcap < 0.f || (softcap == 0.f && call.softcap != 0.0)) {
    return refuse(call, "softcap to be 0 (none) or a positive finite float32", text(call.softcap));
  }
  return {};
}

// Tiles of packed sequences: whole ones of 64 rows, and one more for each sequence.
std::string check_packed_tiles(GeneralCall const& call, Input const& rows) {
  constexpr double kMaxTiles = double(1 << 29);
  auto [name, meta] = rows;
  double const batch = double(call.cu_seqlens_q.size[0] - 1);
  double const tiles = double(meta.size[1]) * (std::floor(double(meta.size[0]) / 64) + batch);
  if (meta.device == DeviceType::kCuda && tiles > kMaxTiles) {
    return refuse(call,
                  text("heads * (floor(total / 64) + batch) of ", name, " to be at most ",
                       int64_t(kMaxTiles)),
                  text(int64_t(tiles)), "split the batch");
  }
  return {};
}

std::string check_query_tiles(GeneralCall const& call) {
  return call.is_packed ? check_packed_tiles(call, {"q", call.forward.q}) : "";
}

using Check = std::string (*)(GeneralCall const&);

// In this order: each one may rely on those before it.
constexpr Check kChecks[] = {check_form,        check_tensors, check_lengths,
                             check_query_tiles, check_sinks,   check_scores};

}  // namespace

std::string check_general(GeneralCall const& call) { return first_error(kChecks, call); }

std::string check_general_backward(GeneralBackwardCall const& call) {
  std::string error = check_general(call.general);
  if (error.empty()) {
    error = check_gradient_head_dims(call.general.forward);
  }
  if (!error.empty()) {
    return error;
  }
  GeneralCall const& general = call.general;
  error = general.is_packed ? check_packed_tiles(general, {"k", general.forward.k})
                            : check_key_tiles(general.forward);
  if (!error.empty()) {
    return error;
  }
  TensorRule const rules[] = {
      like_out("dout", call.dout, general), like_out("out", call.out, general),
      like_lse("lse", call.lse, general), like_lse("dlse", call.dlse, general)};
  int const count = call.has_dlse ? 4 : 3;
  for (int i = 0; i < count; ++i) {
    error = check_tensor("bwd", rules[i], general.forward.q);
    if (!error.empty()) {
      return error;
    }
  }
  return {};
}

}  // namespace fa3
