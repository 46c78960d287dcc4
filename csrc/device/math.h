// Instructions without an exact C++ equivalent: base-2 exponential, packed conversions, and
// reductions over lanes, such as the quad that shares a row of an accumulator.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/cute.h"

namespace fa3 {

constexpr uint32_t kWholeWarp = 0xffffffffu;

// The lane index of this thread. WHY it is read anew each time: where registers are short, it must
// not occupy one.
CUTE_DEVICE int lane_of_warp() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

CUTE_DEVICE bool is_first_lane() { return lane_of_warp() == 0; }

// 2^x in one MUFU.EX2. 2^-inf is 0, and NaN stays NaN.
CUTE_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

CUTE_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

CUTE_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Converts four floats to four e4m3, round to nearest even, at most 448; `a` is the lowest byte.
CUTE_DEVICE uint32_t pack_four_e4m3(float a, float b, float c, float d) {
  uint32_t packed;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

// tanh, with an absolute error of at most 2e-7. WHY not tanh.approx: its error is a thousand times
// larger, and a softcap multiplies the error by the cap.
CUTE_DEVICE float tanh_of(float x) {
  float const power = exp2_approx(x * 2.8853900817779268f);  // e^2x
  return 1.f - __fdividef(2.f, power + 1.f);
}

// Converts two floats to two 16-bit elements in one instruction, round to nearest even; `low` is
// the lower half.
template <class Element>
CUTE_DEVICE uint32_t pack_two(float low, float high) {
  uint32_t packed;
  if constexpr (cute::is_same_v<Element, cutlass::bfloat16_t>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// The exact inverse of pack_two().
template <class Element>
CUTE_DEVICE float2 unpack_two(uint32_t packed) {
  if constexpr (cute::is_same_v<Element, cutlass::bfloat16_t>) {
    return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u));
  } else {
    return __half22float2(*reinterpret_cast<__half2 const*>(&packed));
  }
}

// Converts two float16 to two bfloat16, round to nearest even.
CUTE_DEVICE uint32_t halves_to_bfloat16(uint32_t packed) {
  float2 const wide = unpack_two<cutlass::half_t>(packed);
  return pack_two<cutlass::bfloat16_t>(wide.x, wide.y);
}

// Converts four e4m3 to 16-bit elements, exactly: the lower two to `low`, the others to `high`.
template <class Element>
CUTE_DEVICE void convert_four_e4m3(uint32_t packed, uint32_t& low, uint32_t& high) {
  asm("{\n.reg .b16 a, b;\n"
      "mov.b32 {a, b}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, a;\n"
      "cvt.rn.f16x2.e4m3x2 %1, b;\n}"
      : "=r"(low), "=r"(high)
      : "r"(packed));
  if constexpr (cute::is_same_v<Element, cutlass::bfloat16_t>) {
    low = halves_to_bfloat16(low);
    high = halves_to_bfloat16(high);
  }
}

// Converts four e4m3, times a scale, to 16-bit elements, each rounded once.
template <class Element>
CUTE_DEVICE void scale_four_e4m3(uint32_t packed, float scale, uint32_t& low, uint32_t& high) {
  convert_four_e4m3<cutlass::half_t>(packed, low, high);
  float2 const a = unpack_two<cutlass::half_t>(low);
  float2 const b = unpack_two<cutlass::half_t>(high);
  low = pack_two<Element>(a.x * scale, a.y * scale);
  high = pack_two<Element>(b.x * scale, b.y * scale);
}

// Converts a whole fragment, in register order.
template <class Element, class Source, class Target>
CUTE_DEVICE void convert_fragment(Source const& source, Target& target) {
  static_assert(decltype(cute::size(source))::value == decltype(cute::size(target))::value);
  auto pairs = cute::recast<uint32_t>(target);
  CUTE_UNROLL
  for (int i = 0; i < cute::size(pairs); ++i) {
    pairs(i) = pack_two<Element>(source(2 * i), source(2 * i + 1));
  }
}

CUTE_DEVICE void multiply_four(float4& x, float factor) {
  x.x *= factor;
  x.y *= factor;
  x.z *= factor;
  x.w *= factor;
}

CUTE_DEVICE void add_four(float4& sum, float4 const& x, float factor) {
  sum.x += x.x * factor;
  sum.y += x.y * factor;
  sum.z += x.z * factor;
  sum.w += x.w * factor;
}

CUTE_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

CUTE_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// The largest value in a warp.
CUTE_DEVICE float max_over_lanes(float x) {
  CUTE_UNROLL
  for (int distance = 16; distance > 0; distance /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
  }
  return x;
}

// The sum over each group of kLanes lanes.
template <int kLanes>
CUTE_DEVICE float sum_over_lanes(float x) {
  CUTE_UNROLL
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  }
  return x;
}

}  // namespace fa3
