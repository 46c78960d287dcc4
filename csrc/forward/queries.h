// Q as the first operand of S = Q K^T.
#pragma once

#include "device/fragments.h"
#include "device/gemm.h"
#include "forward/traits.h"

namespace fa3 {

// All of Q in shared memory.
template <class Traits>
struct SharedQueries {
  using Element = typename Traits::Element;

  CUTE_DEVICE void load(Element const*, int) {}

  // S = Q K^T.
  template <class FragmentQ, class FragmentK, class FragmentS>
  CUTE_DEVICE void issue(FragmentQ const& tSrQ, FragmentK const& tSrK, FragmentS& tSrS) const {
    issue_gemm<Traits::kScoreSteps>(typename Traits::MmaS{}, tSrQ, tSrK, tSrS, true);
  }
};

// The first k-steps of Q stay in registers: their products read only K from shared memory, whose
// bandwidth narrow K tiles nearly exhaust.
template <class Traits>
class HeldQueries {
  using Element = typename Traits::Element;
  static constexpr int kSteps = Traits::k.query_steps;
  static constexpr int kStepChunks = 2;  // chunks of 16 bytes
  static_assert(Traits::kSlice * sizeof(Element) == 128);

  // ((4, 2, 2), 1, steps) of 8-bit elements: a thread has four words a step.
  using Layout =
      cute::Layout<cute::Shape<cute::Shape<cute::Int<4 / int(sizeof(Element))>, cute::_2, cute::_2>,
                               cute::_1, cute::Int<kSteps>>>;
  using Fragment = decltype(cute::make_tensor<Element>(Layout{}));

  Fragment fragment_;

 public:
  // rows: those of this warpgroup, in shared memory. Whole warps call this, while no product that
  // reads the registers is in flight.
  CUTE_DEVICE void load(Element const* rows, int thread) {
    auto words = cute::recast<uint32_t>(fragment_);
    int const row = thread / 32 * 16 + thread % 16;
    int const chunk = thread % 32 / 16;
    CUTE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      auto const* const from = reinterpret_cast<char const*>(rows) +
                               chunk_offset_bytes<kWarpgroupRows>(row, kStepChunks * step + chunk);
      cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<cute::uint128_t const*>(from),
                                    words(4 * step), words(4 * step + 1), words(4 * step + 2),
                                    words(4 * step + 3));
    }
  }

  template <class FragmentQ, class FragmentK, class FragmentS>
  CUTE_DEVICE void issue(FragmentQ const& tSrQ, FragmentK const& tSrK, FragmentS& tSrS) const {
    issue_gemm_of_both<Traits::kScoreSteps>(typename Traits::MmaHeldS{}, fragment_,
                                            typename Traits::MmaS{}, tSrQ, tSrK, tSrS);
  }
};

}  // namespace fa3
