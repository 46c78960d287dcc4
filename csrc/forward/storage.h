// Shared memory of a CTA: three rings and their barriers.
//
// With OutputKind::kOverQueries O has no buffer of its own: a warpgroup writes its O over its own
// rows of Q, which only its own GEMMs have read, and a store warp copies it out. The Q buffer is
// empty again when that copy has read it.
#pragma once

#include "device/barriers.h"
#include "forward/traits.h"
#include "forward/work.h"

namespace fa3 {

// Warps that transpose V (ValuesKind::kTransposed), of the producer warpgroup.
constexpr int kTransposingWarps = 2;

// kHeads: the scales of K and V.
struct HeadScale {
  float k;
  float v;
};

// kBlocks: the scales of a K tile, in the form that the softmax needs.
struct alignas(16) KeyScale {
  float k;
  float v_log2;
  float over_v;  // 1 / v
};

// WHY arrays without elements, where a kernel does not need a member: with empty
// [[no_unique_address]] members nvcc 13.0 gives the struct another layout on the device than on the
// host; with base classes FP8 kernels spill.
template <class Traits>
struct FwdStorage {
  using Element = typename Traits::Element;
  static constexpr FwdConfig k_ = Traits::k;

  static constexpr bool kOwnsQ = k_.writes_over_queries();  // store warps read it
  static constexpr int kRawBuffers =
      Traits::kTransposesV || Traits::kConverts ? Traits::kValueStages : 0;
  static constexpr int kRawKeyBuffers = Traits::kConverts ? Traits::kKeyStages : 0;
  static constexpr int kHeadScaleStages = Traits::kConverts ? Traits::kQStages : 0;
  static constexpr int kScales = Traits::kHasScales ? Traits::kScaleStages : 0;
  static constexpr int kScaleQStages = Traits::kHasScales ? Traits::kQStages : 0;
  static constexpr int kStaged = Traits::kStagedElements > 0 ? Traits::kWarpgroups : 0;
  static constexpr int kSummed = k_.tuning.shared_sums > 0 ? Traits::kWarpgroups : 0;
  static constexpr int kSending = Traits::k.column_ctas() > 1 ? Traits::kWarpgroups : 0;
  static constexpr int kSent = k_.output == OutputKind::kSent ? Traits::kWarpgroups : 0;

  struct alignas(1024) {
    Element q[Traits::kQStages][Traits::kWarpgroups][Traits::kQBufferElements];
    Element k[Traits::kStages][cute::cosize_v<typename Traits::SmemLayoutK>];
    Element v[Traits::kStages][cute::cosize_v<typename Traits::SmemLayoutV>];
    // kTransposed, kConverted: the rings of V and K as loaded, row by row.
    typename Traits::ElementKv v_raw[kRawBuffers][Traits::kValueKeys * Traits::kRawColumnsV];
    typename Traits::ElementKv k_raw[kRawKeyBuffers][Traits::kTileN * Traits::kRawColumns];
    // kStaged, kSent: O of a warpgroup until it is copied out.
    uint16_t staged[kStaged][Traits::kStagedElements];
    // kPromoted: the part of O in fp32 that a thread does not hold in registers.
    float4 sums[kSummed][k_.tuning.shared_sums / 4][kWarpgroupThreads];
    // Column CTAs: S of a K tile that a warpgroup of the other CTA has sent (column_ctas.h).
    float4 sent_scores[kSending][Traits::kTileN / 8][kWarpgroupThreads];
  };
  static constexpr SharedMemory kListed = k_.shared_memory();
  static_assert(sizeof(q) == kListed.total("Q") && sizeof(k) == kListed.total("K") &&
                sizeof(v) == kListed.total("V") && sizeof(k_raw) == kListed.total("raw K") &&
                sizeof(v_raw) == kListed.total("raw V") &&
                sizeof(staged) == kListed.total("staged O") &&
                sizeof(sums) == kListed.total("O in fp32") &&
                sizeof(sent_scores) == kListed.total("S of the other CTA"));

