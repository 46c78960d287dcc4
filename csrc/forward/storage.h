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

// FP8: what the softmax takes of the scales of a K tile.
struct alignas(16) KeyScale {
  float k;
  float v_log2;
  float over_v;  // 1 / v
};

// WHY arrays of no elements, where a kernel is not of FP8: as empty members, [[no_unique_address]],
// nvcc 13.0 lays them out on the device otherwise than on the host; with base classes for them
// kernels of FP8 spill.
template <class Traits>
struct FwdStorage {
  using Element = typename Traits::Element;

  static constexpr int kRawBuffers = Traits::kFp8 ? Traits::kValueStages : 0;
  static constexpr int kScales = Traits::kFp8 ? Traits::kScaleStages : 0;
  static constexpr int kScaleQStages = Traits::kFp8 ? Traits::kQStages : 0;
  static constexpr int kStaged = Traits::kStagedElements > 0 ? Traits::kWarpgroups : 0;
  static constexpr int kSummed = Traits::kSharedSums > 0 ? Traits::kWarpgroups : 0;
  static constexpr int kSent = Traits::kSendsResults ? Traits::kWarpgroups : 0;

  struct alignas(1024) {
    Element q[Traits::kQStages][Traits::kWarpgroups][Traits::kQBufferElements];
    Element k[Traits::kStages][cute::cosize_v<typename Traits::SmemLayoutK>];
    Element v[Traits::kStages][cute::cosize_v<typename Traits::SmemLayoutV>];
    // FP8: the ring of V as it comes.
    Element v_raw[kRawBuffers][Traits::kValueKeys * Traits::kColumnsV];
    // FP8: O of a warpgroup, on its way out.
    uint16_t staged[kStaged][Traits::kStagedElements];
    // FP8: of O in fp32, what threads do not hold in registers.
    float4 sums[kSummed][Traits::kSharedSums / 4][kWarpgroupThreads];
  };

  // Of the tile whose Q is in the stage, for one warpgroup; the barriers of Q guard it.
  FwdWork<Traits> work[Traits::kQStages][Traits::kWarpgroups];

  // Name: what becomes true. Who arrives -> who waits (arrivals).
  Mbarrier q_full[Traits::kQStages][Traits::kWarpgroups];  // TMA -> consumer warpgroup (1 + bytes)
  Mbarrier o_staged[Traits::kQStages][Traits::kWarpgroups];  // consumer warps (4) -> store warp;
                                                             // FP8: scale warp
  Mbarrier q_empty[Traits::kQStages][Traits::kWarpgroups];   // store warp (1); FP8: consumer warps
                                                             // (4) -> producer warp
  Mbarrier k_full[Traits::kStages];   // TMA (1 + bytes), FP8: scale warp (1) -> consumers
  Mbarrier k_empty[Traits::kStages];  // consumer warpgroups (1 each) -> producer warp, scale warp
  Mbarrier v_full[Traits::kStages];   // TMA (1 + bytes), or transposing warps (2) -> consumers
  Mbarrier v_empty[Traits::kStages];  // consumer warpgroups -> who fills v (1 each)

  // FP8: of the rows of Q in a stage; of K tiles. The barriers of K guard them.
  // INVARIANT: consumers read those of K tile j before they issue S(j + 1). Twice as many as K
  // tiles: where they lie, those of tile j + 2 kStages are written once K of j + kStages has been
  // read.
  float q_scales[kScaleQStages][Traits::kWarpgroups][kWarpgroupRows];
  KeyScale scales[kScales];
  float staged_lse[kSent][kWarpgroupRows];  // beside `staged`
  Mbarrier o_sent[kSent];  // `staged` has been read, and the next tile's `work`: scale warp (1) ->
                           // consumer warpgroup
  Mbarrier tile_known[kScaleQStages];  // producer warp: `work` is there -> scale and transposing
                                       // warps (1)
  Mbarrier v_raw_full[kRawBuffers];    // TMA -> transposing warps (1 + bytes)
  Mbarrier v_raw_empty[kRawBuffers];   // transposing warps -> producer warp (2)

  // The ring into which the producer brings V.
  CUTE_DEVICE auto& values_in() {
    if constexpr (Traits::kFp8) {
      return v_raw;
    } else {
      return v;
    }
  }

  CUTE_DEVICE auto& values_in_full() {
    if constexpr (Traits::kFp8) {
      return v_raw_full;
    } else {
      return v_full;
    }
  }

  CUTE_DEVICE auto& values_in_empty() {
    if constexpr (Traits::kFp8) {
      return v_raw_empty;
    } else {
      return v_empty;
    }
  }

  CUTE_DEVICE void init_barriers() {
    for (int i = 0; i < Traits::kQStages; ++i) {
      for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
        q_full[i][wg].init(1);
        o_staged[i][wg].init(kWarpgroupThreads / 32);
        q_empty[i][wg].init(Traits::kFp8 ? kWarpgroupThreads / 32 : 1);
      }
    }
    for (int i = 0; i < Traits::kStages; ++i) {
      k_full[i].init(Traits::kFp8 ? 2 : 1);
      k_empty[i].init(Traits::kWarpgroups);
      v_full[i].init(Traits::kFp8 ? kTransposingWarps : 1);
      v_empty[i].init(Traits::kWarpgroups);
    }
    for (int wg = 0; wg < kSent; ++wg) {
      o_sent[wg].init(1);
    }
    for (int i = 0; i < kScaleQStages; ++i) {
      tile_known[i].init(1);
    }
    for (int i = 0; i < kRawBuffers; ++i) {
      v_raw_full[i].init(1);
      v_raw_empty[i].init(kTransposingWarps);
    }
    fence_barrier_init();
  }
};

// All warps of a consumer warpgroup, of three at most.
CUTE_DEVICE void meet_in_warpgroup(int warpgroup) {
  named_sync(NamedBarrier(int(NamedBarrier::kMeetFirst) + warpgroup), kWarpgroupThreads);
}

}  // namespace fa3
