// Issues GEMMs on the tensor cores. Issuing never waits: the caller decides where to wait, and
// thereby what overlaps.
#pragma once

#include "device/cute.h"

namespace fa3 {

// Issues D = A B (zero_init) or D += A B over the first kSteps k-steps of the fragments, as one
// wgmma group. With A in registers, the first k-step is issued once earlier GEMMs have run; all
// other k-steps are issued at once (stall samples, H100, 2026-11-26).
template <int kSteps, class TiledMma, class FragmentA, class FragmentB, class FragmentD>
CUTE_DEVICE void issue_gemm(TiledMma mma,
                            FragmentA const& a,              // (MMA, M, K) registers or descriptors
                            FragmentB const& b,              // (MMA, N, K) descriptors
                            FragmentD& d, bool zero_init) {  // (MMA, M, N)
  static_assert(kSteps <= decltype(cute::size<2>(a))::value);
  cute::warpgroup_fence_operand(d);
  cute::warpgroup_arrive();
  mma.accumulate_ = zero_init ? cute::GMMA::ScaleOut::Zero : cute::GMMA::ScaleOut::One;
  CUTE_UNROLL
  for (int k = 0; k < kSteps; ++k) {
    cute::gemm(mma, a(cute::_, cute::_, k), b(cute::_, cute::_, k), d);
    mma.accumulate_ = cute::GMMA::ScaleOut::One;
  }
  cute::warpgroup_commit_batch();
}

// Issues D = A B as issue_gemm() does. The first k-steps take A from registers (`held`), the others
// from `a`.
template <int kSteps, class HeldMma, class FragmentHeld, class TiledMma, class FragmentA,
          class FragmentB, class FragmentD>
CUTE_DEVICE void issue_gemm_split_a(HeldMma held_mma, FragmentHeld const& held, TiledMma mma,
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

// Waits until at most kPending wgmma groups are pending. `d` must belong to a group that is then
// complete.
template <int kPending, class FragmentD>
CUTE_DEVICE void wait_gemm(FragmentD& d) {
  cute::warpgroup_wait<kPending>();
  cute::warpgroup_fence_operand(d);
}

// Keeps the next wait for GEMMs after the computation of x. x must not be 2^127. WHY a store under
// a condition that never holds: ptxas (13.0) moves a wait across arithmetic, but not across a
// store. address: any number whose value ptxas cannot know.
CUTE_DEVICE void wait_after(float x, int address) {
  asm volatile("{ .reg .pred p; setp.eq.f32 p, %0, 0f7F000000; @p st.shared.f32 [%1], %0; }"
               :
               : "f"(x), "r"(address)
               : "memory");
}

}  // namespace fa3
