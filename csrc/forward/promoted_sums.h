// O in fp32 beside the products, whose sums have about 14 bits: PV of a K tile is summed from zero,
// and added here. With overlap in a warpgroup (Traits::kHoldsSums); without it, S gives the product
// its registers, and O is the fragment itself.
#pragma once

#include "forward/storage.h"

namespace fa3 {

template <class Traits>
class PromotedSums {
  static constexpr int kRows = 2;
  static constexpr int kFours = Traits::kHoldsSums ? Traits::kHeadDimV / 8 : 0;
  static constexpr int kHeldFours = kFours - Traits::kSharedSums / 4;

  // Of this thread, in the order of a fragment: the first ones in registers, then in shared memory.
  float4 held_[max_of(kHeldFours, 1)];
  float4* shared_;
  float rescale_[kRows];  // them, before the next product is added

  CUTE_DEVICE float4& four(int i) {
    return i < kHeldFours ? held_[i] : shared_[(i - kHeldFours) * kWarpgroupThreads];
  }

  template <class Fragment>
  CUTE_DEVICE float4 sum_with(Fragment const& product, int i) {
    float4 const sum = four(i);
    return make_float4(
        sum.x * rescale_[0] + product(4 * i), sum.y * rescale_[0] + product(4 * i + 1),
        sum.z * rescale_[1] + product(4 * i + 2), sum.w * rescale_[1] + product(4 * i + 3));
  }

 public:
  CUTE_DEVICE PromotedSums(FwdStorage<Traits>& shared, int warpgroup, int thread) {
    if constexpr (Traits::kSharedSums > 0) {
      shared_ = &shared.sums[warpgroup][0][thread];
    }
  }

  // Of a tile of Q, when its first P is there.
  CUTE_DEVICE void begin() {
    CUTE_UNROLL
    for (int i = 0; i < kFours; ++i) {
      four(i) = make_float4(0.f, 0.f, 0.f, 0.f);
    }
    rescale_[0] = rescale_[1] = 1.f;
  }

  // product: PV of a K tile. rescale: for P of the next one.
  template <class Fragment>
  CUTE_DEVICE void add(Fragment const& product, float const (&rescale)[kRows]) {
    CUTE_UNROLL
    for (int i = 0; i < kFours; ++i) {
      four(i) = sum_with(product, i);
    }
    rescale_[0] = rescale[0];
    rescale_[1] = rescale[1];
  }

  // product: PV of the last K tile; it becomes O.
  template <class Fragment>
  CUTE_DEVICE void end(Fragment& product) {
    CUTE_UNROLL
    for (int i = 0; i < kFours; ++i) {
      float4 const sum = sum_with(product, i);
      product(4 * i) = sum.x;
      product(4 * i + 1) = sum.y;
      product(4 * i + 2) = sum.z;
      product(4 * i + 3) = sum.w;
    }
  }
};

}  // namespace fa3
