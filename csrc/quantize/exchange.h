// Scales of more rows than a CTA has, in one pass over x: the kernel of exchange.cu. Host side.
#pragma once

#include "quantize/quantize.h"

namespace fa3 {

// Whether the items that share a scale are few enough; fills in the tile, the order and the number
// of items. `maxima` of the launch has a word for each of them.
bool fits_exchange(QuantizeParams& params, int sm_count);

void launch_exchange(QuantizeParams const& params, int sm_count, void* stream);

// Sets words to 0.
void clear_words(uint32_t* words, int64_t count, void* stream);

}  // namespace fa3
