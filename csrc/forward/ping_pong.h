// Decides which warpgroup may issue GEMMs: wait() is called before the GEMMs of a step are
// issued, pass() after. With ping-pong (paper, section 3.1) two warpgroups alternate, so that the
// softmax of one overlaps with the GEMMs of the other.
#pragma once

#include "device/barriers.h"
#include "forward/traits.h"

namespace fa3 {

struct NoPingPong {
  CUTE_DEVICE explicit NoPingPong(int) {}
  CUTE_DEVICE void begin() const {}
  CUTE_DEVICE void wait() const {}
  CUTE_DEVICE void pass() const {}
  CUTE_DEVICE void end() const {}
};

struct PingPong {
  int warpgroup;

  CUTE_DEVICE explicit PingPong(int warpgroup_) : warpgroup(warpgroup_) {}

  // Warpgroup 0 starts.
  CUTE_DEVICE void begin() const {
    if (warpgroup == 1) {
      named_arrive(barrier_of(0), 2 * kWarpgroupThreads);
    }
  }

  CUTE_DEVICE void wait() const { named_sync(barrier_of(warpgroup), 2 * kWarpgroupThreads); }

  CUTE_DEVICE void pass() const { named_arrive(barrier_of(1 - warpgroup), 2 * kWarpgroupThreads); }

  // Consumes the last arrival of warpgroup 1, so that no barrier is left half full.
  CUTE_DEVICE void end() const {
    if (warpgroup == 0) {
      named_sync(barrier_of(0), 2 * kWarpgroupThreads);
    }
  }

 private:
  CUTE_DEVICE static NamedBarrier barrier_of(int wg) {
    return wg == 0 ? NamedBarrier::kPingPongFirst : NamedBarrier::kPingPongSecond;
  }
};

template <class Traits>
using PingPongOf = cute::conditional_t<Traits::k.overlap.ping_pong, PingPong, NoPingPong>;

}  // namespace fa3
