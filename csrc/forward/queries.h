// Q of the first k-steps of S, in registers: their products read K alone from shared memory, of
// which the loops of narrow K tiles ask for about as much as it gives.
#pragma once

#include "device/fragments.h"
#include "forward/traits.h"

namespace fa3 {

template <class Traits>
class HeldQueries {
  using Element = typename Traits::Element;
  static constexpr int kSteps = Traits::kQuerySteps;
  static constexpr int kStepChunks = 2;  // of 16 bytes
  static_assert(kSteps == 0 || Traits::kSlice * sizeof(Element) == 128);

  // ((4, 2, 2), 1, steps) of 8-bit elements: a thread has four words a step.
  using Layout = cute::Layout<
      cute::Shape<cute::Shape<cute::Int<4 / int(sizeof(Element))>, cute::_2, cute::_2>, cute::_1,
                  cute::Int<kSteps>>>;
  using Fragment = decltype(cute::make_tensor<Element>(Layout{}));

  Fragment fragment_;

 public:
  CUTE_DEVICE Fragment const& operand() const { return fragment_; }

  // rows: of this warpgroup, in shared memory. Whole warps call it; no product that reads what was
  // loaded before is under way.
  CUTE_DEVICE void load(Element const* rows, int thread) {
    auto words = cute::recast<uint32_t>(fragment_);
    int const row = thread / 32 * 16 + thread % 16;
    int const chunk = thread % 32 / 16;
    CUTE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      auto const* const from =
          reinterpret_cast<char const*>(rows) +
          chunk_offset_bytes<kWarpgroupRows>(row, kStepChunks * step + chunk);
      cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<cute::uint128_t const*>(from),
                                    words(4 * step), words(4 * step + 1), words(4 * step + 2),
                                    words(4 * step + 3));
    }
  }
};

}  // namespace fa3
