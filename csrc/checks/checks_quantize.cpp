#include "checks/checks_quantize.h"

#include <algorithm>
#include <cstring>

#include "core/quantize_tiles.h"
#include "checks/checks.h"
#include "call/tensor_text.h"

namespace fa3 {
namespace {

constexpr int kBlockRows = 32;  // blocks are multiples of these
constexpr int64_t kSeeds = int64_t(1) << 32;

std::string refuse(std::string const& expected, std::string const& got,
                   std::string const& hint = "") {
  return error_text("quantize_fp8", expected, got, hint);
}

int64_t heads_of(QuantizeCall const& call) { return call.x.size[call.is_packed ? 1 : 2]; }
int64_t rows_of(QuantizeCall const& call) { return call.x.size[call.is_packed ? 0 : 1]; }

std::string check_x(QuantizeCall const& call) {
  TensorMeta const& x = call.x;
  if (x.rank != (call.is_packed ? 3 : 4)) {
    std::string const shape =
        x.rank == 1 ? text("(", x.size[0], ",)") : shape_text(x.size, std::min(x.rank, 5));
    return refuse(text("x of the shape ", call.is_packed ? "(total, heads, head_dim)"
                                                         : "(batch, seqlen, heads, head_dim)"),
                  shape);
  }
  if (x.dtype != Dtype::kBFloat16 && x.dtype != Dtype::kFloat16 && x.dtype != Dtype::kFloat32) {
    return refuse("x.dtype to be bfloat16, float16 or float32", x.dtype_name);
  }
  return {};
}

std::string check_numbers(QuantizeCall const& call) {
  bool const is_named = call.block == kScalePerHead || call.block == kScalePerTensor;
  if (!is_named && (call.block < 1 || call.block % kBlockRows != 0)) {
    return refuse(text("block to be a multiple of ", kBlockRows, ", 'head' or 'tensor'"),
                  text(call.block));
  }
  if (call.group < 1 || heads_of(call) % call.group != 0) {
    return refuse("group to divide the heads of x", text(call.group));
  }
  if (call.seed && (*call.seed < 0 || *call.seed >= kSeeds)) {
    return refuse("seed to be from 0 to 2**32 - 1", text(*call.seed));
  }
  return {};
}

std::string check_list(QuantizeCall const& call, char const* name, TensorMeta const& list) {
  if (list.rank != 1 || std::strcmp(list.dtype_name, "int32") != 0 || !same_device(list, call.x)) {
    return refuse(text(name, " of one dimension and int32, on the device of x"),
                  text(list.rank, ", ", list.dtype_name, ", ", device_text(list)));
  }
  if (list.size[0] > 1 && list.stride[0] != 1) {
    return refuse(text(name, " to be contiguous"), text("a stride of ", list.stride[0]),
                  text("call ", name, ".contiguous()"));
  }
  return {};
}

std::string check_lists(QuantizeCall const& call) {
  if (!call.is_packed) {
    return call.has_seqused ? refuse("seqused only with cu_seqlens", "seqused alone") : "";
  }
  std::string error = check_list(call, "cu_seqlens", call.cu_seqlens);
  if (error.empty() && call.has_seqused) {
    error = check_list(call, "seqused", call.seqused);
  }
  if (!error.empty()) {
    return error;
  }
  int64_t const starts = call.cu_seqlens.size[0];
  if (starts < 1 || (call.has_seqused && call.seqused.size[0] != starts - 1)) {
    return refuse("cu_seqlens of batch + 1 numbers and seqused of batch",
                  text(starts, " and ", call.has_seqused ? text(call.seqused.size[0]) : "none"));
  }
  return {};
}

// What only the kernels ask for.
std::string check_sizes(QuantizeCall const& call) {
  int64_t const head_dim = call.x.size[call.x.rank - 1];
  if (head_dim < kChunkColumns || head_dim > kMostQuantizedColumns ||
      head_dim % kChunkColumns != 0) {
    return refuse(
        text("x.size(", call.x.rank - 1, "), the head_dim, to be a multiple of ", kChunkColumns,
             " from ", kChunkColumns, " to ", kMostQuantizedColumns, " on a GPU"),
        text(head_dim), "pad x with zeros");
  }
  constexpr int64_t kMost = int64_t(1) << 30;
  int64_t const batch = call.is_packed ? call.cu_seqlens.size[0] - 1 : call.x.size[0];
  int64_t const heads = heads_of(call);
  if (rows_of(call) > kMost || batch > kMost || heads > kMost || call.block > kMost ||
      double(heads) * (double(rows_of(call)) / kBlockRows * (call.is_packed ? 1 : double(batch)) +
                       double(batch) + 2) >
          double(kMost)) {
    return refuse(
        text("at most ", kMost, " rows, and as many blocks of ", kBlockRows, " rows and a head"),
        text(rows_of(call), " rows, ", heads, " heads and a batch of ", batch), "split the batch");
  }
  return {};
}

using Check = std::string (*)(QuantizeCall const&);

// In this order: each one may rely on those before it.
constexpr Check kChecks[] = {check_x, check_numbers, check_lists, check_sizes};

}  // namespace

std::string check_quantize(QuantizeCall const& call) { return first_error(kChecks, call); }

}  // namespace fa3
