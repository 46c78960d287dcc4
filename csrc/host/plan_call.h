// A call that is planned by its sizes, without tensors: what the Python functions of the planner
// read, and how it becomes a problem.
#pragma once

#include <algorithm>
#include <string>

#include "dispatch/checks_fp8.h"
#include "dispatch/general_problem.h"
#include "dispatch/text.h"

namespace fa3::host {

struct PlanCall {
  char const* dtype_name = "";
  Dtype dtype = Dtype::kOther;
  int batch = 0;
  int seqlen_q = 0;  // packed: the longest, 0 if nobody knows
  int seqlen_k = 0;
  int heads_q = 0;
  int heads_k = 0;
  int head_dim = 0;
  int head_dim_v = 0;
  int total_q = -1;  // packed: rows of the tensors; else -1
  int total_k = -1;
  int has_seqused = 0;  // seqused_q or seqused_k
  int promote = 0;      // of e4m3
  int causal = 0;
  long long window_left = -1;  // as Python's functions write it
  long long window_right = -1;
  long long attention_chunk = 0;
  double softcap = 0.0;
  int has_row_features = 0;  // sinks, row maxima
  int sm_margin = 0;
  int sm_count = 0;
  long long l2_bytes = 0;

  bool is_packed() const { return total_q >= 0; }
};

// A contiguous CUDA tensor of these sizes.
inline TensorMeta describe(char const* dtype_name, Dtype dtype,
                           std::initializer_list<int64_t> sizes) {
  TensorMeta meta;
  meta.dtype = dtype;
  meta.dtype_name = dtype_name;
  meta.device = DeviceType::kCuda;
  meta.device_name = "cuda";
  meta.rank = int(sizes.size());
  std::copy(sizes.begin(), sizes.end(), meta.size);
  int64_t stride = 1;
  for (int i = meta.rank - 1; i >= 0; --i) {
    meta.stride[i] = stride;
    stride *= std::max<int64_t>(1, meta.size[i]);
  }
  return meta;
}

// A tensor of rows of the queries (or keys) of all heads.
inline TensorMeta describe_rows(PlanCall const& call, bool of_keys, int heads, int head_dim) {
  int const seqlen = of_keys ? call.seqlen_k : call.seqlen_q;
  int const total = of_keys ? call.total_k : call.total_q;
  return call.is_packed()
             ? describe(call.dtype_name, call.dtype, {total, heads, head_dim})
             : describe(call.dtype_name, call.dtype, {call.batch, seqlen, heads, head_dim});
}

inline GeneralCall general_call(PlanCall const& call) {
  GeneralCall general;
  ForwardCall& forward = general.forward;
  forward.q = describe_rows(call, /*of_keys=*/false, call.heads_q, call.head_dim);
  forward.k = describe_rows(call, /*of_keys=*/true, call.heads_k, call.head_dim);
  forward.v = describe_rows(call, /*of_keys=*/true, call.heads_k, call.head_dim_v);
  forward.sm_margin = call.sm_margin;
  forward.sm_count = call.sm_count;
  general.is_packed = call.is_packed();
  if (general.is_packed) {
    general.cu_seqlens_q = describe("int32", Dtype::kOther, {call.batch + 1});
    general.cu_seqlens_k = general.cu_seqlens_q;
    general.has_seqused_k = call.has_seqused;
    general.seqused_k = describe("int32", Dtype::kOther, {call.batch});
  }
  general.causal = call.causal;
  general.window_left = call.window_left;
  general.window_right = call.window_right;
  general.attention_chunk = call.attention_chunk;
  general.softcap = call.softcap;
  return general;
}

// With the outputs of the forward and their gradients.
inline GeneralBackwardCall general_backward_call(PlanCall const& call) {
  GeneralBackwardCall backward;
  backward.general = general_call(call);
  backward.general.forward.op = "bwd";
  backward.out = describe_rows(call, /*of_keys=*/false, call.heads_q, call.head_dim_v);
  backward.dout = backward.out;
  backward.lse =
      call.is_packed()
          ? describe("float32", Dtype::kFloat32, {call.heads_q, call.total_q})
          : describe("float32", Dtype::kFloat32, {call.batch, call.heads_q, call.seqlen_q});
  return backward;
}

// Why these cannot be sizes of tensors, or "".
inline std::string size_error(PlanCall const& call) {
  int const smallest =
      std::min({call.batch, call.seqlen_q, call.seqlen_k, call.heads_q, call.heads_k, call.head_dim,
                call.head_dim_v, call.is_packed() ? call.total_k : 0});
  if (smallest < 0) {
    return error_text("explain", "sizes of 0 or more", text(smallest));
  }
  if (call.sm_count < 1) {
    return error_text("explain", "sm_count to be 1 or more", text(call.sm_count));
  }
  return {};
}

// What is wrong with the call, or "".
inline std::string call_error(PlanCall const& call) {
  std::string const error = size_error(call);
  if (!error.empty()) {
    return error;
  }
  if (call.dtype != Dtype::kFloat8E4M3) {
    return check_general(general_call(call));
  }
  Fp8Call fp8;
  fp8.general = general_call(call);
  return check_fp8(fp8);
}

inline std::string backward_call_error(PlanCall const& call) {
  std::string const error = size_error(call);
  return error.empty() ? check_general_backward(general_backward_call(call)) : error;
}

// The problem of a call without errors.
inline FwdProblem problem_of(PlanCall const& call) {
  FwdProblem problem = general_problem(
      general_call(call), GeneralSizes{call.seqlen_q, call.seqlen_k}, call.has_row_features);
  problem.sm_margin = call.sm_margin;
  problem.promote = call.promote;
  problem.device = DeviceLimits{call.sm_count, call.l2_bytes};
  return problem;
}

}  // namespace fa3::host
