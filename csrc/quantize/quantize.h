// The kernels of flash_attn3.quantize_fp8. Host side; the op calls it.
#pragma once

#include "core/quantize_tiles.h"

namespace fa3 {

struct QuantizeParams {
  QuantizeShape shape;  // the tile is filled in later
  Dtype dtype = Dtype::kBFloat16;
  TensorView x;               // at multiples of 16 bytes, head_dim contiguous
  uint8_t* values = nullptr;  // e4m3, contiguous
  float* scales = nullptr;
  uint32_t* maxima = nullptr;       // QuantizePlan::words
  int const* cu_seqlens = nullptr;  // packed
  int const* seqused = nullptr;     // packed; null: all rows count
  bool is_rotated = false;
  uint32_t mixed_seed = 0;
  // Of launches for several tensors, one behind the other, each of kBlocks: this one need not wait
  // for the one before, the next one not for this one.
  bool follows = false;
  bool is_followed = false;
  // Filled in by the plan and the launch:
  int items = 0;  // tiles of a head
  FastDiv by_heads;
  int least_items = 0;  // of a CTA or cluster; the first `more_items` have one more
  int more_items = 0;
  int cta_rows = 0;
  int cluster_ctas = 1;             // that share a tile
  FastDiv by_clusters;              // of the grid
  TeamSize team_sizes[kTeamSizes];  // packed, in clusters
  ItemOrder order;
  int turns = 1;          // so many CTAs or clusters take heads of a tile in turns: a power of 2
  int64_t head_step = 0;  // elements of x, from a head of a CTA to its next
};

// kBlocks: a CTA or a cluster has the rows of a block. kExchange: CTAs tell each other their
// maxima; both read x once. kTwoPasses: maxima first, then the values, where more items share a
// scale than the GPU holds.
enum class QuantizeMethod { kBlocks, kExchange, kTwoPasses };

struct QuantizePlan {
  QuantizeMethod method;
  int64_t words;  // of 32 bits that the launch needs for maxima
};

// On the current device; x is not empty. Fills in what the launch needs.
QuantizePlan plan_quantize(QuantizeParams& params, int sm_count);

// As planned, on the current device and the given stream (a cudaStream_t). The scales by blocks
// of packed sequences are filled in where there is a block only, but for kBlocks.
void launch_quantize(QuantizePlan const& plan, QuantizeParams params, int sm_count, void* stream);

}  // namespace fa3
