// The kernels of flash_attn3.quantize_fp8. Host side; the op calls it.
#pragma once

#include "core/quantize_tiles.h"

namespace fa3 {

struct QuantizeParams {
  QuantizeShape shape;
  Dtype dtype = Dtype::kBFloat16;
  TensorView x;               // at multiples of 16 bytes, head_dim contiguous
  uint8_t* values = nullptr;  // e4m3, contiguous
  float* scales = nullptr;
  uint32_t* maxima = nullptr;       // as many zeros as maxima_of() says
  int const* cu_seqlens = nullptr;  // packed
  int const* seqused = nullptr;     // packed; null: all rows count
  bool is_rotated = false;
  uint32_t mixed_seed = 0;
  // The launch sets:
  int stash_rows = 0;       // rows of a CTA in shared memory
  int stash_fragments = 0;  // in these rows
};

// Scales by head and by tensor take two passes over x, which exchange the bits of the largest
// values: as many words as there are scales. Scales by block take one pass and no words.
inline int64_t maxima_of(QuantizeShape const& shape) {
  return shape.block > 0 ? 0 : shape.scales();
}

// On the current device and the given stream (a cudaStream_t). x is not empty.
void launch_quantize(QuantizeParams params, void* stream);

}  // namespace fa3
