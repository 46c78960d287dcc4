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

// Dense, packed.
constexpr Row<Call> kTable[] = {
    {"x", at<&Call::x>, kAnchor, kAny, {"B S H D", "T H D"}},
    {"cu_seqlens", &starts_of, kInt32, kList, {"", "B+1"}},
    {"seqused", &seqused_of, kInt32, kList, {"", "B"}},
};

std::string check_tensors(Solver& solver, Call const& call) {
  if (!call.is_packed && call.has_seqused) {
    return solver.refuse("seqused only with cu_seqlens", "seqused alone");
  }
  return call.is_packed ? check_rows<kTable, 1>(solver, call, " with cu_seqlens")
                        : check_rows<kTable, 0>(solver, call);
}

std::string check_numbers(Solver const& solver, Call const& call) {
  bool const is_named = call.block == kScalePerHead || call.block == kScalePerTensor;
  if (!is_named && (call.block < 1 || call.block % kBlockRows != 0)) {
    return solver.refuse(text("block to be a multiple of ", kBlockRows, ", 'head' or 'tensor'"),
                         text(call.block));
  }
  if (call.group < 1 || solver["H"] % call.group != 0) {
    return solver.refuse("group to divide the heads of x", text(call.group));
  }
  if (call.seed && (*call.seed < 0 || *call.seed >= int64_t(1) << 32)) {
    return solver.refuse("seed to be from 0 to 2**32 - 1", text(*call.seed));
  }
  return {};
}

// What only the kernels ask for.
std::string check_sizes(Solver const& solver, Call const& call) {
  if (!solver.on_cuda()) {
    return {};
  }
  int64_t const head_dim = solver["D"];
  if (head_dim < kChunkColumns || head_dim > kMostQuantizedColumns ||
      head_dim % kChunkColumns != 0) {
    return solver.refuse(
        text("x.size(", call.x.rank - 1, "), the head_dim, to be a multiple of ", kChunkColumns,
             " from ", kChunkColumns, " to ", kMostQuantizedColumns, " on a GPU"),
        text(head_dim), "pad x with zeros");
  }
  constexpr int64_t kMost = int64_t(1) << 30;
  int64_t const batch = solver["B"];
  int64_t const heads = solver["H"];
  int64_t const rows = call.is_packed ? solver["T"] : solver["S"];
  double const blocks = double(rows) / kBlockRows * (call.is_packed ? 1 : double(batch));
  if (rows > kMost || batch > kMost || heads > kMost || call.block > kMost ||
      double(heads) * (blocks + double(batch) + 2) > double(kMost)) {
    return solver.refuse(text("at most ", kMost, " rows, and as many blocks of ", kBlockRows,
                              " rows over all heads"),
                         text(rows, " rows, ", heads, " heads and a batch of ", batch),
                         "split the batch");
  }
  return {};
}

}  // namespace

std::string check_quantize(Call const& call) {
  Solver solver("quantize_fp8", {"x", call.x});
  solver.set(kAnchor, k16Bits | k32Bits);
  return first_error<check_tensors, check_numbers, check_sizes>(solver, call);
}

}  // namespace fa3
