// What happens to scores between the product and the mask: with a softcap, s becomes
// tanh(s * softmax_scale / softcap), and the cap takes the place of the softmax scale.
#pragma once

#include "device/math.h"
#include "forward/params.h"

namespace fa3 {

template <class Traits, class Fragment>
CUTE_DEVICE void transform_scores(FwdDeviceParams const& p, Fragment& acc) {
  if constexpr (Traits::kMask == MaskKind::kSoftcap) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(acc); ++i) {
      acc(i) = tanh_of(acc(i) * p.softcap_scale);
    }
  }
}

}  // namespace fa3
