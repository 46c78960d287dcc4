// Shared memory of a CTA of the main kernel, and its barriers.
//
// By products dK and dV have no buffers: they are written over K and V at the end.
#pragma once

#include "backward/traits.h"
#include "backward/work.h"
#include "device/cluster_sum.h"

namespace fa3 {

// Consumers that split the keys: each stages what leaves, its block of dQ at every step, dV and dK
// at the end of a tile, for its store warp.
template <class Traits>
struct KeysExchange {
  static constexpr int kReleases = Traits::kWarpgroups;  // arrivals that release a stage of Q or dO

  alignas(128) char staging[Traits::kWarpgroups][Traits::k.staging_bytes()];
  BwdWork works[kWorkSlots];                    // those of the last tiles of keys
  BwdStep steps[kStepSlots];                    // (step_ring.h)
  Mbarrier staged[Traits::kWarpgroups];         // consumer warps -> store warp (4)
  Mbarrier staging_empty[Traits::kWarpgroups];  // store warp -> consumer warpgroup (1)
  Mbarrier step_full[kStepSlots];               // load warp -> consumers, store warps (1)
  Mbarrier k_empty[Traits::k.key_buffers()];    // consumers -> load warp (2)
  Mbarrier v_empty;                             // consumers -> load warp (2)

  CUTE_DEVICE void init_barriers() {
    for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
      staged[wg].init(kWarpgroupWarps);
      staging_empty[wg].init(1);
    }
    for (Mbarrier& full : step_full) {
      full.init(1);
    }
    for (Mbarrier& empty : k_empty) {
      empty.init(Traits::kWarpgroups);
    }
    v_empty.init(Traits::kWarpgroups);
  }
};

// P, from warpgroup 0 to 1, as fragments.
template <class Traits>
using HandedBuffers = uint4[kExchangeBuffers][Traits::kTileM / 16][kWarpgroupThreads];

// The CTAs of a cluster have neighbouring keys: dS of the other CTA, and columns of its K.
template <class Traits>
struct ReceivedKeys {
  using Element = typename Traits::Element;
  static constexpr int kDsReaders = 2;  // CTAs that compute dQ from a CTA's dS

  struct alignas(128) {  // a multiple of 1024 bytes from the storage's begin, for the swizzle
    Element ds_other[kExchangeBuffers][cute::cosize_v<typename Traits::SmemLayoutDs>];
    Element k_other[Traits::kTileN * Traits::kOtherColumns];  // from other_column()
    HandedBuffers<Traits> p;
  };

  Mbarrier k_other_full;                     // TMA -> 2 (1 + bytes)
  Mbarrier ds_other_full[kExchangeBuffers];  // the other CTA -> 2 (1 + bytes)

  // The first of the columns of dQ that the CTA of a rank may compute.
  CUTE_DEVICE static constexpr int other_column(int rank) {
    return rank == 0 ? 0 : Traits::kHeadDim - Traits::kOtherColumns;
  }

  CUTE_DEVICE void init_received() {
    k_other_full.init(1);
    for (Mbarrier& full : ds_other_full) {
      full.init(1);
    }
  }

  CUTE_DEVICE void wait_for_keys() { k_other_full.wait(0); }
  CUTE_DEVICE void wait_for_scores(int buffer, uint32_t phase) {
    ds_other_full[buffer].wait(phase);
  }

  template <class Fragment>
  CUTE_DEVICE static void complete(int, uint32_t, int, int, Fragment&) {}
};

// They have the same keys, and half of the columns each: S and dP of the other columns.
template <class Traits>
struct ReceivedScores {
  static constexpr int kDsReaders = 1;

  alignas(128) float4 scores[2][Traits::kTileM / 8][kWarpgroupThreads];
  HandedBuffers<Traits> p;

  Mbarrier scores_full[2];   // the other CTA -> 0, 1 (1 + bytes)
  Mbarrier scores_empty[2];  // warps of 0, 1 of the other CTA, which have read (4) -> 0, 1

  CUTE_DEVICE void init_received() {
    for (int i = 0; i < 2; ++i) {
      scores_full[i].init(1);
      scores_empty[i].init(kWarpgroupWarps);
    }
  }

  CUTE_DEVICE void wait_for_keys() {}
  CUTE_DEVICE void wait_for_scores(int, uint32_t) {}

  // S (0) or dP (1) of a step, over this CTA's columns, becomes that of all columns. zero: a 0 that
  // ptxas does not know.
  template <class Fragment>
  CUTE_DEVICE void complete(int i, uint32_t step, int zero, int thread, Fragment& acc) {
    // WHY: the compiler would keep addresses in registers from one step to the next.
    asm volatile("" : "+r"(thread));
    add_from_other_cta(scores[i], scores_full[i], scores_empty[i], step % 2, zero, thread, acc);
  }
};

template <class Traits>
using ReceivedOf =
    cute::conditional_t<Traits::kSplitsColumns, ReceivedScores<Traits>, ReceivedKeys<Traits>>;

