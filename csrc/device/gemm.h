// Issues a product on the tensor cores. Never waits: the caller decides where to wait, and with it
// what overlaps.
#pragma once

#include "device/cute.h"

namespace fa3 {

struct NoHook {
  CUTE_DEVICE void operator()() const {}
};

// D = A B (zero_init) or D += A B, over the first kSteps k-steps of the fragments; one wgmma group.
// Issuing runs only a little ahead of the tensor cores. `hook` is called when kHookLead k-steps are
// still to be issued.
template <int kSteps, int kHookLead = 0, class TiledMma, class FragmentA, class FragmentB,
          class FragmentD, class Hook = NoHook>
CUTE_DEVICE void issue_gemm(TiledMma mma,
                            FragmentA const& a,            // (MMA, M, K) registers or descriptors
                            FragmentB const& b,            // (MMA, N, K) descriptors
                            FragmentD& d, bool zero_init,  // (MMA, M, N)
                            Hook hook = {}) {
  static_assert(kSteps <= decltype(cute::size<2>(a))::value);
  cute::warpgroup_fence_operand(d);
  cute::warpgroup_arrive();
  mma.accumulate_ = zero_init ? cute::GMMA::ScaleOut::Zero : cute::GMMA::ScaleOut::One;
  CUTE_UNROLL
  for (int k = 0; k < kSteps; ++k) {
    if (k == kSteps - kHookLead) {
      hook();
    }
    cute::gemm(mma, a(cute::_, cute::_, k), b(cute::_, cute::_, k), d);
    mma.accumulate_ = cute::GMMA::ScaleOut::One;
  }
  cute::warpgroup_commit_batch();
  if (kHookLead == 0) {
    hook();
  }
}

// D = A B, as issue_gemm(): the first k-steps take A from registers, `held`, the others from `a`.
template <int kSteps, class HeldMma, class FragmentHeld, class TiledMma, class FragmentA,
          class FragmentB, class FragmentD>
CUTE_DEVICE void issue_gemm_of_both(HeldMma held_mma, FragmentHeld const& held, TiledMma mma,
                                    FragmentA const& a, FragmentB const& b, FragmentD& d) {
  constexpr int kHeldSteps = decltype(cute::size<2>(held))::value;
  cute::warpgroup_fence_operand(d);
  cute::warpgroup_arrive();
  held_mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
  CUTE_UNROLL
  for (int k = 0; k < kHeldSteps; ++k) {
    cute::gemm(held_mma, held(cute::_, cute::_, k), b(cute::_, cute::_, k), d);
    held_mma.accumulate_ = cute::GMMA::ScaleOut::One;
  }
  mma.accumulate_ = cute::GMMA::ScaleOut::One;
  CUTE_UNROLL
  for (int k = kHeldSteps; k < kSteps; ++k) {
    cute::gemm(mma, a(cute::_, cute::_, k), b(cute::_, cute::_, k), d);
  }
  cute::warpgroup_commit_batch();
}

// Waits until at most kPending groups are outstanding; `d` belongs to a group that is then
// complete.
template <int kPending, class FragmentD>
CUTE_DEVICE void wait_gemm(FragmentD& d) {
  cute::warpgroup_wait<kPending>();
  cute::warpgroup_fence_operand(d);
}

}  // namespace fa3
