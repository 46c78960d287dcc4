// What happens to scores between the product and the mask: with a softcap, s becomes
// tanh(s * softmax_scale / softcap), and the cap takes the place of the softmax scale. At FP8 the
// scales of q and k come first: they are part of s.
#pragma once

#include "device/math.h"
#include "forward/params.h"

namespace fa3 {

template <class Traits, class Fragment, class Softmax, class Scale>
CUTE_DEVICE void transform_scores(FwdDeviceParams const& p, Fragment& acc, Softmax const& softmax,
                                  Scale const& scale) {
  if constexpr (Traits::kMask == MaskKind::kSoftcap) {
    float factors[2] = {p.softcap_scale, p.softcap_scale};
    if constexpr (Traits::kFp8) {
      softmax.apply_scales(factors, scale);
    }
    CUTE_UNROLL
    for (int i = 0; i < cute::size(acc); ++i) {
      acc(i) = tanh_of(acc(i) * factors[i / 2 % 2]);
    }
  }
}

}  // namespace fa3
