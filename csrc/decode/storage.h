// Shared memory of a CTA: a ring of K and V, a ring of Q with its tile, P of a K tile.
#pragma once

#include "decode/sequences.h"
#include "decode/traits.h"

namespace fa3 {

// The scales of a tile of a cache of e4m3.
struct DecodeScales {
  float k;
  float v;
};

// What a row of a tile needs: the slots of the keys that it sees, its row of bits of a tree, and
// the factor of its scores.
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
    char keys[kStages][Traits::kStageBytes];                 // parts of K and V in turn
    Element q[kQStages][kWarpgroupRows * Traits::kColumns];  // in slices of 64 columns
    Element p[kWarpgroupRows * Traits::kTileN];              // P^T
  };

  // What belongs to the tile that is computed.
  DecodeRow rows[kWarpgroupRows];
  int most[kWarpgroupRows];                            // the largest score so far, ordered_int()
  float sums[Traits::kConsumerWarps][kWarpgroupRows];  // over a warp's keys
  float factors[kWarpgroupRows];                       // O is multiplied by them; -inf: O is 0
  float lses[kWarpgroupRows];
  FwdWork<Traits> work[kQStages];
  SequenceTable<Traits> sequences;
  DecodeScales tile_scales[kDecodeScales];  // unset where the call has none
  // Scales by page: of the keys of a stage; its barriers guard them.
  float key_scales[kScaleStages][Traits::kTileN];

  // Name: what becomes true. Who arrives -> who waits (arrivals).
  Mbarrier full[kStages];        // a part has arrived, and Q before the first part of a tile: all
                                 // producer threads (128) -> consumers
  Mbarrier empty[kStages];       // it has been read: consumer warpgroups (2), or their warps (8) ->
                                 // producer
  Mbarrier work_full[kQStages];  // `work` is published: producer (1) -> consumers
  Mbarrier work_empty[kQStages];  // it has been used, and Q read: consumer warps (8) -> producer

  CUTE_DEVICE void init_barriers() {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(kWarpgroupThreads);
      empty[i].init(Traits::kConverts ? Traits::kConsumerWarps : Traits::kConsumers);
    }
    for (int i = 0; i < kQStages; ++i) {
      work_full[i].init(1);
      work_empty[i].init(Traits::kConsumerWarps);
    }
    fence_barrier_init();
  }
};

}  // namespace fa3
