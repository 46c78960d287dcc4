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

// The first k-steps of Q stay in registers: their GEMMs read only K from shared memory, whose
// bandwidth narrow K tiles nearly exhaust.
template <class Traits>
class HeldQueries {
  using Element = typename Traits::Element;
  static constexpr int kSteps = Traits::k.tuning.query_steps;
  static_assert(Traits::kSlice * sizeof(Element) == 128);

  // ((4, 2, 2), 1, steps) of 8-bit elements: a thread has four words a step.
  using Layout =
      cute::Layout<cute::Shape<cute::Shape<cute::Int<4 / int(sizeof(Element))>, cute::_2, cute::_2>,
                               cute::_1, cute::Int<kSteps>>>;
  using Fragment = decltype(cute::make_tensor<Element>(Layout{}));

  Fragment fragment_;

 public:
  // rows: those of this warpgroup, in shared memory. Whole warps call this, while no GEMM that
  // reads the registers is in flight.
  CUTE_DEVICE void load(Element const* rows, int thread) {
    load_warpgroup_rows<kWarpgroupRows, kSteps>(reinterpret_cast<char const*>(rows), 0, thread,
                                                cute::recast<uint32_t>(fragment_));
  }

  template <class FragmentQ, class FragmentK, class FragmentS>
  CUTE_DEVICE void issue(FragmentQ const& tSrQ, FragmentK const& tSrK, FragmentS& tSrS) const {
    issue_gemm_split_a<Traits::kScoreSteps>(typename Traits::MmaHeldS{}, fragment_,
                                            typename Traits::MmaS{}, tSrQ, tSrK, tSrS);
  }
};

}  // namespace fa3
