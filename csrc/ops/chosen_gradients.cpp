// The op `bwd_chosen` on CUDA: check, allocate, launch. No synchronisation; everything runs on the
// current stream of the tensors' device.
#include "chosen/gradients.h"

#include <bit>

#include "attention_ops.h"
#include "checks/table.h"
#include "ops/boxed_stack.h"
#include "ops/cuda_call.h"
#include "ops/library.h"

namespace fa3 {
namespace {

using Args = ops::bwd_chosen;

struct ChosenCall {
  Args& args;
  TensorMeta q, k, v, out, dout, lse, indices;
  std::optional<TensorMeta> q_latent, dlse, counts;

  explicit ChosenCall(Args& args_)
      : args(args_),
        q(describe(args.q)),
        k(describe(args.k)),
        v(describe(args.v)),
        out(describe(args.out)),
        dout(describe(args.dout)),
        lse(describe(args.lse)),
        indices(describe(args.indices)) {
    describe_if(args.q_latent, q_latent);
    describe_if(args.dlse, dlse);
    describe_if(args.index_counts, counts);
  }

  ChosenWidths widths() const { return {int(k.size[2]), int(v.size[2]), bool(q_latent)}; }
};

bool check_tensors(Solver& solver, ChosenCall const& call) {
  auto const is_of = [&](char const* name, TensorMeta const& meta, std::string_view dtype,
                         std::initializer_list<int64_t> sizes) {
    return (meta.rank == int(sizes.size()) && std::equal(sizes.begin(), sizes.end(), meta.size) &&
            meta.dtype_name == dtype && same_device(meta, call.q)) ||
           solver.refuse(text(name, " of shape ", shape_text(sizes.begin(), int(sizes.size())),
                              " and ", dtype, " on the device of q"),
                         text(shape_text(meta.size, meta.rank), ", ", meta.dtype_name));
  };
  std::string_view const dtype = call.q.dtype_name;
  if (call.q.rank != 3 || call.k.rank != 3 || call.v.rank != 3 || call.indices.rank != 3) {
    return solver.refuse("q, k, v and indices of three dimensions", "others");
  }
  if ((dtype != "bfloat16" && dtype != "float16") || !has_chosen_gradients(call.widths()) ||
      (call.q_latent && call.k.size[1] != 1)) {
    return solver.refuse("16-bit q, k and v of head dims 64 or 128, or latents of 64 and 512",
                         text(call.k.size[2], " and ", call.v.size[2], ", ", dtype));
  }
  int64_t const queries = call.q.size[0], heads_q = call.q.size[1], lists = call.indices.size[1];
  int64_t const rows = call.k.size[0], heads_k = call.k.size[1], width_v = call.v.size[2];
  if (heads_k == 0 || heads_q % heads_k != 0 || (lists != 1 && lists != heads_k)) {
    return solver.refuse("heads of k that divide those of q, and a list for all or each",
                         text(heads_q, ", ", heads_k, " and ", lists));
  }
  return is_of("q", call.q, dtype, {queries, heads_q, call.k.size[2]}) &&
         is_of("k", call.k, dtype, {rows, heads_k, call.k.size[2]}) &&
         is_of("v", call.v, dtype, {rows, heads_k, width_v}) &&
         is_of("out", call.out, dtype, {queries, heads_q, width_v}) &&
         is_of("dout", call.dout, dtype, {queries, heads_q, width_v}) &&
         is_of("lse", call.lse, "float32", {heads_q, queries}) &&
         is_of("indices", call.indices, "int32", {queries, lists, call.indices.size[2]}) &&
         (!call.q_latent ||
          is_of("q_latent", *call.q_latent, dtype, {queries, heads_q, width_v})) &&
         (!call.dlse || is_of("dlse", *call.dlse, "float32", {heads_q, queries})) &&
         (!call.counts || is_of("index_counts", *call.counts, "int32", {queries}));
}

bool check_numbers(Solver& solver, ChosenCall const& call) {
  int64_t const block = call.args.index_block;
  double const ctas = double(call.q.size[0]) * double(call.q.size[1]);
  return (block == 1 || block == 64 || block == 128 ||
          solver.refuse("index_block to be 1, 64 or 128", text(block))) &&
         solver.in_int(ctas, kMostIndex, "the heads of all queries") &&
         solver.in_int(double(call.k.size[0]) * double(call.k.size[1]) *
                           double(call.k.size[2] + call.v.size[2]) / 16,
                       kMostIndex, "groups of 16 columns of k and v") &&
         solver.in_int(double(call.indices.size[2]) * double(block), kMostIndex,
                       "the rows of a list");
}

// Every layout becomes one that kernels can load by chunks of 16 bytes.
TensorView chunks_of(OwnedTensor& tensor, TensorMeta const& meta) {
  TensorMeta known = with_batch(meta);
  if (!has_chunks(meta)) {
    tensor = packed_copy(Args::kName, tensor, meta);
    known = with_batch(describe(tensor));
  }
  return view(known);
}

template <class T>
T const* contiguous(OwnedTensor& tensor, TensorMeta const& meta) {
  if (!is_contiguous(meta)) {
    tensor = packed_copy(Args::kName, tensor, meta);
  }
  return reinterpret_cast<T const*>(describe(tensor).address);
}

ChosenGradientParams params_of(ChosenCall const& call) {
  Args& args = call.args;
  ChosenGradientParams p;
  p.dtype = call.q.dtype;
  p.widths = call.widths();
  p.q = chunks_of(args.q, call.q);
  p.k = chunks_of(args.k, call.k);
  p.v = chunks_of(args.v, call.v);
  p.out = chunks_of(args.out, call.out);
  p.dout = chunks_of(args.dout, call.dout);
  if (call.q_latent) {
    p.q_latent = chunks_of(args.q_latent, *call.q_latent);
  }
  p.lse = contiguous<float>(args.lse, call.lse);
  p.dlse = call.dlse ? contiguous<float>(args.dlse, *call.dlse) : nullptr;
  p.counts = call.counts ? contiguous<int>(args.index_counts, *call.counts) : nullptr;
  p.indices = contiguous<int>(args.indices, call.indices);
  p.index_strides[0] = call.indices.size[1] * call.indices.size[2];
  p.index_strides[1] = call.indices.size[1] > 1 ? call.indices.size[2] : 0;
  p.indices_of_list = int(call.indices.size[2]);
  p.block_log2 = std::countr_zero(uint64_t(args.index_block));
  p.queries = int(call.q.size[0]);
  p.heads_q = int(call.q.size[1]);
  p.heads_k = int(call.k.size[1]);
  p.rows = int(call.k.size[0]);
  p.scale = float(args.scale);
  return p;
}

void boxed_bwd_chosen(StableIValue* stack, uint64_t, uint64_t) {
  struct {
    OwnedTensor dq, dk, dv, dq_latent, delta;
  } results;
  BoxedStack values(stack);
  Args args;
  args.read(values);
  ChosenCall const call(args);
  Solver solver(Args::kName, {"q", call.q}, kInt32Set);
  check_tensors(solver, call) && check_numbers(solver, call);
  throw_if(solver.error);

  int const device = call.q.device_index;
  DeviceGuard const guard(device);
  ChosenGradientParams params = params_of(call);
  results.dq = allocate_like(Args::kName, call.q);
  results.dk = allocate_like(Args::kName, call.k);
  results.dv = allocate_like(Args::kName, call.v);
  int64_t const none[] = {0};
  results.dq_latent = call.q_latent ? allocate_like(Args::kName, *call.q_latent)
                                    : allocate(Args::kName, none, 1, call.q.dtype, device);
  results.delta = allocate_like(Args::kName, call.lse);
  int64_t const sizes[] = {call.k.size[0], call.k.size[1], call.k.size[2] + call.v.size[2]};
  OwnedTensor const sums = allocate(Args::kName, sizes, 3, Dtype::kFloat32, device);
  fill(sums, 0.);
  params.dq = mutable_data(results.dq);
  params.dk = mutable_data(results.dk);
  params.dv = mutable_data(results.dv);
  params.dq_latent = mutable_data(results.dq_latent);
  params.delta = static_cast<float*>(mutable_data(results.delta));
  params.sums = static_cast<float*>(mutable_data(sums));
  launch_chosen_gradients(params, current_stream(device));
  Args::box(stack, results);
}

constexpr BoxedOp kOps[] = {{Args::kName, &boxed_bwd_chosen}};

}  // namespace

std::span<BoxedOp const> chosen_gradient_ops() { return kOps; }

}  // namespace fa3
