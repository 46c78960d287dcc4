// Host side of the kernels for gradients of attention to chosen keys. The op `bwd_chosen` calls
// it.
#pragma once

#include "core/int_math.h"
#include "core/problem.h"

namespace fa3 {

constexpr int kHeadRows = 64;  // query heads of a CTA

// Head dims with kernels: of Q and K, of V, and whether V are latents, which are keys too.
struct ChosenWidths {
  int k;
  int v;
  bool has_latents;

  constexpr bool operator==(ChosenWidths const&) const = default;
};

struct ChosenGradientParams {
  Dtype dtype = Dtype::kBFloat16;
  ChosenWidths widths{};
  // Rows and heads.
  TensorView q;
  TensorView q_latent;  // without latents unused
  TensorView k;
  TensorView v;
  TensorView out;
  TensorView dout;
  float const* lse = nullptr;   // (heads_q, queries)
  float const* dlse = nullptr;  // the same, or none
  int const* indices = nullptr;
  int const* counts = nullptr;    // (queries), or none
  int64_t index_strides[2] = {};  // between queries, and between KV heads (0: one list for all)
  int indices_of_list = 0;
  int block_log2 = 0;  // rows of a block
  int queries = 0;
  int heads_q = 0;
  int heads_k = 0;
  int rows = 0;  // tokens that k and v have
  float scale = 1.f;

  // Contiguous.
  void* dq = nullptr;
  void* dq_latent = nullptr;
  void* dk = nullptr;
  void* dv = nullptr;
  float* delta = nullptr;  // (heads_q, queries): rowsum(dO * O) - dLSE
  float* sums = nullptr;  // (rows, heads_k, columns of k and v): zeros before, then those of dk, dv

  FA3_HD int group() const { return heads_q / heads_k; }
  FA3_HD int head_blocks() const { return ceil_div(group(), kHeadRows); }
};

bool has_chosen_gradients(ChosenWidths const& widths);

// Launches on the current device and the given stream (a cudaStream_t).
void launch_chosen_gradients(ChosenGradientParams const& params, void* stream);

}  // namespace fa3
