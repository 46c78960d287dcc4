// Rotation of a row in fp16, two columns at a time: half the instructions, shuffles and registers
// of float32, and its rounding (2^-11 of a value) disappears beside that of e4m3 (2^-4). The range
// of fp16 is no matter: a row is first multiplied by the power of two that brings its largest value
// to 2 .. 4.
#pragma once

#include "quantize/rows.h"

namespace fa3 {

constexpr int kRowWords = kLaneColumns / 2;  // of a lane, two columns each
constexpr int kSpanWords = kSpanColumns / 2;
constexpr uint32_t kSignBits = 0x80008000u;  // of the two fp16 in a word
constexpr float kLargestFloat = 0x1.fffffep127f;

// ------------------------------------------------------------------------------ two fp16 in a word
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

// The lower one becomes the sum of both, the upper one the lower less the upper. kIsShort: in one
// instruction that takes halves twice, not in three, two of them permutes.
template <bool kIsShort>
CUTE_DEVICE uint32_t butterfly_in_word(uint32_t word) {
  constexpr uint32_t kOneAndMinusOne = 0xbc003c00u;
  if (!kIsShort) {
    return multiply_add_halves(__byte_perm(word, 0, 0x3232), kOneAndMinusOne,
                               __byte_perm(word, 0, 0x1010));
  }
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

// Spans to fp16, times a power of two, rounded once.
template <class Element>
class HalfScaler {
  static constexpr bool kIsHalf = std::is_same_v<Element, cutlass::half_t>;
  float factor_;
  uint32_t both_;  // the factor twice, in 16 bits
  uint32_t rest_;  // fp16 has none above 2^15: what they lack

 public:
  explicit CUTE_DEVICE HalfScaler(float factor) : factor_(factor) {
    if constexpr (kIsBFloat<Element>) {
      both_ = __byte_perm(__float_as_uint(factor), 0, 0x3232);
    }
    if constexpr (kIsHalf) {
      float const most = fminf(factor, 0x1p15f);
      float const rest = fminf(fmaxf(factor * 0x1p-15f, 1.f), 0x1p15f);
      both_ = pack_two<Element>(most, most);
      rest_ = pack_two<Element>(rest, rest);
    }
  }

  // Columns 2 * i and 2 * i + 1.
  CUTE_DEVICE uint32_t two(RawRow<Element> const& raw, int i) const {
    if constexpr (kIsHalf) {
      return multiply_halves(multiply_halves(raw.words[i], both_), rest_);
    } else if constexpr (kIsBFloat<Element>) {
      uint32_t scaled;
      asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(scaled) : "r"(raw.words[i]), "r"(both_));
      float2 const two = unpack_two<Element>(scaled);
      return pack_two<cutlass::half_t>(two.x, two.y);
    } else {
      return pack_two<cutlass::half_t>(
          multiply_exactly(__uint_as_float(raw.words[2 * i]), factor_),
          multiply_exactly(__uint_as_float(raw.words[2 * i + 1]), factor_));
    }
  }
};

// ------------------------------------------------------------------------------------------ signs
// sign_bits(), of the even columns to the even bits of the lower half, of the odd ones to those of
// the upper half.
CUTE_DEVICE uint32_t spread_signs(uint32_t bits) {
  return (bits & 0x5555u) | (bits & 0xaaaau) << 15;
}

// Changes signs of the words of a lane. A shift by a constant puts those of a word where they
// belong. spread: spread_signs() of the spans of a row of this head, from the first of the lane on.
CUTE_DEVICE void change_signs(uint32_t (&words)[kRowWords], ThreadPlace const& place,
                              uint32_t const* spread) {
  uint32_t both = spread[0];
  if (place.has_second()) {
    both += 2 * spread[unsigned(place.distance) / kSpanColumns];
  }
  CUTE_UNROLL
  for (int i = 0; i < kRowWords; ++i) {
    int const place_in_both = 2 * (i % kSpanWords) + i / kSpanWords;
    words[i] ^= (both << (15 - place_in_both)) & kSignBits;
  }
}

// ------------------------------------------------------------------------------------ butterflies
// Words i and i + kDistance become their sum and their difference.
template <int kDistance>
CUTE_DEVICE void butterflies(uint32_t (&words)[kRowWords]) {
  CUTE_UNROLL
  for (int i = 0; i < kRowWords; ++i) {
    if ((i & kDistance) == 0) {
      uint32_t const first = words[i];
      uint32_t const second = words[i + kDistance];
      words[i] = add_halves(first, second);
      words[i + kDistance] = subtract_halves(first, second);
    }
  }
}

constexpr uint32_t kOnes = 0x3c003c00u;
constexpr uint32_t kMinusOnes = 0xbc00bc00u;

// The lane of the lower half gets the sum of its word and the other's, the other lane the lower's
// word less its own. signs: the product is exact, so this is one rounded sum.
CUTE_DEVICE void butterflies_of_lanes(uint32_t (&words)[kRowWords], int distance) {
  uint32_t const signs = (int(threadIdx.x) & distance) != 0 ? kMinusOnes : kOnes;
  CUTE_UNROLL
  for (uint32_t& word : words) {
    word = multiply_add_halves(word, signs, __shfl_xor_sync(0xffffffffu, word, distance));
  }
}

// Of the columns that a lane has: distances of less than a span.
template <bool kIsShort>
CUTE_DEVICE void butterflies_of_span(uint32_t (&words)[kRowWords], bool is_full) {
  CUTE_UNROLL
  for (uint32_t& word : words) {
    word = butterfly_in_word<kIsShort>(word);
  }
  butterflies<1>(words);
  butterflies<2>(words);
  if (is_full) {
    butterflies<kSpanWords / 2>(words);
  }
}

// LaneOrder::kPieces. kDim: 0 or of one or two pieces. Whole warps call it.
template <int kDim, bool kIsShort>
class PieceRotation {
  int width_;

