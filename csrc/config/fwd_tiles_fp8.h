// The tiles of the forward kernel for e4m3, one struct each. Shared memory: Q ring, whose buffers
// have room for O in 16 bits, + K ring + V ring + V as it comes, in KiB.
//
// Speeds are TFLOP/s at 16k tokens, heads * head dim = 2048, full / causal, H200, 2026-11-22.
#pragma once

#include "config/fwd_config.h"

namespace fa3 {

struct Fp8Defaults : FwdDefaults {
  static constexpr int kRawStages = 2;
  // P ends at 448 = 2^8.8 and is brought to 2^8.
  static constexpr float kLazyRescaleLog2 = 0.8f;
};

// 48 + 16 + 16 + 16 = 96 KiB. S = 8k: 543 / 494; 128 x 192 with turns 486 / 478, 128 x 256 520 /
// 452, 128 x 128 430 / 396.
struct FwdTileFp8D64 : Fp8Defaults {
  static constexpr int kHeadDim = 64;
  static constexpr int kHeadDimV = 64;
  static constexpr int kConsumerWarpgroups = 3;
  static constexpr int kTileN = 128;
  static constexpr int kQStages = 2;
  static constexpr bool kPingPong = false;
  static constexpr bool kTileOverlap = true;
};

// 64 + 48 + 48 + 48 = 208 KiB. S = 8k: 854 / 793; with turns 838 / 770, with 128 keys 800 / 743,
// 192 x 64 767 / 727.
struct FwdTileFp8D128 : Fp8Defaults {
  static constexpr int kHeadDim = 128;
  static constexpr int kHeadDimV = 128;
  static constexpr int kTileN = 192;
  static constexpr int kQStages = 2;
  static constexpr bool kPingPong = false;
  static constexpr bool kTileOverlap = true;
};

// 64 + 64 + 64 + 32 = 224 KiB. O takes 128 registers, S 64: none are left for P of the tile before.
// S = 8k: 985 / 891; 128 x 64 with overlap in a warpgroup and three stages 881 / 779.
struct FwdTileFp8D256 : Fp8Defaults {
  static constexpr int kHeadDim = 256;
  static constexpr int kHeadDimV = 256;
  static constexpr int kTileN = 128;
  static constexpr int kRawStages = 1;
  static constexpr bool kIntraOverlap = false;
};

}  // namespace fa3
