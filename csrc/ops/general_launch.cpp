#include "ops/general_launch.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>

#include <algorithm>
#include <cmath>

#include "plan/problem_of_call.h"
#include "ops/forward_launch.h"

namespace fa3 {
namespace {

void fill(OwnedTensor const& tensor, double value) {
  require(aoti_torch_aten_fill__Scalar(tensor.get(), value), "fill a result");
}

// Out, LSE and row maxima: new tensors, but out if it was given.
GeneralResults allocate_results(char const* op, ForwardCall& args, Dtype out_dtype) {
  AttentionCall const& call = args.call;
  TensorMeta const& q = call.q;
  int const heads_dim = q.rank - 2;
  int64_t out_size[4];
  std::copy(q.size, q.size + q.rank, out_size);
  out_size[q.rank - 1] = call.v.size[q.rank - 1];
  if (!args.out) {
    args.out = allocate(op, out_size, q.rank, out_dtype, q.device_index);
  }
  int64_t const packed[] = {q.size[heads_dim], q.size[0]};
  int64_t const dense[] = {q.size[0], q.size[heads_dim], q.size[1]};
  int64_t const* const row_size = call.is_packed() ? packed : dense;
  int64_t const nothing[] = {0};
  Dtype const wide = Dtype::kFloat32;
  GeneralResults results;
  results.lse = allocate(op, row_size, q.rank - 1, wide, q.device_index);
  results.max_logits = call.execution.return_max_logits
                           ? allocate(op, row_size, q.rank - 1, wide, q.device_index)
                           : allocate(op, nothing, 1, wide, q.device_index);
  return results;
}

// Results of a call that has no row, or rows but no sequence.
void clear_results(ForwardCall const& args, GeneralResults const& results) {
  require(aoti_torch_zero_(args.out.get()), "fill out");
  fill(results.lse, -INFINITY);
  fill(results.max_logits, -INFINITY);
}

// K and V for a call that has none: a row of zeros that no query sees.
OwnedTensor without_keys(char const* op, FwdParams& params, int device) {
  FwdProblem const& problem = params.problem;
  int64_t const row = std::max(problem.head_dim, problem.head_dim_v);
  int64_t const sizes[] = {problem.heads_k, row};
  OwnedTensor zeros = allocate(op, sizes, 2, problem.dtype, device);
  require(aoti_torch_zero_(zeros.get()), "fill a row of zeros");
  params.k = TensorView{mutable_data(zeros), 0, row, row};
  params.v = params.k;
  return zeros;
}

void launch(char const* op, ForwardCall& args, FwdParams& params, GeneralResults const& results) {
  AttentionCall const& call = args.call;
  int const device = call.q.device_index;
  ForwardLaunch const launch(params);
  OwnedTensor workspace;
  if (int64_t const ints = launch.workspace_ints(); ints > 0) {
    workspace = allocate(op, &ints, 1, Dtype::kFloat32, device);
    params.workspace = static_cast<int*>(mutable_data(workspace));
  }
  bool const has_keys =
      params.problem.is_packed ? params.problem.total_k > 0 : params.problem.seqlen_k > 0;
  params.q = readable(op, args.q, with_batch(call.q));
  OwnedTensor zeros;
  if (has_keys) {
    params.k = readable(op, args.k, with_batch(call.k));
    params.v = readable(op, args.v, with_batch(call.v));
  } else {
    zeros = without_keys(op, params, device);
  }
  params.lse = static_cast<float*>(mutable_data(results.lse));
  if (call.execution.return_max_logits) {
    params.max_logits = static_cast<float*>(mutable_data(results.max_logits));
  }
  params.sinks = data_of<float>(call.score.sinks);
  params.lengths = lengths_of(call);
  params.softmax_scale = float(call.softmax_scale());
  params.softcap = float(call.score.softcap);
  launch.run(op, params, args.out);
}

}  // namespace

GeneralResults run_general(char const* op, ForwardCall& args, FwdParams& params) {
  params.problem = problem_of(args.call);
  FwdProblem const& problem = params.problem;
  DeviceGuard const guard(args.call.q.device_index);
  GeneralResults results = allocate_results(op, args, params.out_dtype);
  int const rows = problem.is_packed ? problem.total_q : problem.seqlen_q;
  bool const is_empty = problem.batch == 0 || problem.heads_q == 0 || rows == 0;
  if (is_empty) {
    clear_results(args, results);
  } else {
    launch(op, args, params, results);
  }
  return results;
}

}  // namespace fa3