  // kWidth: of the piece, 0: only width_ says it.
  template <int kWidth>
  CUTE_DEVICE void rotate(uint32_t (&words)[kRowWords]) const {
    int const width = kWidth > 0 ? kWidth : width_;
    butterflies_of_span<kIsShort>(words, width >= kSpanColumns);
#pragma unroll(kWidth > 0 ? 3 : 1)
    for (int distance = 1; kLaneColumns * distance < width; distance *= 2) {
      butterflies_of_lanes(words, distance);
    }
    if (width >= kLaneColumns) {
      butterflies<kSpanWords>(words);
    }
  }

 public:
  float norm;

  explicit CUTE_DEVICE PieceRotation(ThreadPlace const& place)
      : width_(place.width), norm(hadamard_norm(place.width)) {}

  CUTE_DEVICE uint32_t largest_of_piece(uint32_t largest) const {
#pragma unroll 3
    for (int distance = 1; kLaneColumns * distance < width_; distance *= 2) {
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    }
    return largest;
  }

  CUTE_DEVICE void apply(uint32_t (&words)[kRowWords]) const {
    constexpr int kWidest = int(std::bit_floor(unsigned(kDim)));
    if (kDim == kWidest || width_ == kWidest) {
      rotate<kWidest>(words);
    } else {
      rotate<kDim - kWidest>(words);
    }
  }
};

// LaneOrder::kRows: the lane of a narrow piece is its own partner, whose words times 0 it adds. A
// second span that is not there is +0, and -0 when it is added: so both become the first, signs of
// zeros too.
template <bool kIsShort>
class RowRotation {
  int partner_;
  uint32_t signs_;
  uint32_t sum_signs_;  // of the second span, when it is added to the first

 public:
  float norm;

  explicit CUTE_DEVICE RowRotation(ThreadPlace const& place) : norm(hadamard_norm(place.width)) {
    bool const is_alone = place.width < 2 * kLaneColumns;
    bool const is_upper = place.column > 0;
    partner_ = int(threadIdx.x) % 32 + (is_alone ? 0 : is_upper ? -1 : 1);
    signs_ = is_alone ? 0 : is_upper ? kMinusOnes : kOnes;
    sum_signs_ = place.has_second() ? kOnes : kMinusOnes;
  }

