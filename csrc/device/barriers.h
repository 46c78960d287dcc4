// Barriers in shared memory (mbarriers), named barriers of the CTA, and the order of launches.
//
// A ring of buffers has a pair of mbarrier arrays: a copy completes full[i], the readers complete
// empty[i]. RingState is the position of a role in a ring. A consumer waits for full with `phase`,
// a producer for empty with `phase ^ 1`, so that the first pass of a producer does not wait on a
// fresh barrier.
#pragma once

#include "device/cute.h"

namespace fa3 {

using Mbarrier = cutlass::arch::ClusterTransactionBarrier;

template <int kStages>
struct RingState {
  int stage = 0;
  uint32_t phase = 0;

  CUTE_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Hardware barriers 0 to 7 are reserved for the compiler, CUTLASS and __syncthreads.
enum class NamedBarrier : int {
  kPingPongFirst = 0,   // warpgroup 0 may issue GEMMs: it waits (128), warpgroup 1 arrives (128)
  kPingPongSecond = 1,  // warpgroup 1 may issue GEMMs: it waits (128), warpgroup 0 arrives (128)
  kKeysRead = 2,        // backward: the last GEMM that reads K is complete: all consumers
  kWarpgroupFirst = 3,  // synchronises warpgroup 0 (128); + i: warpgroup i
};

CUTE_DEVICE void named_sync(NamedBarrier id, int threads) {
  cutlass::arch::NamedBarrier::arrive_and_wait(uint32_t(threads), uint32_t(id));
}

CUTE_DEVICE void named_arrive(NamedBarrier id, int threads) {
  cutlass::arch::NamedBarrier::arrive(uint32_t(threads), uint32_t(id));
}

// Programmatic dependent launch: a launch may start while the previous one in the stream still
// runs. Before this wait, the kernel must not read what the earlier launch writes, nor overwrite
// what it reads. (CUTLASS has both functions too, but they do nothing unless a macro is set.)
CUTE_DEVICE void wait_for_earlier_launches() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the CTAs of the next launch start as CTAs of this one end.
CUTE_DEVICE void allow_later_launches() { asm volatile("griddepcontrol.launch_dependents;"); }

// Makes the initialised mbarriers visible to the async proxy (TMA) and to other threads.
CUTE_DEVICE void fence_barrier_init() { cutlass::arch::fence_barrier_init(); }

// Orders this thread's stores to shared memory before later reads through the async proxy (TMA,
// wgmma).
CUTE_DEVICE void fence_shared_for_async_proxy() { cutlass::arch::fence_view_async_shared(); }

}  // namespace fa3
