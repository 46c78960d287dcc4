#include "ops/backward_launch.h"

#include <stdexcept>

#include "bwd_built.inc"
#include "bwd_registry.inc"
#include "plan/plan_backward.h"
#include "plan/registry.h"
#include "schedule/prepare.h"

namespace fa3 {
namespace {

TensorView readable_input(char const* op, OwnedTensor& tensor) {
  return readable(op, tensor, describe(tensor));
}

// Gradients come with any strides: .sum().backward() gives a dO with stride 0 everywhere.
TensorView readable_gradient(char const* op, OwnedTensor& tensor) {
  TensorMeta const meta = with_batch(describe(tensor));
  bool has_own_elements = meta.stride[3] == 1;
  for (int i = 0; i < 3; ++i) {
    has_own_elements = has_own_elements && (meta.size[i] == 1 || meta.stride[i] != 0);
  }
  if (!has_own_elements) {
    tensor = packed_copy(op, tensor, meta);
    return view(describe(tensor));
  }
  return readable(op, tensor, meta);
}

float const* readable_rows(char const* op, OwnedTensor& tensor) {
  if (!tensor) {
    return nullptr;
  }
  TensorMeta const meta = describe(tensor);
  if (!is_contiguous(meta)) {
    tensor = packed_copy(op, tensor, meta);
  }
  return static_cast<float const*>(mutable_data(tensor));
}

// The launcher of the variant that the plan picked, and the schedule.
BwdLaunch plan_launch(BwdParams& params) {
  BwdPlan const plan = plan_backward(params.problem);
  BwdLaunch const launcher = kBwdLaunchers[plan.variant];
  if (!launcher) {
    throw std::runtime_error(missing_backward_text(plan.variant, kBwdBuilt));
  }
  params.schedule = plan.schedule;
  return launcher;
}

// One allocation: LSE and delta of every row, the accumulator of dQ, the tables of packed
// sequences, the ticket, then the flags of dQ; ints are as wide as floats. Whole tiles of 64 rows
// and more keep each part aligned.
OwnedTensor allocate_workspace(char const* op, BwdParams& params, int device) {
  static_assert(sizeof(int) == sizeof(float));
  BwdSchedule const& schedule = params.schedule;
  int64_t const rows = schedule.rows;
  int64_t const floats = 2 * rows + schedule.dq_floats + schedule.table_ints + schedule.flags;
  OwnedTensor workspace = allocate(op, &floats, 1, Dtype::kFloat32, device);
  params.lse_log2 = static_cast<float*>(mutable_data(workspace));
  params.delta = params.lse_log2 + rows;
  params.dq_sum = params.delta + rows;
  int* const tables = reinterpret_cast<int*>(params.dq_sum + schedule.dq_floats);
  params.tables = schedule.table_ints > 0 ? tables : nullptr;
  params.ticket = tables + schedule.table_ints;
  params.dq_flags = params.ticket + 1;
  return workspace;
}

}  // namespace

void launch_backward(char const* op, OpTensors& tensors, BackwardResults const& results,
                     BwdParams& params) {
  int const device = describe(tensors.q).device_index;
  BwdLaunch const launcher = plan_launch(params);
  OwnedTensor const workspace = allocate_workspace(op, params, device);
  params.q = readable_input(op, tensors.q);
  params.k = readable_input(op, tensors.k);
  params.v = readable_input(op, tensors.v);
  params.o = readable_gradient(op, tensors.out);
  params.dout = readable_gradient(op, tensors.dout);
  params.lse = readable_rows(op, tensors.lse);
  params.dlse = readable_rows(op, tensors.dlse);
  Target const targets[] = {{op, results.dq}, {op, results.dk}, {op, results.dv}};
  params.dq = targets[0].view();
  params.dk = targets[1].view();
  params.dv = targets[2].view();
  void* const stream = current_stream(device);
  if (params.problem.is_packed) {
    launch_prepare(prepare_params(params), stream);
  }
  launcher(params, stream);
  for (Target const& target : targets) {
    target.finish();
  }
}

}  // namespace fa3