  CUTE_DEVICE uint32_t largest_of_piece(uint32_t largest) const {
    return max(largest, __shfl_sync(0xffffffffu, largest, partner_));
  }

  CUTE_DEVICE void apply(uint32_t (&words)[kRowWords]) const {
    butterflies_of_span<kIsShort>(words, true);
    CUTE_UNROLL
    for (uint32_t& word : words) {
      word = multiply_add_halves(word, signs_, __shfl_sync(0xffffffffu, word, partner_));
    }
    CUTE_UNROLL
    for (int i = 0; i < kSpanWords; ++i) {
      uint32_t const first = words[i];
      uint32_t const second = words[i + kSpanWords];
      words[i] = multiply_add_halves(second, sum_signs_, first);
      words[i + kSpanWords] = multiply_add_halves(second, kMinusOnes, first);
    }
  }
};

// ------------------------------------------------------------------------------------------- rows
// A row that is rotated: not yet normalised, and in units of its own. Infinities and NaN make all
// values NaN, so that none of them is infinite.
class RotatedRow {
  float unit_;  // what 1 stands for

 public:
  static constexpr bool kMayBeInfinite = false;
  static constexpr int kWords = kRowWords;

  uint32_t words[kRowWords];

  CUTE_DEVICE float unit() const { return unit_; }
  CUTE_DEVICE void set_unit(float unit) { unit_ = unit; }

  // spread: as of change_signs(). Whole warps call it.
  template <class Element, class Rotation>
  CUTE_DEVICE void take(RawRow<Element> const& raw, ThreadPlace const& place,
                        uint32_t const* spread, Rotation const& rotation) {
    uint32_t const largest =
        rotation.largest_of_piece(__float_as_uint(largest_magnitude<Element>(raw.words)));
    // WHY not below 2^-125: 2^126 is the largest factor. Of an infinity or NaN it becomes 0.
    constexpr uint32_t kExponent = 0x00800000u;
    uint32_t const power = max(largest & kInfinity, 2 * kExponent);
    unit_ = __uint_as_float(power - kExponent);
    HalfScaler<Element> const scaler(__uint_as_float(kInfinity - power));
    CUTE_UNROLL
    for (int i = 0; i < kRowWords; ++i) {
      words[i] = scaler.two(raw, i);
    }
    change_signs(words, place, spread);
  }

  template <class Rotation>
  CUTE_DEVICE void rotate(Rotation const& rotation) {
    rotation.apply(words);
  }

  // The largest magnitude that is a number, normalised.
  CUTE_DEVICE float largest(float norm) const {
    float const value =
        multiply_exactly(fmaxf(largest_magnitude<cutlass::half_t>(words), 0.f), norm);
    return fminf(multiply_exactly(value, unit_), kLargestFloat);
  }

  CUTE_DEVICE void make_infinities_nan() {}

  CUTE_DEVICE CastRow cast(float factor) const {
    float const own = multiply_exactly(factor, unit_);
    uint32_t const both = pack_two<cutlass::half_t>(own, own);
    CastRow result;
    CUTE_UNROLL
    for (int i = 0; i < kRowWords / 2; ++i) {
      result.fours[i] = cast_four_halves(multiply_halves(words[2 * i], both),
                                         multiply_halves(words[2 * i + 1], both));
    }
    return result;
  }
};

template <class Element, int kDim>
using RowOf = std::conditional_t<kDim == kPlain, PlainRow<Element>, RotatedRow>;

// kIsShort: as of butterfly_in_word().
template <LaneOrder kOrder, int kDim, bool kIsShort>
using RotationOf =
    std::conditional_t<kDim == kPlain, NoRotation,
                       std::conditional_t<kOrder == LaneOrder::kRows, RowRotation<kIsShort>,
                                          PieceRotation<kDim, kIsShort>>>;

}  // namespace fa3
