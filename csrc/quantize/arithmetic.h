// Arithmetic of quantize_fp8: float32 as on the CPU, two float16 per word, magnitudes.
//
// WHY inline PTX: the build's --use_fast_math flushes subnormals and divides approximately, and
// nvcc may fuse a multiplication and an addition.
#pragma once

#include <type_traits>

#include "core/quantize_tiles.h"
#include "device/math.h"

namespace fa3 {

constexpr uint32_t kInfinity = 0x7f800000u;
constexpr float kLargestFloat = 0x1.fffffep127f;
constexpr float kSmallestMaximum = 0x1p-64f;

template <class Element>
constexpr bool kIsBFloat = std::is_same_v<Element, cutlass::bfloat16_t>;

// ---------------------------------------------------------------------------------------- float32
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

// a / 448, correctly rounded, for a > 2^-100 (Markstein: the residue times a correctly rounded
// inverse). WHY not div.rn: it calls a function for rare cases, which costs registers.
CUTE_DEVICE float divide_by_448(float a) {
  constexpr float kInverse = 1.f / 448.f;
  float const quotient = multiply_exactly(a, kInverse);
  float const residue = multiply_add_exactly(-448.f, quotient, a);
  return multiply_add_exactly(residue, kInverse, quotient);
}

// 1 / a, correctly rounded, for 2^-100 < a < 2^125, where it equals rcp.rn.
CUTE_DEVICE float invert(float a) {
  float const inverse = reciprocal_approx(a);
  float const residue = multiply_add_exactly(-a, inverse, 1.f);
  return multiply_add_exactly(inverse, residue, inverse);
}

// The scale of a block. maximum_bits: the bits of its largest magnitude. Bits of non-negative
// floats have the same order as the floats.
CUTE_DEVICE float scale_of(uint32_t maximum_bits) {
  return divide_by_448(fmaxf(__uint_as_float(maximum_bits), kSmallestMaximum));
}

// ------------------------------------------------------------------------- two float16 in a word
CUTE_DEVICE uint32_t add_halves(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

CUTE_DEVICE uint32_t subtract_halves(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

CUTE_DEVICE uint32_t multiply_halves(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

CUTE_DEVICE uint32_t multiply_add_halves(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}

// Returns (low + high, low - high). Multiplying by 1 and -1 is exact. It is one instruction,
// because HFMA2 selects halves itself.
CUTE_DEVICE uint32_t butterfly_in_word(uint32_t word) {
  constexpr uint32_t kOneAndMinusOne = 0xbc003c00u;
  uint32_t y;
  asm("{\n.reg .b16 low, high;\n.reg .b32 lows, highs;\n"
      "mov.b32 {low, high}, %1;\n"
      "mov.b32 lows, {low, low};\n"
      "mov.b32 highs, {high, high};\n"
      "fma.rn.f16x2 %0, highs, %2, lows;\n}"
      : "=r"(y)
      : "r"(word), "r"(kOneAndMinusOne));
  return y;
}

CUTE_DEVICE uint32_t cast_four_halves(uint32_t first, uint32_t second) {
  uint32_t packed;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 low, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 high, %2;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(packed)
      : "r"(first), "r"(second));
  return packed;
}

// ------------------------------------------------------------------------------ words of elements
// Columns 2 * i and 2 * i + 1 of words in memory order, as float32.
template <class Element>
CUTE_DEVICE float2 two_columns(uint32_t const* words, int i) {
  if constexpr (sizeof(Element) == 4) {
    return make_float2(__uint_as_float(words[2 * i]), __uint_as_float(words[2 * i + 1]));
  } else {
    return unpack_two<Element>(words[i]);
  }
}

// Converts columns to float16, times a power of two, rounded once.
template <class Element>
class HalfScaler {
  static constexpr bool kIsHalf = std::is_same_v<Element, cutlass::half_t>;
  float factor_;
  uint32_t both_ = 0;  // two copies of the factor, 16 bits each
  uint32_t rest_ = 0;  // float16: no power of two above 2^15, so factor = both_ * rest_

 public:
  explicit CUTE_DEVICE HalfScaler(float factor) : factor_(factor) {
    if constexpr (kIsBFloat<Element>) {
      both_ = __byte_perm(__float_as_uint(factor), 0, 0x3232);
    } else if constexpr (kIsHalf) {
      float const most = fminf(factor, 0x1p15f);
      float const rest = fminf(fmaxf(factor * 0x1p-15f, 1.f), 0x1p15f);
      both_ = pack_two<Element>(most, most);
      rest_ = pack_two<Element>(rest, rest);
    }
  }

  CUTE_DEVICE uint32_t two(uint32_t const* words, int i) const {
    if constexpr (kIsHalf) {
      return multiply_halves(multiply_halves(words[i], both_), rest_);
    } else if constexpr (kIsBFloat<Element>) {
      uint32_t scaled;
      asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(scaled) : "r"(words[i]), "r"(both_));
      float2 const columns = unpack_two<Element>(scaled);
      return pack_two<cutlass::half_t>(columns.x, columns.y);
    } else {
      float2 const columns = two_columns<Element>(words, i);
      return pack_two<cutlass::half_t>(multiply_exactly(columns.x, factor_),
                                       multiply_exactly(columns.y, factor_));
    }
  }
};

// The larger magnitudes of two words of 16-bit elements, with arbitrary signs. A number counts as
// larger than NaN.
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

// The largest magnitude of the words; NaN only if all are NaN. WHY four chains: within a chain each
// step waits for the previous one.
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
