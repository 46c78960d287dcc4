// Host side of the kernels of flash_attn3.quantize_fp8. The op calls it.
#pragma once

#include "core/quantize_tiles.h"

namespace fa3 {

struct QuantizeParams {
  QuantizeShape shape;
  Dtype dtype = Dtype::kBFloat16;
  TensorView x;               // 16-byte aligned, head_dim contiguous
  uint8_t* values = nullptr;  // e4m3, contiguous
  float* scales = nullptr;
  uint32_t* maxima = nullptr;       // maxima_of(shape) zeros
  int const* cu_seqlens = nullptr;  // packed
  int const* seqused = nullptr;     // packed; nullptr: all rows are used
  bool is_rotated = false;
  uint32_t mixed_seed = 0;
  // Set by the launch:
  int stash_rows = 0;       // rows of a CTA in shared memory
  int stash_fragments = 0;  // fragments in these rows
};

// Words in `maxima`. Scales by head or tensor take two passes over x, which exchange the bits of
// the largest values, one word per scale. Scales by block take one pass and need no words.
inline int64_t maxima_of(QuantizeShape const& shape) {
  return shape.block > 0 ? 0 : shape.scales();
}

// Launches on the current device and the given stream (a cudaStream_t). x is not empty.
void launch_quantize(QuantizeParams params, void* stream);

}  // namespace fa3
