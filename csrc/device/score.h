// The slots between S = Q K^T and PV. Score, of the forward and the backward, comes before the
// mask; Probabilities, of the forward, between the softmax and PV.
//
// Their functions get `at` (FwdScoresAt, BwdScoresAt), which knows where element i of a thread's
// fragment lies: at.row(i), the query in its sequence, at.key(i) and at.head(i), the query head.
// at.p are the parameters of the kernel. What is not asked costs nothing.
#pragma once

#include "core/kernel_kind.h"
#include "device/math.h"

namespace fa3 {

// Replaces S by t, the score that the softmax sees. `factors` of the thread's two rows are
// factor(p) times the scales of q and k, if there are any. With kHasSlope dt / dS is slope(t),
// otherwise 1.
struct PlainScore {
  static constexpr bool kHasSlope = false;

  template <class Params>
  CUTE_DEVICE static float factor(Params const&) {
    return 1.f;
  }

  template <class Fragment, class At>
  CUTE_DEVICE static void forward(Fragment&, float const (&)[2], At const&) {}
};

// t = tanh(S * softmax_scale / softcap). The softmax scale is then the cap.
struct SoftcapScore {
  static constexpr bool kHasSlope = true;

  template <class Params>
  CUTE_DEVICE static float factor(Params const& p) {
    return p.softcap_scale;
  }

  template <class Fragment, class At>
  CUTE_DEVICE static void forward(Fragment& acc, float const (&factors)[2], At const&) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(acc); ++i) {
      acc(i) = tanh_of(acc(i) * factors[i / 2 % 2]);
    }
  }

  // WHY the maximum: masked scores have a t of -inf and a P of 0, and their product must not be
  // NaN.
  CUTE_DEVICE static float slope(float t) { return fmaxf(1.f - t * t, 0.f); }
};

template <ScoreKind kScore>
using ScoreOf = cute::conditional_t<kScore == ScoreKind::kPlain, PlainScore, SoftcapScore>;

// P as it is. TRAP: with Fp8Softmax::kSumsLast the sums of the rows are added after it.
struct PlainProbabilities {
  template <class Fragment, class At>
  CUTE_DEVICE static void transform(Fragment&, At const&) {}
};

}  // namespace fa3
