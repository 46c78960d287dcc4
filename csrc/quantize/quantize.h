// The kernels of flash_attn3.quantize_fp8. Host side; the op calls it.
#pragma once

#include "core/quantize_tiles.h"

namespace fa3 {

struct QuantizeParams {
  QuantizeShape shape;  // the tile is filled in by the launch
  Dtype dtype = Dtype::kBFloat16;
  TensorView x;               // at multiples of 16 bytes, head_dim contiguous
  uint8_t* values = nullptr;  // e4m3, contiguous
  float* scales = nullptr;
  uint32_t* maxima = nullptr;       // for two passes: as many as scales, all 0
  int const* cu_seqlens = nullptr;  // packed
  int const* seqused = nullptr;     // packed; null: all rows count
  bool is_rotated = false;
  uint32_t mixed_seed = 0;
  // Filled in by the launch:
  int cta_heads = 1;
  FastDiv by_parts;  // CTAs for the heads of a tile
};

// Whether blocks are small enough for the registers of a CTA: their scales take one pass, those of
// all others two, with a maximum for each scale between them.
bool takes_one_pass(QuantizeShape const& shape);

// On the current device and the given stream (a cudaStream_t). x is not empty. In two passes, the
// scales by blocks are filled in where there is a block only.
void launch_quantize(QuantizeParams params, int sm_count, void* stream);

}  // namespace fa3
