// The tiles of the forward kernel, one struct each, with the reason and the date beside its
// numbers. Shared memory: Q ring + K ring + V ring, in KiB (228 KiB per SM, 227 for one CTA).
#pragma once

#include "config/fwd_config.h"

namespace fa3 {

// 3 x 64 rows: O takes few registers at this head dim, and three warpgroups share each K/V tile.
// 48 + 32 + 32 = 112 KiB. H200, 2026-11-21: 1.04 to 1.10 of FA3 full, 0.95 to 1.00 causal
// (geometric means over S = 512 to 16k, several runs, kLazyRescaleLog2 = 8); 128 x 128, 128 x 160
// and 128 x 192 with turns 0.86 to 0.97; 192 x 96 1.02 to 1.04, ahead at 16k only.
struct FwdTileD64 : FwdDefaults {
  static constexpr int kHeadDim = 64;
  static constexpr int kHeadDimV = 64;
  static constexpr int kConsumerWarpgroups = 3;
  static constexpr int kTileN = 128;
  static constexpr int kQStages = 2;
  static constexpr bool kPingPong = false;
};

// For short causal sequences, of which 192 rows waste more: 32 + 32 + 32 = 96 KiB. H200,
// 2026-11-21: 335 against 297 TFLOP/s at S = 1k, 395 against 402 at 2k, 442 against 541 at 16k.
struct FwdTileD64Short : FwdDefaults {
  static constexpr int kHeadDim = 64;
  static constexpr int kHeadDimV = 64;
  static constexpr int kTileN = 128;
  static constexpr int kQStages = 2;
  static constexpr int kRelativeSpeed = 82;
};

// 64 + 64 + 64 = 192 KiB. H200, 2026-11-21, as above: 0.98 to 1.01 of FA3 full; 128 x 176 with one
// Q stage 0.92 to 0.95 (16 % behind this one at S = 512, where the next tile's Q is waited for, 0
// to 2 % ahead at 16k), 128 x 160 0.93 to 0.97, 192 x 80 0.94 (level with FA3 at 16k).
struct FwdTileD128 : FwdDefaults {
  static constexpr int kHeadDim = 128;
  static constexpr int kHeadDimV = 128;
  static constexpr int kTileN = 128;
  static constexpr int kQStages = 2;
};

// 64 + 64 + 64 = 192 KiB. O takes 128 registers, S 32. H200, 2026-11-21, as above: 0.99 to 1.02 of
// FA3 full; 128 x 80 with turns 0.99 to 1.00, without 0.92 to 0.98.
struct FwdTileD256 : FwdDefaults {
  static constexpr int kHeadDim = 256;
  static constexpr int kHeadDimV = 256;
  static constexpr int kTileN = 64;
};

}  // namespace fa3