// Consumers that split the products: P goes from warpgroup 0 to 1, dS from 1 to 2.
template <class Traits>
struct ProductsExchange : ReceivedOf<Traits> {
  static constexpr int kReleases = 2 * kWarpgroupWarps;

  Mbarrier p_full[kExchangeBuffers];        // warps of 0 -> 1 (4)
  Mbarrier p_empty[kExchangeBuffers];       // warps of 1 -> 0 (4)
  Mbarrier ds_full[kExchangeBuffers];       // warps of 1 -> 2 (4)
  Mbarrier ds_empty[kExchangeBuffers];      // warps of 2, of kDsReaders CTAs -> 1 (4 each)
  Mbarrier dq_turn[kExchangeBuffers];       // grant_turns() -> 2 (1)
  Mbarrier dq_added[kExchangeBuffers];      // warps of 2 -> publish_turns() (4)
  Mbarrier dq_published[kExchangeBuffers];  // publish_turns() -> grant_turns() (1)
  bool dq_is_first[kExchangeBuffers];       // whether 2 stores its dQ: nobody has added
  BwdWorkOf<Traits> work;
  int number;  // the cluster's, in rank 0

  CUTE_DEVICE void init_barriers() {
    this->init_received();
    for (int i = 0; i < kExchangeBuffers; ++i) {
      p_full[i].init(kWarpgroupWarps);
      p_empty[i].init(kWarpgroupWarps);
      ds_full[i].init(kWarpgroupWarps);
      ds_empty[i].init(ProductsExchange::kDsReaders * kWarpgroupWarps);
      dq_turn[i].init(1);
      dq_added[i].init(kWarpgroupWarps);
      dq_published[i].init(1);
    }
  }
};

template <class Traits>
using BwdExchange = cute::conditional_t<Traits::kSplit == BwdSplit::kKeys, KeysExchange<Traits>,
                                        ProductsExchange<Traits>>;

// Under a simple mask the limits are in registers.
struct NoKeyLimits {};

template <class Traits>
struct BwdStorage {
  using Exchange = BwdExchange<Traits>;
  using Element = typename Traits::Element;
  template <int kDim>
  static constexpr int kQueries = cute::cosize_v<typename Traits::template SmemLayoutQ<kDim>>;

  struct alignas(1024) {
    Element k[Traits::k.key_buffers()][cute::cosize_v<
        typename Traits::template SmemLayoutKeys<Traits::kHeadDim, Traits::kKeySlice>>];
    Element v[cute::cosize_v<typename Traits::template SmemLayoutKeys<Traits::kHeadDimV>>];
    Element q[Traits::kQStages][kQueries<Traits::kHeadDim>];
    Element dout[Traits::kDoutStages][kQueries<Traits::kHeadDimV>];
    Element ds[kExchangeBuffers][cute::cosize_v<typename Traits::SmemLayoutDs>];
  };
  static constexpr SharedMemory kListed = Traits::k.shared_memory();
  static_assert(sizeof(k) == kListed.total("K") && sizeof(v) == kListed.total("V") &&
                sizeof(q) == kListed.total("Q") && sizeof(dout) == kListed.total("dO") &&
                sizeof(ds) == kListed.total("dS"));

  alignas(1024) Exchange exchange;  // it has swizzled tiles

  // Values of the rows in a stage, loaded and released with Q and with dO.
  alignas(16) float lse_log2[Traits::kQStages][Traits::kTileM];
  float delta[Traits::kDoutStages][Traits::kTileM];

  // For each key, the queries that see it (mask.h).
  [[no_unique_address]] cute::conditional_t<Traits::kKind.mask == MaskKind::kInterval,
                                            Interval[Traits::kTileN], NoKeyLimits> key_limits;

  // Name: what becomes true. Who arrives -> who waits (arrivals).
  Mbarrier k_full[Traits::k.key_buffers()];  // TMA -> consumers (1 + bytes)
  Mbarrier v_full;                           // TMA -> consumers (1 + bytes)
  Mbarrier q_full[Traits::kQStages];         // TMA -> consumers (1 + bytes)
  Mbarrier q_empty[Traits::kQStages];        // consumers -> producer warp (kReleases)
  Mbarrier dout_full[Traits::kDoutStages];   // TMA -> consumers (1 + bytes)
  Mbarrier dout_empty[Traits::kDoutStages];  // consumers -> producer warp (kReleases)

  CUTE_DEVICE void init_barriers() {
    for (Mbarrier& full : k_full) {
      full.init(1);
    }
    v_full.init(1);
    for (int i = 0; i < Traits::kQStages; ++i) {
      q_full[i].init(1);
      q_empty[i].init(Exchange::kReleases);
    }
    for (int i = 0; i < Traits::kDoutStages; ++i) {
      dout_full[i].init(1);
      dout_empty[i].init(Exchange::kReleases);
    }
    exchange.init_barriers();
    fence_barrier_init();
  }
};

}  // namespace fa3
