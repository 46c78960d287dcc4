// Shared memory of a CTA: a ring of K and V, a ring of Q and its tile, and P of a K tile.
#pragma once

#include "decode/sequences.h"
#include "decode/traits.h"

namespace fa3 {

// The scales of a tile of an e4m3 cache.
struct DecodeScales {
  float k;
  float v;
};

// State of a row of a tile: the range of slots that it sees, its row of tree bits, and the factor
// that scales its scores.
struct alignas(16) DecodeRow {
  int begin;
  int end;
  int tree_row;
  float factor;
};

template <class Traits>
struct DecodeStorage {
  using Element = typename Traits::Element;
  static constexpr int kStages = Traits::kStages;
  static constexpr int kQStages = Traits::kQStages;
  static constexpr int kScaleStages = Traits::kConverts ? kStages : 0;
  static constexpr int kDecodeScales = Traits::kConverts ? kQStages : 0;

  struct alignas(1024) {
    char keys[kStages][Traits::kStageBytes];                        // parts of K, then parts of V
    Element q[kQStages][Traits::kQRows * Traits::kColumns];         // in slices of 64 columns
    Element p[Traits::kPBuffers][Traits::kQRows * Traits::kTileN];  // P^T
  };

  // e4m3 latents: the chunks of a K tile as loaded, those of a thread below each other.
  uint4 raw[Traits::kRawChunks][Traits::kProducerThreads];

  // State of the current tile.
  DecodeRow rows[kWarpgroupRows];
  int most[kWarpgroupRows];                            // largest score so far, as ordered_int()
  float sums[Traits::kConsumerWarps][kWarpgroupRows];  // sums over a warp's keys
  float factors[kWarpgroupRows];                       // they multiply O; -inf: O is 0
  float lses[kWarpgroupRows];
  FwdWork<Traits> work[kQStages];
  SequenceTable<Traits> sequences;
  DecodeScales tile_scales[kDecodeScales];  // unset if the call has none
  // Page scales of the keys of a stage; its barriers guard them.
  float key_scales[kScaleStages][Traits::kTileN];

  // Name: what becomes true. Who arrives (arrivals) -> who waits.
  Mbarrier full[kStages];         // a part has arrived, and Q before the first part of a tile: all
                                  // producer threads (128 or 256) -> consumers
  Mbarrier empty[kStages];        // the part has been read: consumer warpgroups (2), of latents
                                  // the one that takes the K tile (1), or warps (8) -> producer
  Mbarrier work_full[kQStages];   // `work` is published: producer (1) -> consumers
  Mbarrier work_empty[kQStages];  // `work` and Q have been read: consumer warps (8) -> producer

  CUTE_DEVICE void init_barriers() {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(Traits::kProducerThreads);
      empty[i].init(Traits::kConverts ? Traits::kConsumerWarps : Traits::kReaders);
    }
    for (int i = 0; i < kQStages; ++i) {
      work_full[i].init(1);
      work_empty[i].init(Traits::kConsumerWarps);
    }
    fence_barrier_init();
  }
};

}  // namespace fa3
