// A fragment: a lane's share of a row, up to 32 columns of a piece of kWidth columns, with its
// loads, rotation, cast and stores. Rotated values are float16, which takes half as many
// instructions and shuffles as float32. The rounding error of float16 (2^-11) is small compared to
// that of e4m3 (2^-4). Its range suffices, because a piece is first multiplied by the power of two
// that brings its largest value to between 2 and 4.
#pragma once

#include "quantize/arithmetic.h"

namespace fa3 {

template <int kWidth>
constexpr int kColumnsOf = kWidth < kLaneColumns ? kWidth : kLaneColumns;  // per lane

// The fragment as in x, 2 or 4 bytes per column.
template <class Element, int kWidth>
struct RawFragment {
  static constexpr int kLoadColumns = 16 / int(sizeof(Element));
  static constexpr int kLoads = kColumnsOf<kWidth> / kLoadColumns;

  uint32_t words[4 * kLoads];

  // source: address of the lane's first column, a multiple of 16 bytes.
  CUTE_DEVICE void load(Element const* source) {
    CUTE_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      int const column = column_of_lane(kWidth, 0, i * kLoadColumns);
      uint4 const four = __ldg(reinterpret_cast<uint4 const*>(source + column));
      words[4 * i] = four.x;
      words[4 * i + 1] = four.y;
      words[4 * i + 2] = four.z;
      words[4 * i + 3] = four.w;
    }
  }
};

// WHY PTX: nvcc merges stores of 8 and 16 bytes in two branches into stores of 4 bytes.
CUTE_DEVICE void store_8(uint8_t* target, uint32_t const* words) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(target)),
               "r"(words[0]), "r"(words[1])
               : "memory");
}

CUTE_DEVICE void store_16(uint8_t* target, uint32_t const* words) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(target)),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// The fragment in e4m3.
template <int kWidth>
struct CastFragment {
  uint32_t fours[kColumnsOf<kWidth> / 4];

  // target: address of the lane's first column. is_aligned: rows begin at multiples of 16 bytes,
  // otherwise of 8.
  CUTE_DEVICE void store(uint8_t* target, bool is_aligned) const {
    CUTE_UNROLL
    for (int i = 0; i < kColumnsOf<kWidth> / 4; i += 4) {
      uint8_t* const span = target + column_of_lane(kWidth, 0, 4 * i);
      if constexpr (kWidth < kSpanColumns) {
        store_8(span, fours);
      } else if (is_aligned) {
        store_16(span, fours + i);
      } else {
        store_8(span, fours + i);
        store_8(span + 8, fours + i + 2);
      }
    }
  }
};

// ------------------------------------------------------------------------------------------ plain
// Values without rotation, as in x. take() replaces infinities by NaN.
template <class Element, int kWidth>
class PlainFragment {
  using Raw = RawFragment<Element, kWidth>;
  static constexpr uint32_t kHalfInfinity = kIsBFloat<Element> ? 0x7f80u : 0x7c00u;

  CUTE_DEVICE void make_infinities_nan() {
    CUTE_UNROLL
    for (uint32_t& word : raw.words) {
      if constexpr (sizeof(Element) == 4) {
        word |= (word & 0x7fffffffu) == kInfinity ? 0x7fffffffu : 0u;
      } else {
        word |= (word & 0x7fffu) == kHalfInfinity ? 0x7fffu : 0u;
        word |= (word >> 16 & 0x7fffu) == kHalfInfinity ? 0x7fff0000u : 0u;
      }
    }
  }

 public:
  struct Signs {
    CUTE_DEVICE Signs(uint32_t, int, int) {}
  };

  Raw raw;

  CUTE_DEVICE void take(Raw const& source, Signs const&) {
    raw = source;
    if (__float_as_uint(largest_magnitude<Element>(raw.words)) == kInfinity) {
      make_infinities_nan();
    }
  }

  // The largest magnitude. NaN does not count.
  CUTE_DEVICE float largest() const { return fmaxf(largest_magnitude<Element>(raw.words), 0.f); }

  CUTE_DEVICE CastFragment<kWidth> cast(float scale) const {
    float const factor = invert(scale);
    CastFragment<kWidth> result;
    CUTE_UNROLL
    for (int i = 0; i < kColumnsOf<kWidth> / 4; ++i) {
      float2 const a = two_columns<Element>(raw.words, 2 * i);
      float2 const b = two_columns<Element>(raw.words, 2 * i + 1);
      result.fours[i] =
          pack_four_e4m3(multiply_exactly(a.x, factor), multiply_exactly(a.y, factor),
                         multiply_exactly(b.x, factor), multiply_exactly(b.y, factor));
    }
    return result;
  }
};

// ---------------------------------------------------------------------------------------- rotated
// Values times signs and Hadamard matrices, divided by the unit of their piece and not yet
// normalised. An infinity or NaN makes all values of its piece NaN.
template <class Element, int kWidth>
class RotatedFragment {
  static constexpr int kLanes = lanes_of_piece(kWidth);
  static constexpr int kWords = kColumnsOf<kWidth> / 2;
  static constexpr int kSpanWords = kSpanColumns / 2;
  static constexpr float kNorm = hadamard_norm(kWidth);

