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

// FP8: the ring of V as it comes.
template <class Traits, bool kFp8 = Traits::kFp8>
struct RawValues {};

template <class Traits>
struct RawValues<Traits, true> {
  typename Traits::Element v_raw[Traits::kValueStages][Traits::kTileN * Traits::kColumnsV];
};

template <class Traits, bool kFp8 = Traits::kFp8>
struct RawBarriers {
  CUTE_DEVICE void init_raw_barriers() {}
};

template <class Traits>
struct RawBarriers<Traits, true> {
  static constexpr int kScaleStages = 4;

  // Of the blocks of a K tile, written by a transposing warp: scales of K; log2 of those of V; 1 /
  // (those of V * 2^kOffsetLog2).
  alignas(16) float scales[kScaleStages][3][Traits::kScaleBlocks];
  Mbarrier scales_full[kScaleStages];          // transposing warp -> consumers (1)
  Mbarrier scales_empty[kScaleStages];         // consumer warps -> transposing warp (1 each)
  Mbarrier v_raw_full[Traits::kValueStages];   // TMA -> transposing warps (1 + bytes)
  Mbarrier v_raw_empty[Traits::kValueStages];  // transposing warps -> producer warp (2)

  CUTE_DEVICE void init_raw_barriers() {
    for (int i = 0; i < kScaleStages; ++i) {
      scales_full[i].init(1);
      scales_empty[i].init(Traits::kWarpgroups * kWarpgroupThreads / 32);
    }
    for (int i = 0; i < Traits::kValueStages; ++i) {
      v_raw_full[i].init(1);
      v_raw_empty[i].init(kTransposingWarps);
    }
  }
};

template <class Traits>
struct FwdStorage {
  using Element = typename Traits::Element;

  struct alignas(1024) {
    Element q[Traits::kQStages][Traits::kWarpgroups][Traits::kQBufferElements];
    Element k[Traits::kStages][cute::cosize_v<typename Traits::SmemLayoutK>];
    Element v[Traits::kStages][cute::cosize_v<typename Traits::SmemLayoutV>];
    [[no_unique_address]] RawValues<Traits> raw;
  };

  // Of the tile whose Q is in the stage, for one warpgroup; the barriers of Q guard it.
  FwdWork<Traits> work[Traits::kQStages][Traits::kWarpgroups];

  // Name: what becomes true. Who arrives -> who waits (arrivals).
  Mbarrier q_full[Traits::kQStages][Traits::kWarpgroups];  // TMA -> consumer warpgroup (1 + bytes)
  Mbarrier o_staged[Traits::kQStages][Traits::kWarpgroups];  // consumer warps -> store warp (4)
  Mbarrier q_empty[Traits::kQStages][Traits::kWarpgroups];   // store warp -> producer warp (1)
  Mbarrier k_full[Traits::kStages];                          // TMA -> consumers (1 + bytes)
  Mbarrier k_empty[Traits::kStages];  // consumer warpgroups -> producer warp (1 each)
  Mbarrier v_full[Traits::kStages];   // TMA (1 + bytes), or transposing warps (2) -> consumers
  Mbarrier v_empty[Traits::kStages];  // consumer warpgroups -> who fills v (1 each)
  [[no_unique_address]] RawBarriers<Traits> raw_barriers;

  // The ring into which the producer brings V.
  CUTE_DEVICE auto& values_in() {
    if constexpr (Traits::kFp8) {
      return raw.v_raw;
    } else {
      return v;
    }
  }

  CUTE_DEVICE auto& values_in_full() {
    if constexpr (Traits::kFp8) {
      return raw_barriers.v_raw_full;
    } else {
      return v_full;
    }
  }

  CUTE_DEVICE auto& values_in_empty() {
    if constexpr (Traits::kFp8) {
      return raw_barriers.v_raw_empty;
    } else {
      return v_empty;
    }
  }

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
      v_full[i].init(Traits::kFp8 ? kTransposingWarps : 1);
      v_empty[i].init(Traits::kWarpgroups);
    }
    raw_barriers.init_raw_barriers();
    fence_barrier_init();
  }
};

}  // namespace fa3
