// Raises floats in global memory.
#pragma once

#include "device/cute.h"

namespace fa3 {

// Raises *target, which is not -0, to x. The result does not depend on the order of threads.
CUTE_DEVICE void raise_in_global(float* target, float x) {
  x += 0.f;  // 0 for -0: floats of one sign are in the order of their bits, or in the reverse one
  if (x >= 0.f) {
    atomicMax(reinterpret_cast<int*>(target), __float_as_int(x));
  } else {
    atomicMin(reinterpret_cast<unsigned*>(target), __float_as_uint(x));
  }
}

}  // namespace fa3
