// The tiles of the forward kernel for e4m3. Shared memory: Q ring + K ring + V ring + V as it comes.
#pragma once

#include "config/fwd_config.h"

namespace fa3 {

struct Fp8Defaults : FwdDefaults {
  static constexpr int kRawStages = 2;
  // P ends at 448 = 2^8.8 and is brought to 2^8.
  static constexpr float kLazyRescaleLog2 = 0.8f;
};

struct FwdTileFp8D128 : Fp8Defaults {
  static constexpr int kHeadDim = 128;
  static constexpr int kHeadDimV = 128;
#ifndef N128
#define N128 128
#endif
  static constexpr int kTileN = N128;
  static constexpr int kQStages = 2;
  static constexpr bool kTileOverlap = true;
};

struct FwdTileFp8D64 : Fp8Defaults {
  static constexpr int kHeadDim = 64;
  static constexpr int kHeadDimV = 64;
  static constexpr int kConsumerWarpgroups = 3;
  static constexpr bool kPingPong = false;
  static constexpr int kTileN = 128;
  static constexpr int kQStages = 2;
  static constexpr bool kTileOverlap = true;
};

struct FwdTileFp8D256 : Fp8Defaults {
  static constexpr int kHeadDim = 256;
  static constexpr int kHeadDimV = 256;
  static constexpr int kTileN = 128;
  static constexpr int kRawStages = 1;
  static constexpr bool kIntraOverlap = false;
};

}  // namespace fa3
