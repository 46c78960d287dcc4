// Calls of quantize_fp8.
#include "checks/checks.h"
#include "checks/table.h"
#include "core/quantize_tiles.h"

namespace fa3 {
namespace {

constexpr int kBlockRows = 32;  // blocks are multiples of these

bool check_numbers(Solver& solver, QuantizeCall const& call) {
  bool const is_named = call.block == kScalePerHead || call.block == kScalePerTensor;
  double const batch = double(solver["B"]), heads = std::max(1.0, double(solver["Hq"]));
  double const rows = double(solver["sx"]) * (call.cu_seqlens ? 1 : batch);
  return (is_named || solver.in_range("block", call.block,
                                      {kBlockRows, solver.on_cuda() ? kMostIndex : kUnlimited,
                                       kBlockRows, ", 'head' or 'tensor'"})) &&
         solver.in_range("group", call.group, {1}) &&
         solver.in_range("Hq", {0, kUnlimited, call.group, ", the group"}) &&
         solver.in_range("seed", call.seed.value_or(0), {0, (int64_t(1) << 32) - 1}) &&
         (!solver.on_cuda() ||
          solver.in_range("D", {kChunkColumns, kMostQuantizedColumns, kChunkColumns},
                          "a GPU takes no others: pad x with zeros")) &&
         solver.in_int(heads * (rows / kBlockRows + batch + 2), "the blocks of ", kBlockRows,
                       " rows of all heads of x");
}

}  // namespace

std::string check_quantize(QuantizeCall const& call) {
  Solver solver("quantize_fp8", {"x", call.x}, k16Bits | k32Bits);
  solver.pack(bool(call.cu_seqlens), "bx", "sx", "Sq", "Tq");
  bool const is_fine =
      solver.fits({"x", kAnchor, "bx sx Hq D"}, call.x) &&
      (!call.cu_seqlens || solver.fits({"cu_seqlens", kInt32, "B+1"}, *call.cu_seqlens)) &&
      (!call.seqused || call.cu_seqlens ||
       solver.refuse("cu_seqlens with seqused", "no cu_seqlens")) &&
      (!call.seqused || solver.fits({"seqused", kInt32, "B"}, *call.seqused)) &&
      check_numbers(solver, call);
  return is_fine ? "" : solver.error;
}

}  // namespace fa3