  // Replaces words i and i + kDistance by their sum and difference.
  template <int kDistance>
  CUTE_DEVICE void butterflies() {
    CUTE_UNROLL
    for (int i = 0; i < kWords; ++i) {
      if (kDistance < kWords && (i & kDistance) == 0) {
        uint32_t const first = words[i];
        uint32_t const second = words[i + kDistance];
        words[i] = add_halves(first, second);
        words[i + kDistance] = subtract_halves(first, second);
      }
    }
  }

  // Gives the lower lane the sum, and the upper lane the lower lane's word minus its own.
  // Multiplying by 1 and -1 is exact.
  CUTE_DEVICE void butterflies_over_lanes(int distance) {
    constexpr uint32_t kOnes = 0x3c003c00u;
    constexpr uint32_t kMinusOnes = 0xbc00bc00u;
    uint32_t const sign = (int(threadIdx.x) & distance) != 0 ? kMinusOnes : kOnes;
    CUTE_UNROLL
    for (uint32_t& word : words) {
      word = multiply_add_halves(word, sign, __shfl_xor_sync(0xffffffffu, word, distance));
    }
  }

 public:
  // The signs of a lane's words, the same in all rows of a head.
  class Signs {
    static constexpr uint32_t kBothSigns = 0x80008000u;
    uint32_t bits_;

    // Moves even columns to even bits of the lower half, odd columns to even bits of the upper
    // half.
    static CUTE_DEVICE uint32_t spread(uint32_t bits) {
      return (bits & 0x5555u) | (bits & 0xaaaau) << 15;
    }

   public:
    // column: the first column of the lane.
    CUTE_DEVICE Signs(uint32_t mixed_seed, int kv_head, int column)
        : bits_(spread(sign_bits(mixed_seed, kv_head, column))) {
      if constexpr (kWidth >= kLaneColumns) {
        bits_ += 2 * spread(sign_bits(mixed_seed, kv_head, column + kWidth / 2));
      }
    }

    CUTE_DEVICE uint32_t sign_mask(int i) const {
      int const bit = 2 * (i % kSpanWords) + i / kSpanWords;
      return (bits_ << (15 - bit)) & kBothSigns;
    }
  };

  uint32_t words[kWords];
  float unit;  // the value that 1 represents

  // Whole warps call this.
  CUTE_DEVICE void take(RawFragment<Element, kWidth> const& raw, Signs const& signs) {
    uint32_t largest = __float_as_uint(largest_magnitude<Element>(raw.words));
    CUTE_UNROLL
    for (int distance = 1; distance < kLanes; distance *= 2) {
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    }
    // WHY the power is at least 2^-125: the largest factor is 2^126. An infinity or NaN makes the
    // factor 0.
    constexpr uint32_t kExponent = 0x00800000u;
    uint32_t const power = max(largest & kInfinity, 2 * kExponent);
    unit = __uint_as_float(power - kExponent);
    HalfScaler<Element> const scaler(__uint_as_float(kInfinity - power));
    CUTE_UNROLL
    for (int i = 0; i < kWords; ++i) {
      words[i] = scaler.two(raw.words, i) ^ signs.sign_mask(i);
    }
    rotate();
  }

  // The largest normalised magnitude. NaN does not count.
  CUTE_DEVICE float largest() const {
    float const found = fmaxf(largest_magnitude<cutlass::half_t>(words), 0.f);
    return fminf(multiply_exactly(multiply_exactly(found, kNorm), unit), kLargestFloat);
  }

  CUTE_DEVICE CastFragment<kWidth> cast(float scale) const {
    float const factor = multiply_exactly(multiply_exactly(kNorm, invert(scale)), unit);
    uint32_t const both = pack_two<cutlass::half_t>(factor, factor);
    CastFragment<kWidth> result;
    CUTE_UNROLL
    for (int i = 0; i < kWords / 2; ++i) {
      result.fours[i] = cast_four_halves(multiply_halves(words[2 * i], both),
                                         multiply_halves(words[2 * i + 1], both));
    }
    return result;
  }

 private:
  // Butterflies over distances of 1 to 8 columns, then over other lanes, then over half the width.
  CUTE_DEVICE void rotate() {
    CUTE_UNROLL
    for (uint32_t& word : words) {
      word = butterfly_in_word(word);
    }
    butterflies<1>();
    butterflies<2>();
    if constexpr (kWidth >= kSpanColumns) {
      butterflies<kSpanWords / 2>();
    }
    CUTE_UNROLL
    for (int distance = 1; distance < kLanes; distance *= 2) {
      butterflies_over_lanes(distance);
    }
    if constexpr (kWidth >= kLaneColumns) {
      butterflies<kSpanWords>();
    }
  }
};

}  // namespace fa3
