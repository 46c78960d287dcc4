// Shared memory of a CTA of the main kernel, and its barriers.
//
// dK and dV have no buffers: a warpgroup writes them over its own rows of K and V at the end.
#pragma once

#include "backward/traits.h"
#include "backward/work.h"
#include "device/barriers.h"

namespace fa3 {

template <class Traits>
struct BwdStorage {
  using Element = typename Traits::Element;

  struct alignas(1024) {
    Element k[cute::cosize_v<typename Traits::SmemLayoutK>];
    Element v[cute::cosize_v<typename Traits::SmemLayoutK>];
    Element q[Traits::kStages][cute::cosize_v<typename Traits::SmemLayoutQ>];
    Element dout[Traits::kStages][cute::cosize_v<typename Traits::SmemLayoutQ>];
    Element ds[kDsBuffers][cute::cosize_v<typename Traits::SmemLayoutDs>];
    float dq[Traits::kWarpgroups][Traits::kDq.block_floats()];
  };

  // Of the rows in a stage; they come and go with Q and with dO.
  alignas(16) float lse_log2[Traits::kStages][Traits::kTileM];
  float delta[Traits::kStages][Traits::kTileM];

  BwdWork work;

  // Name: what becomes true. Who arrives -> who waits (arrivals).
  Mbarrier k_full;                          // TMA -> consumers (1 + bytes)
  Mbarrier v_full;                          // TMA -> consumers (1 + bytes)
  Mbarrier q_full[Traits::kStages];         // TMA -> consumers (1 + bytes)
  Mbarrier q_empty[Traits::kStages];        // consumer warpgroups -> producer warp (1 each)
  Mbarrier dout_full[Traits::kStages];      // TMA -> consumers (1 + bytes)
  Mbarrier dout_empty[Traits::kStages];     // consumer warpgroups -> producer warp (1 each)
  Mbarrier dq_staged[Traits::kWarpgroups];  // consumer warps -> store warp (4)
  Mbarrier dq_empty[Traits::kWarpgroups];   // store warp -> consumer warpgroup (1)

  CUTE_DEVICE void init_barriers() {
    constexpr int kWarps = kWarpgroupThreads / 32;
    k_full.init(1);
    v_full.init(1);
    for (int i = 0; i < Traits::kStages; ++i) {
      q_full[i].init(1);
      q_empty[i].init(Traits::kWarpgroups);
      dout_full[i].init(1);
      dout_empty[i].init(Traits::kWarpgroups);
    }
    for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
      dq_staged[wg].init(kWarps);
      dq_empty[wg].init(1);
    }
    fence_barrier_init();
  }
};

}  // namespace fa3
