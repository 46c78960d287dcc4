// Shared memory of a CTA: the rings of the three column groups and their barriers.
#pragma once

#include "device/barriers.h"
#include "forward/work.h"
#include "mla/traits.h"

namespace fa3 {

// Final values of a row: the scale of O, 0 for a row without a visible key, and the LSE.
struct RowEnd {
  float scale;
  float lse;
};

// A position in the ring of one half of the latent columns.
template <class Traits>
struct HalfRing {
  int first;
  int stages;
  int stage;
  uint32_t phase = 0;

  CUTE_DEVICE explicit HalfRing(bool is_left)
      : first(is_left ? 0 : Traits::kStages),
        stages(is_left ? Traits::kStages : Traits::kRightStages),
        stage(first) {}

  CUTE_DEVICE int previous() const { return stage == first ? first + stages - 1 : stage - 1; }

  CUTE_DEVICE void advance() {
    if (++stage == first + stages) {
      stage = first;
      phase ^= 1;
    }
  }
};

template <class Traits>
struct MlaStorage {
  using Element = typename Traits::Element;
  static constexpr int kStages = Traits::kStages;
  static constexpr int kRightStages = Traits::kRightStages;
  static constexpr int kRawStages = Traits::kRawStages;

  // All buffers are in slices of 64 columns.
  struct alignas(1024) {
    // Latent columns of K tiles: kStages left halves, then kRightStages right ones. Q's left half
    // passes through the left ones.
    Element halves[kStages + kRightStages][Traits::kHalfElements];
    Element rotary[kStages][Traits::kRotaryElements];    // rotary columns, later P
    Element q[kWarpgroupRows * Traits::kSharedColumns];  // the other latent columns, then rotary
    // e4m3 only: the left and right half of a K tile as loaded.
    typename Traits::ElementKv raw[kRawStages][Traits::kHalfElements];
  };

  // Scales of the keys in `raw`, one per 128 columns; its barriers guard them.
  float2 scales[kRawStages][Traits::kTileN];

  // Double-buffered by tile; `work_empty` guards both arrays.
  FwdWork<Traits> work[Traits::kTileStages];
  RowEnd ends[Traits::kTileStages][kWarpgroupRows];

  // Per K tile: factors that rescale O, valid if any of a warp's 16 rows needs one.
  float rescale[kStages][kWarpgroupRows];
  bool any_rescale[kStages][kWarpgroupWarps];

  // Name: what becomes true. Who arrives (arrivals) -> who waits.
  //
  // Columns have arrived: producer (1 + bytes; all threads that gather), or warps of the converting
  // output warpgroup (4) -> score warpgroup, output warpgroup of the half.
  Mbarrier half_full[kStages + kRightStages];
  Mbarrier rotary_full[kStages];
  // Columns have been read: output warpgroup of the half (1), or score warpgroup for Q (1). P has
  // been read: both output warpgroups (2) -> whoever fills the buffer.
  Mbarrier half_empty[kStages + kRightStages];
  Mbarrier rotary_empty[kStages];
  // e4m3 columns and scales have arrived: producer, as above, and scale warp (1) -> output
  // warpgroup of the half. They have been converted: its warps (4) -> producer, scale warp.
  Mbarrier raw_full[kRawStages];
  Mbarrier raw_empty[kRawStages];
  Mbarrier work_full[Traits::kTileStages];   // a tile is published: tile warp (1) -> loader
  Mbarrier work_empty[Traits::kTileStages];  // its results are stored: warps of both output
                                             // warpgroups (8) -> tile warp
  Mbarrier q_empty;  // the last S of a tile is complete: score warpgroup (1) -> producer
  // S of the K tile that follows this P is complete, or there is none: score warpgroup (1) ->
  // output warpgroup 0.
  Mbarrier left_allowed[kStages];
  Mbarrier p_full[kStages];  // P has been written, or no tile is left: score warps (4) -> output
                             // warpgroups

  CUTE_DEVICE void init_barriers(int loads) {
    for (int i = 0; i < kStages + kRightStages; ++i) {
      half_full[i].init(Traits::kConverts ? kWarpgroupWarps : loads);
      half_empty[i].init(1);
    }
    for (int i = 0; i < kRawStages; ++i) {
      raw_full[i].init(loads + 1);
      raw_empty[i].init(kWarpgroupWarps);
    }
    for (int i = 0; i < kStages; ++i) {
      rotary_full[i].init(loads);
      rotary_empty[i].init(Traits::kOutputWarpgroups);
      left_allowed[i].init(1);
      p_full[i].init(kWarpgroupWarps);
    }
    for (int i = 0; i < Traits::kTileStages; ++i) {
      work_full[i].init(1);
      work_empty[i].init(Traits::kOutputWarpgroups * kWarpgroupWarps);
    }
    q_empty.init(1);
    fence_barrier_init();
  }
};

}  // namespace fa3
