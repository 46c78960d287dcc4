// PTX instructions on numbers. A float is its bits; the approximate instructions give what is
// correctly rounded, but for rcp, whose users have to allow for an error.
#pragma once

#include <algorithm>

#include "types.h"

namespace emulator {

// ---------------------------------------------------------------------------------------- integers
template <class T>
using Bits = std::make_unsigned_t<T>;
template <class T>
constexpr int kBits = 8 * int(sizeof(T));

template <class T>
Bits<T> op_add(T a, T b) {
  return Bits<T>(Bits<T>(a) + Bits<T>(b));
}

template <class T>
Bits<T> op_sub(T a, T b) {
  return Bits<T>(Bits<T>(a) - Bits<T>(b));
}

template <class T>
u64 op_mul_wide(T a, T b) {
  using Wide = std::conditional_t<std::is_signed_v<T>, i64, u64>;
  return u64(Wide(a) * Wide(b));
}

template <class T>
Bits<T> op_mul_lo(T a, T b) {
  return Bits<T>(u64(Bits<T>(a)) * u64(Bits<T>(b)));
}

template <class T>
Bits<T> op_mul_hi(T a, T b) {
  return Bits<T>((__int128(a) * __int128(b)) >> kBits<T>);
}

template <class T>
Bits<T> op_mad_lo(T a, T b, T c) {
  return Bits<T>(op_mul_lo<T>(a, b) + Bits<T>(c));
}

// By 0: what the GPU gives, without a trap.
template <class T>
Bits<T> op_div(T a, T b) {
  if (b == 0) {
    return Bits<T>(~Bits<T>(0));
  }
  return std::is_signed_v<T> && b == T(-1) ? op_sub<T>(0, a) : Bits<T>(a / b);
}

template <class T>
Bits<T> op_rem(T a, T b) {
  return b == 0 ? Bits<T>(a) : std::is_signed_v<T> && b == T(-1) ? Bits<T>(0) : Bits<T>(a % b);
}

template <class T>
Bits<T> op_min(T a, T b) {
  return Bits<T>(std::min(a, b));
}

template <class T>
Bits<T> op_max(T a, T b) {
  return Bits<T>(std::max(a, b));
}

template <class T>
Bits<T> op_neg(T a) {
  return op_sub<T>(0, a);
}

template <class T>
Bits<T> op_abs(T a) {
  return a < 0 ? op_neg<T>(a) : Bits<T>(a);
}

template <class T>
T op_and(T a, T b) {
  return T(a & b);
}

template <class T>
T op_or(T a, T b) {
  return T(a | b);
}

template <class T>
T op_xor(T a, T b) {
  return T(a ^ b);
}

template <class T>
T op_not(T a) {
  return std::is_same_v<T, bool> ? T(!a) : T(~a);
}

template <class T>
Bits<T> op_shl(T a, u32 count) {
  return count < u32(kBits<T>) ? Bits<T>(Bits<T>(a) << count) : Bits<T>(0);
}

// Signed numbers are filled with copies of the sign.
template <class T>
Bits<T> op_shr(T a, u32 count) {
  if (count < u32(kBits<T>)) {
    return Bits<T>(a >> count);
  }
  return Bits<T>(std::is_signed_v<T> && a < 0 ? -1 : 0);
}

template <class T>
Bits<T> op_selp(T a, T b, bool first) {
  return Bits<T>(first ? a : b);
}

inline u32 op_selp_f32(u32 a, u32 b, bool first) { return first ? a : b; }

template <class T>
bool op_setp_eq(T a, T b) {
  return a == b;
}

template <class T>
bool op_setp_ne(T a, T b) {
  return a != b;
}

template <class T>
bool op_setp_lt(T a, T b) {
  return a < b;
}

template <class T>
bool op_setp_le(T a, T b) {
  return a <= b;
}

template <class T>
bool op_setp_gt(T a, T b) {
  return a > b;
}

template <class T>
bool op_setp_ge(T a, T b) {
  return a >= b;
}

template <class To, class From>
Bits<To> op_cvt(From a) {
  return Bits<To>(To(a));
}

template <class T>
u32 op_popc(T a) {
  return u32(std::popcount(Bits<T>(a)));
}

template <class T>
u32 op_clz(T a) {
  return u32(std::countl_zero(Bits<T>(a)));
}

template <class T>
u32 op_bfind_shiftamt(T a) {
  return a == 0 ? ~0u : op_clz<T>(a);
}

template <class T>
Bits<T> op_brev(T a) {
  Bits<T> found = 0;
  for (int i = 0; i < kBits<T>; ++i) {
    found |= Bits<T>((Bits<T>(a) >> i & 1) << (kBits<T> - 1 - i));
  }
  return found;
}

// The low bits of a in place of those of b from `first` on.
template <class T>
Bits<T> op_bfi(T a, T b, u32 first, u32 count) {
  if (first >= u32(kBits<T>) || count == 0) {
    return b;
  }
  Bits<T> const low = count >= u32(kBits<T>) ? ~Bits<T>(0) : (Bits<T>(1) << count) - 1;
  return Bits<T>((Bits<T>(b) & ~(low << first)) | (Bits<T>(a) & low) << first);
}

template <class T>
u32 op_prmt(u32 a, u32 b, u32 choice) {
  u64 const bytes = u64(b) << 32 | a;
  u32 found = 0;
  for (int i = 0; i < 4; ++i) {
    u32 const which = choice >> (4 * i) & 15;
    u32 const byte = u32(bytes >> (8 * (which & 7))) & 255;
    found |= ((which & 8) != 0 ? (byte & 128) / 128 * 255 : byte) << (8 * i);
  }
  return found;
}

// -------------------------------------------------------------------------------------- 32-bit
// floats
inline u32 flush(u32 a) { return (a & 0x7f800000u) == 0 ? a & 0x80000000u : a; }
inline u32 one_nan(float value) { return std::isnan(value) ? 0x7fffffffu : to_bits(value); }
inline float flushed(u32 a) { return to_float(flush(a)); }

inline u32 op_add_ftz_f32(u32 a, u32 b) { return flush(one_nan(flushed(a) + flushed(b))); }
inline u32 op_sub_ftz_f32(u32 a, u32 b) { return flush(one_nan(flushed(a) - flushed(b))); }
inline u32 op_mul_ftz_f32(u32 a, u32 b) { return flush(one_nan(flushed(a) * flushed(b))); }
inline u32 op_mul_rn_ftz_f32(u32 a, u32 b) { return op_mul_ftz_f32(a, b); }
inline u32 op_mul_rn_f32(u32 a, u32 b) { return one_nan(to_float(a) * to_float(b)); }
inline u32 op_fma_rn_f32(u32 a, u32 b, u32 c) {
  return one_nan(fmaf(to_float(a), to_float(b), to_float(c)));
}
inline u32 op_fma_rn_ftz_f32(u32 a, u32 b, u32 c) {
  return flush(one_nan(fmaf(flushed(a), flushed(b), flushed(c))));
}
inline u32 op_div_approx_ftz_f32(u32 a, u32 b) { return flush(one_nan(flushed(a) / flushed(b))); }
inline u32 op_div_rn_ftz_f32(u32 a, u32 b) { return op_div_approx_ftz_f32(a, b); }
inline u32 op_ex2_approx_ftz_f32(u32 a) { return flush(one_nan(exp2f(flushed(a)))); }
inline u32 op_lg2_approx_ftz_f32(u32 a) { return flush(one_nan(log2f(flushed(a)))); }
inline u32 op_sqrt_approx_ftz_f32(u32 a) { return flush(one_nan(sqrtf(flushed(a)))); }
inline u32 op_cvt_rpi_ftz_f32_f32(u32 a) { return one_nan(ceilf(flushed(a))); }
// NaN gives 0, numbers outside of an int the nearest one.
inline u32 op_cvt_rzi_ftz_s32_f32(u32 a) {
  constexpr float kEnd = 2147483648.f;
  float const value = flushed(a);
  return std::isnan(value) ? 0
         : value >= kEnd   ? 0x7fffffffu
         : value < -kEnd   ? 0x80000000u
                           : u32(i32(value));
}
inline u32 op_tanh_approx_f32(u32 a) { return one_nan(tanhf(to_float(a))); }
inline u32 op_abs_ftz_f32(u32 a) { return flush(a) & 0x7fffffffu; }
inline u32 op_neg_ftz_f32(u32 a) { return flush(a) ^ 0x80000000u; }
inline u32 op_cvt_rn_f32_s32(u32 a) { return to_bits(float(i32(a))); }
inline u32 op_cvt_rn_f32_u32(u32 a) { return to_bits(float(a)); }

// At most one unit of the last digit wrong, always the same error for the same number.
inline u32 op_rcp_approx_ftz_f32(u32 a) {
  u32 const found = flush(one_nan(1.f / flushed(a)));
  u32 const error = (a * 0x9e3779b1u >> 16) % 3 - 1;
  return std::isnormal(to_float(found)) ? found + error : found;
}

// The number where one of them is NaN; -0 is less than 0.
inline u32 op_max_ftz_f32(u32 a, u32 b) {
  float const x = flushed(a);
  float const y = flushed(b);
  if (std::isnan(x) || std::isnan(y)) {
    return std::isnan(x) ? one_nan(y) : to_bits(x);
  }
  return x == y ? flush(a) & flush(b) : to_bits(std::max(x, y));
}

inline u32 op_min_ftz_f32(u32 a, u32 b) {
  float const x = flushed(a);
  float const y = flushed(b);
  if (std::isnan(x) || std::isnan(y)) {
    return std::isnan(x) ? one_nan(y) : to_bits(x);
  }
  return x == y ? flush(a) | flush(b) : to_bits(std::min(x, y));
}

inline bool op_setp_eq_f32(u32 a, u32 b) { return to_float(a) == to_float(b); }
inline bool op_setp_eq_ftz_f32(u32 a, u32 b) { return flushed(a) == flushed(b); }
inline bool op_setp_neu_ftz_f32(u32 a, u32 b) { return flushed(a) != flushed(b); }
inline bool op_setp_lt_ftz_f32(u32 a, u32 b) { return flushed(a) < flushed(b); }
inline bool op_setp_le_ftz_f32(u32 a, u32 b) { return flushed(a) <= flushed(b); }
inline bool op_setp_gt_ftz_f32(u32 a, u32 b) { return flushed(a) > flushed(b); }
inline bool op_setp_ge_ftz_f32(u32 a, u32 b) { return flushed(a) >= flushed(b); }
inline bool op_setp_leu_ftz_f32(u32 a, u32 b) { return !(flushed(a) > flushed(b)); }
inline bool op_setp_ltu_ftz_f32(u32 a, u32 b) { return !(flushed(a) >= flushed(b)); }
inline bool op_setp_gtu_ftz_f32(u32 a, u32 b) { return !(flushed(a) <= flushed(b)); }
inline bool op_setp_geu_ftz_f32(u32 a, u32 b) { return !(flushed(a) < flushed(b)); }

// ----------------------------------------------------------------------------------- narrow floats
inline float half_value(u16 half) { return float(std::bit_cast<_Float16>(half)); }
inline float bfloat_value(u16 bits) { return to_float(u32(bits) << 16); }

// Rounded once: Wide holds the result of an operation exactly.
template <class Wide>
u16 to_half(Wide value) {
  return value != value ? u16(0x7fff) : std::bit_cast<u16>(_Float16(value));
}

inline u16 to_bfloat(float value) {
  u32 const bits = to_bits(value);
  return std::isnan(value) ? u16(0x7fff) : u16((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

// A number with 3 bits after the binary point and a least exponent of -6; 448 is the largest.
inline u8 to_e4m3(float value) {
  u8 const sign = u8(to_bits(value) >> 31 << 7);
  if (std::isnan(value)) {
    return 0x7f;
  }
  double const size = std::min(std::fabs(double(value)), 448.0);
  int const exponent = size < 0x1p-6 ? -6 : std::ilogb(size);
  int const eighths = int(nearbyint(ldexp(size, 3 - exponent)));  // 16 of them: the next exponent
  return u8(sign | ((exponent + 6) * 8 + eighths));
}

inline float e4m3_value(u8 code) {
  int const exponent = code >> 3 & 15;
  int const eighths = code & 7;
  float const size = exponent == 15 && eighths == 7 ? NAN
                     : exponent == 0                ? ldexpf(float(eighths), -9)
                                                    : ldexpf(float(8 + eighths), exponent - 10);
  return (code & 128) != 0 ? -size : size;
}

template <class Function>
u32 each_half(u32 a, u32 b, Function function) {
  return u32(function(u16(a), u16(b))) | u32(function(u16(a >> 16), u16(b >> 16))) << 16;
}

inline u32 op_add_rn_f16x2(u32 a, u32 b) {
  return each_half(
      a, b, [](u16 x, u16 y) { return to_half(double(half_value(x)) + double(half_value(y))); });
}

inline u32 op_sub_rn_f16x2(u32 a, u32 b) {
  return each_half(
      a, b, [](u16 x, u16 y) { return to_half(double(half_value(x)) - double(half_value(y))); });
}

inline u32 op_mul_rn_f16x2(u32 a, u32 b) {
  return each_half(
      a, b, [](u16 x, u16 y) { return to_half(double(half_value(x)) * double(half_value(y))); });
}

inline u32 op_fma_rn_f16x2(u32 a, u32 b, u32 c) {
  auto one = [](u16 x, u16 y, u16 z) {
    return to_half(__float128(half_value(x)) * half_value(y) + __float128(half_value(z)));
  };
  return u32(one(u16(a), u16(b), u16(c))) | u32(one(u16(a >> 16), u16(b >> 16), u16(c >> 16)))
                                                << 16;
}

// The product of two is exact in float, but for sizes that bfloat16 has as subnormals.
inline u32 op_mul_rn_bf16x2(u32 a, u32 b) {
  return each_half(a, b, [](u16 x, u16 y) {
    double const exact = double(bfloat_value(x)) * double(bfloat_value(y));
    float const lowest = 0x1p-126f;
    if (std::fabs(exact) >= lowest || exact == 0 || std::isnan(exact)) {
      return to_bfloat(float(exact));
    }
    return u16(u16(std::signbit(exact)) << 15 | u16(nearbyint(std::fabs(exact) * 0x1p133)));
  });
}

// The larger size, with the product of the signs; the number where one is NaN.
inline u16 larger_size(u16 a, u16 b, u16 infinity) {
  u16 const x = a & 0x7fff;
  u16 const y = b & 0x7fff;
  u16 const sign = u16((a ^ b) & 0x8000);
  if (x > infinity || y > infinity) {
    return x > infinity && y > infinity ? u16(0x7fff) : u16(sign | std::min(x, y));
  }
  return u16(sign | std::max(x, y));
}

inline u32 op_max_xorsign_abs_f16x2(u32 a, u32 b) {
  return each_half(a, b, [](u16 x, u16 y) { return larger_size(x, y, 0x7c00); });
}

inline u32 op_max_xorsign_abs_bf16x2(u32 a, u32 b) {
  return each_half(a, b, [](u16 x, u16 y) { return larger_size(x, y, 0x7f80); });
}

// The smaller one; NaN where one is NaN.
inline u32 op_min_NaN_f16x2(u32 a, u32 b) {
  return each_half(a, b, [](u16 x, u16 y) {
    float const one = half_value(x);
    float const other = half_value(y);
    return std::isnan(one) || std::isnan(other) ? u16(0x7fff) : one < other ? x : y;
  });
}

inline u32 op_cvt_f32_f16(u16 a) { return one_nan(half_value(a)); }
inline u32 op_cvt_rn_f16x2_f32(u32 high, u32 low) {
  return u32(to_half(to_float(low))) | u32(to_half(to_float(high))) << 16;
}
inline u32 op_cvt_rn_bf16x2_f32(u32 high, u32 low) {
  return u32(to_bfloat(to_float(low))) | u32(to_bfloat(to_float(high))) << 16;
}
inline u32 op_cvt_rn_f16x2_e4m3x2(u16 a) {
  return u32(to_half(e4m3_value(u8(a)))) | u32(to_half(e4m3_value(u8(a >> 8)))) << 16;
}
inline u16 op_cvt_rn_satfinite_e4m3x2_f32(u32 high, u32 low) {
  return u16(to_e4m3(to_float(low)) | to_e4m3(to_float(high)) << 8);
}
inline u16 op_cvt_rn_satfinite_e4m3x2_f16x2(u32 a) {
  return u16(to_e4m3(half_value(u16(a))) | to_e4m3(half_value(u16(a >> 16))) << 8);
}

}  // namespace emulator
