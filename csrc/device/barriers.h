// Barriers in shared memory (mbarriers), named barriers of the CTA, and the order of launches.
//
// A ring of buffers is a pair of mbarrier arrays: full[i] is completed by a copy, empty[i] by the
// readers. RingState is the position of a role in a ring. A consumer waits for full with `phase`, a
// producer for empty with `phase ^ 1`, so that the first pass of a producer does not wait on a
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
  kPingPongFirst = 0,   // warpgroup 0 may issue products: it waits (128), warpgroup 1 arrives (128)
  kPingPongSecond = 1,  // the same for warpgroup 1
  kKeysRead = 2,        // the last product of the backward that reads K is complete: all consumers
  kWarpgroupFirst = 3,  // synchronises warpgroup 0 (128); + 1, + 2: the others
};

CUTE_DEVICE void named_sync(NamedBarrier id, int threads) {
  cutlass::arch::NamedBarrier::arrive_and_wait(uint32_t(threads), uint32_t(id));
}

CUTE_DEVICE void named_arrive(NamedBarrier id, int threads) {
  cutlass::arch::NamedBarrier::arrive(uint32_t(threads), uint32_t(id));
}

// Programmatic dependent launch: a launch may begin while the one before it in the stream still
// runs. Before this wait, nothing that the earlier launch writes may be read, and nothing that it
// reads may be overwritten. (CUTLASS has both functions too, but they do nothing unless a macro is
// set.)
CUTE_DEVICE void wait_for_earlier_launches() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The CTAs of the next launch may start where CTAs of this one have ended.
CUTE_DEVICE void allow_later_launches() { asm volatile("griddepcontrol.launch_dependents;"); }

// Makes the initialised mbarriers visible to the copy engine and to the other threads' proxies.
CUTE_DEVICE void fence_barrier_init() { cutlass::arch::fence_barrier_init(); }

// Orders this thread's stores to shared memory before later reads by the copy engine or the tensor
// cores.
CUTE_DEVICE void fence_shared_for_async_proxy() { cutlass::arch::fence_view_async_shared(); }

}  // namespace fa3
