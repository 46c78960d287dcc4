// Calls of quantize_fp8.
#include "checks/checks.h"
#include "checks/table.h"
#include "core/quantize_tiles.h"

namespace fa3 {
namespace {

using Call = QuantizeCall;

constexpr int kBlockRows = 32;  // blocks are multiples of these

TensorMeta const* starts_of(Call const& call) {
  return call.is_packed ? &call.cu_seqlens : nullptr;
}
TensorMeta const* seqused_of(Call const& call) {
  return call.has_seqused ? &call.seqused : nullptr;
}

constexpr Row<Call> kTable[] = {
    {1, at<&Call::x>, {"x", kAnchor, "bx sx Hq D"}},
    {1, &starts_of, {"cu_seqlens", kInt32, "B+1", kList}},
    {1, &seqused_of, {"seqused", kInt32, "B", kList}},
};

bool check_numbers(Solver& solver, Call const& call) {
  bool const is_named = call.block == kScalePerHead || call.block == kScalePerTensor;
  return (is_named || (call.block >= 1 && call.block % kBlockRows == 0) ||
          solver.refuse(text("block to be a multiple of ", kBlockRows, ", 'head' or 'tensor'"),
                        text(call.block))) &&
         ((call.group >= 1 && solver["Hq"] % call.group == 0) ||
          solver.refuse("group to divide the heads of x", text(call.group))) &&
         solver.in_range("seed", call.seed.value_or(0), {0, (int64_t(1) << 32) - 1});
}

// What only the kernels ask for.
bool check_sizes(Solver& solver, Call const& call) {
  constexpr int64_t kMost = int64_t(1) << 30;
  int64_t const batch = solver["B"];
  int64_t const heads = solver["Hq"];
  int64_t const rows = solver["sx"];
  double const blocks = double(rows) / kBlockRows * (call.is_packed ? 1 : double(batch));
  bool const is_small = rows <= kMost && batch <= kMost && heads <= kMost && call.block <= kMost &&
                        double(heads) * (blocks + double(batch) + 2) <= double(kMost);
  return !solver.on_cuda() ||
         (solver.in_range({"x", call.x}, call.x.rank - 1, "head_dim",
                          {kChunkColumns, kMostQuantizedColumns, kChunkColumns},
                          "pad x with zeros") &&
          (is_small || solver.refuse(text("at most ", kMost, " rows, and as many blocks of ",
                                          kBlockRows, " rows over all heads"),
                                     text(rows, " rows, ", heads, " heads and a batch of ", batch),
                                     "split the batch")));
}

bool check_call(Solver& solver, Call const& call) {
  return (call.is_packed || !call.has_seqused ||
          solver.refuse("cu_seqlens with seqused", "no cu_seqlens")) &&
         check_rows<kTable>(solver, call) && check_numbers(solver, call) &&
         check_sizes(solver, call);
}

}  // namespace

std::string check_quantize(Call const& call) {
  Solver solver("quantize_fp8", {"x", call.x}, k16Bits | k32Bits);
  solver.pack(call.is_packed, "bx", "sx", "Sq", "Tq");
  return error_of(std::move(solver), check_call, call);
}

}  // namespace fa3
