// Arithmetic of quantize.cu: float32 as the CPU does it, chunks of 8 columns in registers.
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

// Round to nearest even; beyond 448 to 448, NaN to 0x7f. `low` lands in the lower byte.
CUTE_DEVICE uint32_t pack_two_e4m3(float low, float high) {
  uint16_t packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}

CUTE_DEVICE bool is_infinite(float x) { return (__float_as_uint(x) & 0x7fffffffu) == 0x7f800000u; }

// 8 columns as they lie in memory, at a multiple of 16 bytes.
template <class Element>
struct RawChunk {
  static constexpr int kWords = kChunkColumns * int(sizeof(Element)) / 4;
  static constexpr bool kIsWide = sizeof(Element) == 4;

  uint32_t words[kWords];

  CUTE_DEVICE void clear() {
    CUTE_UNROLL
    for (uint32_t& word : words) {
      word = 0;
    }
  }

  CUTE_DEVICE void load(Element const* source) {
    CUTE_UNROLL
    for (int i = 0; i < kWords / 4; ++i) {
      uint4 const four = __ldg(reinterpret_cast<uint4 const*>(source) + i);
      words[4 * i] = four.x;
      words[4 * i + 1] = four.y;
      words[4 * i + 2] = four.z;
      words[4 * i + 3] = four.w;
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

// The signs of 8 columns (sign_bits()), spread so that a shift by a constant puts those of a word
// of a RawChunk where they belong.
template <class Element>
struct ColumnSigns {
  using Raw = RawChunk<Element>;
  uint32_t spread;

  CUTE_DEVICE explicit ColumnSigns(uint32_t bits)
      : spread(Raw::kIsWide ? bits : (bits & 0x55u) | (bits & 0xaau) << 15) {}

  CUTE_DEVICE void apply(Raw& raw) const {
    CUTE_UNROLL
    for (int i = 0; i < Raw::kWords; ++i) {
      raw.words[i] ^= Raw::kIsWide ? (spread << (31 - i)) & 0x80000000u
                                   : (spread << (15 - 2 * i)) & 0x80008000u;
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

// The columns of one or several rows that a thread has go through the butterflies of their piece;
// not yet normalised. widest: columns of the widest piece of a row; kDim: of a row, 0: any number.
// Whole warps call it.
template <int kDim, int kRows>
CUTE_DEVICE void rotate_rows(float (&rows)[kRows][kLaneColumns], LaneColumns const& own, int lane,
                             int widest) {
  CUTE_UNROLL
  for (auto& row : rows) {
    butterflies<1, kLaneColumns>(row);
    butterflies<2, kLaneColumns>(row);
    butterflies<4, kLaneColumns>(row);
  }
  // The lane of the lower half gets the sum of its column and the other's, the other lane the
  // lower's column less its own. factor: the product is exact, so this is one rounded sum. A lane
  // whose piece is narrower adds 0 times its own column, which changes no finite number.
#pragma unroll(kDim > 0 ? 5 : 1)
  for (int distance = 1; kLaneColumns * distance < widest; distance *= 2) {
    bool const is_within = kLaneColumns * distance < own.width;
    float const factor = !is_within ? 0.f : (lane & distance) != 0 ? -1.f : 1.f;
    int const source = int(threadIdx.x) ^ (is_within ? distance : 0);
    CUTE_UNROLL
    for (int i = 0; i < kRows * kLaneColumns; ++i) {
      float& column = rows[i / kLaneColumns][i % kLaneColumns];
      column = multiply_add_exactly(column, factor, __shfl_sync(0xffffffffu, column, source));
    }
  }
  if (own.has_second()) {
    CUTE_UNROLL
    for (auto& row : rows) {
      butterflies<kChunkColumns, kLaneColumns>(row);
    }
  }
}

}  // namespace fa3