  // For each warpgroup, the tile whose Q is in the stage; the barriers of Q guard it.
  FwdWork<Traits> work[Traits::kQStages][Traits::kWarpgroups];

  // Name: what becomes true. Who arrives -> who waits (arrivals).
  Mbarrier q_full[Traits::kQStages][Traits::kWarpgroups];  // TMA -> consumer warpgroup (1 + bytes)
  Mbarrier o_staged[Traits::kQStages][Traits::kWarpgroups];  // consumer warps (4) -> store warp,
                                                             // or scale warp (kSent)
  Mbarrier q_empty[Traits::kQStages][Traits::kWarpgroups];   // store warp (1), or consumer warps
                                                             // (4) -> producer warp
  Mbarrier k_full[Traits::kStages];   // TMA (1 + bytes); kBlocks: and scale warp (1) -> consumers
  Mbarrier k_empty[Traits::kStages];  // consumer warpgroups (1 each) -> producer warp, scale warp
  Mbarrier v_full[Traits::kStages];   // TMA (1 + bytes), or transposing warps (2) -> consumers
  Mbarrier v_empty[Traits::kStages];  // consumer warpgroups (1 each) -> who fills v

  Mbarrier scores_full[kSending];   // S of the other CTA (1 + bytes) -> consumer warpgroup
  Mbarrier scores_empty[kSending];  // warps of the other CTA's warpgroup (4), which have read what
                                    // this one has sent -> consumer warpgroup

  int completes_tile[Traits::kIsCache ? Traits::kWarpgroups : 0];  // cache/combine_parts.h

  // kBlocks: scales of the rows of Q in a stage, and of K tiles. The barriers of K guard them.
  // INVARIANT: consumers read the scales of K tile j before they issue S(j + 1). The ring has twice
  // as many stages as K: the scales of tile j + 2 kStages are written once K of j + kStages has
  // been read.
  float q_scales[kScaleQStages][Traits::kWarpgroups][kWarpgroupRows];
  KeyScale scales[kScales];
  float staged_lse[kSent][kWarpgroupRows];  // next to `staged`
  Mbarrier o_sent[kSent];  // `staged` and the next tile's `work` have been read: scale warp (1) ->
                           // consumer warpgroup
  Mbarrier tile_known[kScaleQStages];   // `work` is published: producer warp (1) -> scale warp,
                                        // transposing warps
  Mbarrier v_raw_full[kRawBuffers];     // TMA (1 + bytes) -> transposing or converting warps
  Mbarrier v_raw_empty[kRawBuffers];    // transposing (2) or converting warps (4) -> producer warp
  Mbarrier k_raw_full[kRawKeyBuffers];  // as those of v_raw
  Mbarrier k_raw_empty[kRawKeyBuffers];
  int keys_end[kRawKeyBuffers];  // the stage has no keys: there are no more K tiles
  HeadScale head_scales[kHeadScaleStages][Traits::kWarpgroups];  // `work` has those of a tile
  // Scales by page: of each box of keys of a stage, or of each key. The barriers of the raw rings
  // guard them.
  float k_scales[kRawKeyBuffers][Traits::kTileN];
  float v_scales[kRawKeyBuffers][Traits::kTileN];

