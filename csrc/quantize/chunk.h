// Arithmetic of quantize.cu: float32 as the CPU does it, spans of 16 columns in registers.
//
// WHY inline PTX: the build's --use_fast_math flushes subnormals and divides approximately, and
// nvcc may contract. Subnormals end up as zeros here, but with the sign that they had.
#pragma once

#include "core/quantize_tiles.h"
#include "device/math.h"

namespace fa3 {

CUTE_DEVICE float add_exactly(float a, float b) {
  float y;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

CUTE_DEVICE float subtract_exactly(float a, float b) {
  float y;
  asm("sub.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

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

// Of the lower and of the upper 16 bits.
CUTE_DEVICE uint32_t max_of_halves(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("max.u16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

CUTE_DEVICE bool is_infinite(float x) { return (__float_as_uint(x) & 0x7fffffffu) == 0x7f800000u; }

// 16 columns as they lie in memory, at a multiple of 16 bytes.
template <class Element>
struct RawSpan {
  static constexpr int kWords = kSpanColumns * int(sizeof(Element)) / 4;
  static constexpr bool kIsWide = sizeof(Element) == 4;

  uint32_t words[kWords];

  CUTE_DEVICE void clear() {
    CUTE_UNROLL
    for (uint32_t& word : words) {
      word = 0;
    }
  }

  // is_full: all columns, else the first 8.
  CUTE_DEVICE void load(Element const* source, bool is_full) {
    CUTE_UNROLL
    for (int i = 0; i < kWords / 4; ++i) {
      if (i < kWords / 8 || is_full) {
        uint4 const four = __ldg(reinterpret_cast<uint4 const*>(source) + i);
        words[4 * i] = four.x;
        words[4 * i + 1] = four.y;
        words[4 * i + 2] = four.z;
        words[4 * i + 3] = four.w;
      }
    }
  }

  CUTE_DEVICE void unpack(float* columns) const {
    CUTE_UNROLL
    for (int i = 0; i < kWords; ++i) {
      if constexpr (kIsWide) {
        columns[i] = __uint_as_float(words[i]);
      } else {
        float2 const two = unpack_two<Element>(words[i]);
        columns[2 * i] = two.x;
        columns[2 * i + 1] = two.y;
      }
    }
  }
};

// sign_bits(), of the even columns to the even bits of the lower half, of the odd ones to those of
// the upper half.
CUTE_DEVICE uint32_t spread_signs(uint32_t bits) {
  return (bits & 0x5555u) | (bits & 0xaaaau) << 15;
}

// The signs of the columns of a lane. A shift by a constant puts those of a word of a RawSpan where
// they belong.
template <class Element>
class LaneSigns {
  using Raw = RawSpan<Element>;
  uint32_t both_;

 public:
  // Of the two spans, spread_signs().
  CUTE_DEVICE LaneSigns(uint32_t first, uint32_t second) : both_(first + 2 * second) {}

  // kSpan: 0 or 1.
  template <int kSpan>
  CUTE_DEVICE void apply(Raw& raw) const {
    CUTE_UNROLL
    for (int i = 0; i < Raw::kWords; ++i) {
      if constexpr (Raw::kIsWide) {
        int const place = i / 2 * 2 + i % 2 * 16 + kSpan;
        raw.words[i] ^= (both_ << (31 - place)) & 0x80000000u;
      } else {
        raw.words[i] ^= (both_ << (15 - 2 * i - kSpan)) & 0x80008000u;
      }
    }
  }
};

// Columns i and i + kDistance of `columns` become their sum and their difference.
template <int kDistance, int kColumns>
CUTE_DEVICE void butterflies(float* columns) {
  CUTE_UNROLL
  for (int i = 0; i < kColumns; ++i) {
    if ((i & kDistance) == 0) {
      float const first = columns[i];
      float const second = columns[i + kDistance];
      columns[i] = add_exactly(first, second);
      columns[i + kDistance] = subtract_exactly(first, second);
    }
  }
}

// The columns of a row that a thread has go through the butterflies of their piece; not yet
// normalised. kWidth: of the piece, 0: only `width` says it. Whole warps call it.
template <int kWidth>
CUTE_DEVICE void rotate_row(float (&row)[kLaneColumns], int width) {
  width = kWidth > 0 ? kWidth : width;
  butterflies<1, kLaneColumns>(row);
  butterflies<2, kLaneColumns>(row);
  butterflies<4, kLaneColumns>(row);
  if (width >= kSpanColumns) {
    butterflies<kChunkColumns, kLaneColumns>(row);
  }
  // The lane of the lower half gets the sum of its column and the other's, the other lane the
  // lower's column less its own. factor: the product is exact, so this is one rounded sum.
#pragma unroll(kWidth > 0 ? 3 : 1)
  for (int distance = 1; kLaneColumns * distance < width; distance *= 2) {
    float const factor = (int(threadIdx.x) & distance) != 0 ? -1.f : 1.f;
    CUTE_UNROLL
    for (float& column : row) {
      column = multiply_add_exactly(column, factor, __shfl_xor_sync(0xffffffffu, column, distance));
    }
  }
  if (width >= kLaneColumns) {
    butterflies<kSpanColumns, kLaneColumns>(row);
  }
}

}  // namespace fa3
