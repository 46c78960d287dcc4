// SumsKind with OverlapKind::kSkewed: where O is kept while K tiles are added to it.
#pragma once

#include "forward/folded_parts.h"
#include "forward/storage.h"

namespace fa3 {

// kFast: O is the accumulator of PV.
template <class Traits>
struct FastSums {
  CUTE_DEVICE FastSums(FwdStorage<Traits>&, FwdDeviceParams const&, int, int) {}

  static constexpr bool kStartsFromZero = false;  // the GEMM of each K tile

  CUTE_DEVICE void begin() {}

  // product: O including the last K tile. Rescales it for the next K tile.
  template <class Fragment, class Softmax, class Scale>
  CUTE_DEVICE void add(Fragment& product, Softmax& softmax, Scale const& scale) {
    softmax.rescale_output(product, scale);
  }

  template <class Fragment, class Softmax>
  CUTE_DEVICE void end(Fragment&, Softmax&) {}
};

// kFast with OutputKind::kFolded: O is the accumulator of PV of a part.
template <class Traits>
struct FoldedSums : FastSums<Traits> {
  PartTotal<Traits> total;
  bool has_total = false;

  CUTE_DEVICE FoldedSums(FwdStorage<Traits>& shared, FoldDeviceParams const& p, int warpgroup,
                         int thread)
      : FastSums<Traits>(shared, p, warpgroup, thread), total(p, warpgroup, thread) {}

  // Folds a part that others follow. wait_for_output: for its last PV.
  template <class Fragment, class Softmax, class Wait>
  CUTE_DEVICE void end_part(Fragment& product, Softmax& softmax, Wait const& wait_for_output) {
    fold(product, softmax, wait_for_output);
    total.store(softmax.row_max, softmax.row_sum, product);
    has_total = true;
  }

  // After the last part: O, maxima and sums of the whole rows.
  template <class Fragment, class Softmax>
  CUTE_DEVICE void end(Fragment& product, Softmax& softmax) {
    fold(product, softmax, [] {});
    has_total = false;
  }

 private:
  // Folds a part into the total of those before it, if there are any. The first ones of the total
  // are loaded during the wait.
  template <class Fragment, class Softmax, class Wait>
  CUTE_DEVICE void fold(Fragment& product, Softmax& softmax, Wait const& wait_for_output) {
    softmax.complete_rows();
    if (!has_total) {
      wait_for_output();
      return;
    }
    auto const ahead = total.load_ahead();
    wait_for_output();
    total.add_to(ahead, softmax.row_max, softmax.row_sum, softmax.scale_log2, product);
  }
};

// kPromoted: O is kept in fp32. PV of a K tile is summed from zero, and added here.
template <class Traits>
class PromotedSums {
  static constexpr int kRows = 2;
  static constexpr int kFours = Traits::kHeadDimV / 8;
  static constexpr int kHeldFours = kFours - Traits::k.tuning.shared_sums / 4;

  // This thread's values of O, in the order of a fragment: the first ones in registers, the others
  // in shared memory.
  float4 held_[max_of(kHeldFours, 1)];
  float4* shared_;
  float rescale_[kRows];  // applied to O before the next GEMM is added

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
  static constexpr bool kStartsFromZero = true;

  CUTE_DEVICE PromotedSums(FwdStorage<Traits>& shared, FwdDeviceParams const&, int warpgroup,
                           int thread)
      : shared_(&shared.sums[warpgroup][0][thread]) {
    static_assert(Traits::k.tuning.shared_sums > 0);
  }

  // Called when the first P of a tile has been computed.
  CUTE_DEVICE void begin() {
    CUTE_UNROLL
    for (int i = 0; i < kFours; ++i) {
      four(i) = make_float4(0.f, 0.f, 0.f, 0.f);
    }
    rescale_[0] = rescale_[1] = 1.f;
  }

  // product: PV of a K tile. The factors of softmax apply to P of the next one.
  template <class Fragment, class Softmax, class Scale>
  CUTE_DEVICE void add(Fragment const& product, Softmax const& softmax, Scale const&) {
    CUTE_UNROLL
    for (int i = 0; i < kFours; ++i) {
      four(i) = sum_with(product, i);
    }
    rescale_[0] = softmax.rescale[0];
    rescale_[1] = softmax.rescale[1];
  }

  // product: PV of the last K tile; it becomes O.
  template <class Fragment, class Softmax>
  CUTE_DEVICE void end(Fragment& product, Softmax&) {
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
