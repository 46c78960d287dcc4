// What crosses the boundaries of the host side, as plain data: a call's tensors described by
// integers (TensorMeta), the problem (FwdProblem), what was decided (FwdPlan) and what the kernel's
// launcher needs (FwdParams).
#pragma once

#include <cstdint>

namespace fa3 {

enum class Dtype : int {
  kFloat16 = 0,
  kBFloat16 = 1,
  kFloat8E4M3 = 2,
  kFloat32 = 3,
  kFloat64 = 4,
  kOther = 5
};
enum class DeviceType : int { kCpu = 0, kCuda = 1, kOther = 2 };

// Shape and place of a tensor; strides in elements.
struct TensorMeta {
  Dtype dtype = Dtype::kOther;
  DeviceType device = DeviceType::kOther;
  int device_index = 0;
  int rank = 0;
  int64_t size[5] = {};
  int64_t stride[5] = {};
  int64_t address = 0;           // of the first element; 0 when unknown
  char const* dtype_name = "";   // as PyTorch writes it, for messages: "float16", "int32"
  char const* device_name = "";  // "cuda", "cpu", "mps"
};

// A pointer with strides in elements, order (batch, row, head, column); columns are contiguous.
struct TensorView {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
};

enum class PackGqa : int { kNever = 0, kAlways = 1, kHeuristic = 2 };

// What the GPU offers; the defaults are those of an H100 or H200 SXM.
struct DeviceLimits {
  int sm_count = 132;
  int64_t l2_bytes = 50 << 20;
};

struct FwdProblem {
  Dtype dtype = Dtype::kBFloat16;
  int batch = 0;
  int seqlen_q = 0;
  int seqlen_k = 0;
  int heads_q = 0;
  int heads_k = 0;
  int head_dim = 0;
  int head_dim_v = 0;
  bool causal = false;
  PackGqa pack_gqa = PackGqa::kHeuristic;
  int sm_margin = 0;
  bool deterministic = false;  // the backward sums dQ in a fixed order
  DeviceLimits device;
};

// How the work of a problem is cut for one variant. Everything the launcher needs beside pointers.
struct FwdSchedule {
  int pack = 1;           // query heads in the rows of a tile (core/row_packing.h)
  int m_tiles = 0;        // tiles along the queries
  int tiles = 0;          // m_tiles * (heads_q / pack) * batch
  int section_pairs = 1;  // core/tile_order.h
  int grid = 0;           // CTAs
};

struct FwdParams {
  TensorView q;
  TensorView k;
  TensorView v;
  TensorView o;
  float* lse = nullptr;  // (batch, heads_q, seqlen_q), contiguous; nullptr: not wanted
  FwdProblem problem;
  FwdSchedule schedule;
  float softmax_scale = 1.f;
};

// How the work of a backward pass is cut. Everything the launcher needs beside pointers.
struct BwdSchedule {
  int m_tiles = 0;        // tiles along the queries: the steps of a CTA
  int n_tiles = 0;        // tiles along the keys
  int grid = 0;           // CTAs: n_tiles * heads_k * batch
  int section_pairs = 1;  // core/tile_order.h, with tiles of keys for those of queries
  int64_t rows = 0;       // queries of all heads and batches, filled up to whole tiles
  int64_t dq_floats = 0;  // of the fp32 accumulator of dQ
  int64_t flags = 0;      // deterministic: of every tile of queries, and the ticket; else 0
};

struct BwdParams {
  TensorView q;
  TensorView k;
  TensorView v;
  TensorView o;
  TensorView dout;
  TensorView dq;
  TensorView dk;
  TensorView dv;
  float const* lse = nullptr;   // (batch, heads_q, seqlen_q), contiguous, natural logarithm
  float const* dlse = nullptr;  // as lse; nullptr: zero
  float* lse_log2 = nullptr;    // workspace: schedule.rows floats
  float* delta = nullptr;       // workspace: schedule.rows floats
  float* dq_sum = nullptr;      // workspace: schedule.dq_floats floats
  int* dq_flags = nullptr;      // workspace: schedule.flags - 1 ints; nullptr: not deterministic
  int* ticket = nullptr;        // workspace: the last of schedule.flags
  FwdProblem problem;
  BwdSchedule schedule;
  float softmax_scale = 1.f;
};

}  // namespace fa3