  // loads: arrivals at the barrier of a stage that K or V has been loaded into.
  CUTE_DEVICE void init_barriers(int loads) {
    for (int i = 0; i < Traits::kQStages; ++i) {
      for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
        q_full[i][wg].init(1);
        o_staged[i][wg].init(kWarpgroupWarps);
        q_empty[i][wg].init(kOwnsQ ? 1 : kWarpgroupWarps);
      }
    }
    for (int i = 0; i < Traits::kStages; ++i) {
      k_full[i].init(Traits::kConverts ? kWarpgroupWarps : Traits::kHasScales ? loads + 1 : loads);
      k_empty[i].init(Traits::kWarpgroups);
      v_full[i].init(Traits::kTransposesV ? kTransposingWarps
                     : Traits::kConverts  ? kWarpgroupWarps
                                          : loads);
      v_empty[i].init(Traits::kWarpgroups);
    }
    for (int wg = 0; wg < kSent; ++wg) {
      o_sent[wg].init(1);
    }
    for (int wg = 0; wg < kSending; ++wg) {
      scores_full[wg].init(1);
      scores_empty[wg].init(kWarpgroupWarps);
    }
    for (int i = 0; i < kScaleQStages; ++i) {
      tile_known[i].init(1);
    }
    for (int i = 0; i < kRawBuffers; ++i) {
      v_raw_full[i].init(loads);
      v_raw_empty[i].init(Traits::kConverts ? kWarpgroupWarps : kTransposingWarps);
    }
    for (int i = 0; i < kRawKeyBuffers; ++i) {
      k_raw_full[i].init(loads);
      k_raw_empty[i].init(kWarpgroupWarps);
      keys_end[i] = 0;
    }
    fence_barrier_init();
  }
};

// ValuesKind::kDirect: the producer loads V into the ring that PV reads.
struct DirectValues {
  template <class Storage>
  CUTE_DEVICE static auto& buffers(Storage& shared) {
    return shared.v;
  }
  template <class Storage>
  CUTE_DEVICE static auto& full(Storage& shared) {
    return shared.v_full;
  }
  template <class Storage>
  CUTE_DEVICE static auto& empty(Storage& shared) {
    return shared.v_empty;
  }
};

// ValuesKind::kTransposed, kConverted: the producer loads V into `v_raw`, from which others fill
// `v` (forward/fp8/values_transposed.h, forward/cache/keys_converted.h).
struct RawValues {
  template <class Storage>
  CUTE_DEVICE static auto& buffers(Storage& shared) {
    return shared.v_raw;
  }
  template <class Storage>
  CUTE_DEVICE static auto& full(Storage& shared) {
    return shared.v_raw_full;
  }
  template <class Storage>
  CUTE_DEVICE static auto& empty(Storage& shared) {
    return shared.v_raw_empty;
  }
};

// ValuesKind::kDirect, kTransposed: the producer loads K into the ring that S reads.
struct DirectKeys {
  template <class Storage>
  CUTE_DEVICE static auto& buffers(Storage& shared) {
    return shared.k;
  }
  template <class Storage>
  CUTE_DEVICE static auto& full(Storage& shared) {
    return shared.k_full;
  }
  template <class Storage>
  CUTE_DEVICE static auto& empty(Storage& shared) {
    return shared.k_empty;
  }
};

// ValuesKind::kConverted: the producer loads K into `k_raw`.
struct RawKeys {
  template <class Storage>
  CUTE_DEVICE static auto& buffers(Storage& shared) {
    return shared.k_raw;
  }
  template <class Storage>
  CUTE_DEVICE static auto& full(Storage& shared) {
    return shared.k_raw_full;
  }
  template <class Storage>
  CUTE_DEVICE static auto& empty(Storage& shared) {
    return shared.k_raw_empty;
  }
};

// Synchronises the warps of a consumer warpgroup; there are at most three warpgroups.
CUTE_DEVICE void sync_warpgroup(int warpgroup) {
  named_sync(NamedBarrier(int(NamedBarrier::kWarpgroupFirst) + warpgroup), kWarpgroupThreads);
}

// Releases the Q buffer of a warpgroup. All its threads call this.
template <class Traits>
CUTE_DEVICE void release_queries(FwdStorage<Traits>& shared, int q_stage, int warpgroup,
                                 int thread) {
  __syncwarp();
  if (thread % 32 == 0) {
    shared.q_empty[q_stage][warpgroup].arrive();
  }
}

}  // namespace fa3
