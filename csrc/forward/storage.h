// Shared memory of a CTA: three rings and their barriers.
//
// O has no buffer of its own: a warpgroup writes its O over its own rows of Q, which only its own
// products have read, and a store warp copies it out; the Q buffer is empty again when that copy
// has been read.
#pragma once

#include "device/barriers.h"
#include "forward/traits.h"
#include "forward/work.h"

namespace fa3 {

template <class Traits>
struct FwdStorage {
  using Element = typename Traits::Element;

  struct alignas(1024) {
    Element q[Traits::kQStages][Traits::kWarpgroups][kWarpgroupRows * Traits::kQBufferColumns];
    Element k[Traits::kStages][cute::cosize_v<typename Traits::SmemLayoutK>];
    Element v[Traits::kStages][cute::cosize_v<typename Traits::SmemLayoutV>];
  };

  // Of the tile whose Q is in the stage, for one warpgroup; the barriers of Q guard it.
  FwdWork<Traits> work[Traits::kQStages][Traits::kWarpgroups];

  // Name: what becomes true. Who arrives -> who waits (arrivals).
  Mbarrier q_full[Traits::kQStages][Traits::kWarpgroups];  // TMA -> consumer warpgroup (1 + bytes)
  Mbarrier o_staged[Traits::kQStages][Traits::kWarpgroups];  // consumer warps -> store warp (4)
  Mbarrier q_empty[Traits::kQStages][Traits::kWarpgroups];   // store warp -> producer warp (1)
  Mbarrier k_full[Traits::kStages];                          // TMA -> consumers (1 + bytes)
  Mbarrier k_empty[Traits::kStages];  // consumer warpgroups -> producer warp (1 each)
  Mbarrier v_full[Traits::kStages];   // TMA -> consumers (1 + bytes)
  Mbarrier v_empty[Traits::kStages];  // consumer warpgroups -> producer warp (1 each)

  CUTE_DEVICE void init_barriers() {
    for (int i = 0; i < Traits::kQStages; ++i) {
      for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
        q_full[i][wg].init(1);
        o_staged[i][wg].init(kWarpgroupThreads / 32);
        q_empty[i][wg].init(1);
      }
    }
    for (int i = 0; i < Traits::kStages; ++i) {
      k_full[i].init(1);
      k_empty[i].init(Traits::kWarpgroups);
      v_full[i].init(1);
      v_empty[i].init(Traits::kWarpgroups);
    }
    fence_barrier_init();
  }
};

}  // namespace fa3
