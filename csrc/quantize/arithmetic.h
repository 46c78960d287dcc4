// Arithmetic of quantize_fp8: float32 as the CPU does it, magnitudes.
//
// WHY inline PTX: the build's --use_fast_math flushes subnormals and divides approximately, and
// nvcc may contract.
#pragma once

#include <type_traits>

#include "core/quantize_tiles.h"
#include "device/math.h"

namespace fa3 {

template <class Element>
constexpr bool kIsBFloat = std::is_same_v<Element, cutlass::bfloat16_t>;

CUTE_DEVICE float multiply_exactly(float a, float b) {
  float y;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

CUTE_DEVICE float multiply_add_exactly(float a, float b, float c) {
  float y;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));
  return y;
}

// a / 448, correctly rounded, for 2^-100 < a (Markstein: the residue times a correctly rounded
// inverse). WHY not div.rn: it calls a function for the rare cases, around which all registers
// live.
CUTE_DEVICE float divide_by_448(float a) {
  constexpr float kInverse = 1.f / 448.f;
  float const quotient = multiply_exactly(a, kInverse);
  float const residue = multiply_add_exactly(-448.f, quotient, a);
  return multiply_add_exactly(residue, kInverse, quotient);
}

// 1 / a, correctly rounded, for 2^-100 < a < 2^125: what rcp.rn does there.
CUTE_DEVICE float invert(float a) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(a));
  float const residue = multiply_add_exactly(-a, inverse, 1.f);
  return multiply_add_exactly(inverse, residue, inverse);
}

// -------------------------------------------------------------------------------------- magnitudes
// Of two values each: the larger magnitudes, with any signs. NaN does not count beside a number.
template <class Element>
CUTE_DEVICE uint32_t larger_of_two(uint32_t a, uint32_t b) {
  uint32_t y;
  if constexpr (kIsBFloat<Element>) {
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  } else {
    asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  }
  return y;
}

// The largest magnitude of some words; NaN only if there is nothing else. Four at a time: each
// waits for the one before.
template <class Element, int kWords>
CUTE_DEVICE float largest_magnitude(uint32_t const (&words)[kWords]) {
  if constexpr (sizeof(Element) == 4) {
    float found[4];
    CUTE_UNROLL
    for (int i = 0; i < kWords; ++i) {
      float const own = fabsf(__uint_as_float(words[i]));
      found[i % 4] = i < 4 ? own : fmaxf(found[i % 4], own);
    }
    return fmaxf(fmaxf(found[0], found[1]), fmaxf(found[2], found[3]));
  } else {
    uint32_t found[4];
    CUTE_UNROLL
    for (int i = 0; i < kWords; ++i) {
      found[i % 4] = i < 4 ? words[i] : larger_of_two<Element>(found[i % 4], words[i]);
    }
    float2 const two = unpack_two<Element>(larger_of_two<Element>(
        larger_of_two<Element>(found[0], found[1]), larger_of_two<Element>(found[2], found[3])));
    return fmaxf(fabsf(two.x), fabsf(two.y));
  }
}

}  // namespace fa3
