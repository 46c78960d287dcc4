// The kinds of score (core/kernel_kind.h): the step between S = Q K^T and the mask.
#pragma once

#include "core/kernel_kind.h"
#include "device/math.h"

namespace fa3 {

struct PlainScore {
  template <class Fragment>
  CUTE_DEVICE static void transform(Fragment&, float const (&)[2]) {}
};

// Replaces S by t = tanh(S * factor). The softmax scale is then the cap.
struct SoftcapScore {
  // factors: softmax_scale / softcap for each of a thread's two rows.
  template <class Fragment>
  CUTE_DEVICE static void transform(Fragment& acc, float const (&factors)[2]) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(acc); ++i) {
      acc(i) = tanh_of(acc(i) * factors[i / 2 % 2]);
    }
  }

  // The derivative of tanh where its value is t. WHY the maximum: masked scores have a t of -inf
  // and a P of 0, and their product must not be NaN.
  CUTE_DEVICE static float slope(float t) { return fmaxf(1.f - t * t, 0.f); }
};

template <ScoreKind kScore>
using ScoreOf = cute::conditional_t<kScore == ScoreKind::kPlain, PlainScore, SoftcapScore>;

}  // namespace fa3
