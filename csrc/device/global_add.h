// Adds to global memory from registers.
#pragma once

#include "device/cute.h"

namespace fa3 {

CUTE_DEVICE void store_to_global(float4* target, float4 value) { *target = value; }

// Adds four floats. The order relative to other threads' additions is undefined.
CUTE_DEVICE void add_to_global(float4* target, float4 value) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(target), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
}

}  // namespace fa3
