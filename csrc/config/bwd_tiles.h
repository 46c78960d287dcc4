// The tiles of the backward kernel, one struct each: queries of a step x keys of a CTA. Shared
// memory: K and V + rings of Q and dO + two dS + dQ, in KiB (227 for one CTA).
#pragma once

#include "config/bwd_config.h"

namespace fa3 {

// 32 + 64 + 64 + 32 = 192 KiB. S and dP take 64 registers each, dK and dV 32.
struct BwdTileD64 : BwdDefaults {
  static constexpr int kHeadDim = 64;
  static constexpr int kTileM = 128;
};

// 64 + 64 + 32 + 32 = 192 KiB. S and dP take 32 registers each, dK and dV 64.
struct BwdTileD128 : BwdDefaults {
  static constexpr int kHeadDim = 128;
  static constexpr int kTileM = 64;
};

}  // namespace fa3
