// The tiles of the backward kernel, one struct each: queries of a step x keys of a CTA. Shared
// memory: K and V + rings of Q and dO + two dS + what is handed on, in KiB (227 for one CTA).
#pragma once

#include "config/bwd_config.h"

namespace fa3 {

// 32 + 64 + 64 + 32 = 192 KiB. S and dP take 64 registers each, dK and dV 32.
struct BwdTileD64 : BwdDefaults {
  static constexpr int kHeadDim = 64;
  static constexpr int kHeadDimV = 64;
  static constexpr int kTileM = 128;
};

// 64 + 96 + 32 + 32 = 224 KiB, as D128: dQ has 128 columns here too, of which 32 are filling.
struct BwdTileD96 : BwdDefaults {
  static constexpr int kHeadDim = 96;
  static constexpr int kHeadDimV = 96;
  static constexpr int kTileM = 64;
  static constexpr int kQStages = 3;
  static constexpr int kDoutStages = 3;
};

// 64 + 96 + 32 + 32 = 224 KiB. S and dP take 32 registers each, dK and dV 64.
struct BwdTileD128 : BwdDefaults {
  static constexpr int kHeadDim = 128;
  static constexpr int kHeadDimV = 128;
  static constexpr int kTileM = 64;
  static constexpr int kQStages = 3;
  static constexpr int kDoutStages = 3;
};

// 48 + 96 + 16 + 48 = 208 KiB. dK and dV take 96 registers each, a third of dQ 32.
struct BwdTileD192 : BwdByProducts {
  static constexpr int kHeadDim = 192;
  static constexpr int kHeadDimV = 192;
  static constexpr int kRegisters[] = {184, 184, 120};
};

// 64 + 96 + 16 + 48 = 224 KiB. dK and dV take 128 registers each, a quarter of dQ 32.
struct BwdTileD256 : BwdByProducts {
  static constexpr int kHeadDim = 256;
  static constexpr int kHeadDimV = 256;
  static constexpr int kDoutStages = 1;
  static constexpr int kRegisters[] = {208, 216, 64};
};

// Head dims of q and k x that of v.

// 48 + 96 + 32 + 16 = 192 KiB. As D128, with 32 registers for dK.
struct BwdTileD64x128 : BwdDefaults {
  static constexpr int kHeadDim = 64;
  static constexpr int kHeadDimV = 128;
  static constexpr int kTileM = 64;
  static constexpr int kQStages = 4;
  static constexpr int kDoutStages = 4;
};

// 48 + 96 + 32 + 32 = 208 KiB. As D128, with 32 registers for dV.
struct BwdTileD128x64 : BwdDefaults {
  static constexpr int kHeadDim = 128;
  static constexpr int kHeadDimV = 64;
  static constexpr int kTileM = 64;
  static constexpr int kQStages = 4;
  static constexpr int kDoutStages = 4;
};

// As D128x64: dK takes 48 registers.
struct BwdTileD96x64 : BwdDefaults {
  static constexpr int kHeadDim = 96;
  static constexpr int kHeadDimV = 64;
  static constexpr int kTileM = 64;
  static constexpr int kQStages = 4;
  static constexpr int kDoutStages = 4;
};

// 40 + 128 + 16 + 40 = 224 KiB. dV takes 128 registers, dK 32, dQ 32: a CTA of a cluster makes it
// at every other step.
struct BwdTileD64x256 : BwdByProducts {
  static constexpr int kHeadDim = 64;
  static constexpr int kHeadDimV = 256;
  static constexpr int kQStages = 3;
  static constexpr int kDoutStages = 3;
  static constexpr bool kScoresFirst = true;
  static constexpr int kRegisters[] = {216, 160, 112};
};

// 40 + 120 + 16 + 48 = 224 KiB. dV takes 64 registers, dK 96, a third of dQ 32.
struct BwdTileD192x128 : BwdByProducts {
  static constexpr int kHeadDim = 192;
  static constexpr int kHeadDimV = 128;
  static constexpr int kQStages = 3;
  static constexpr int kDoutStages = 3;
  static constexpr bool kScoresFirst = true;
  static constexpr int kRegisters[] = {184, 184, 120};
};

}  // namespace fa3
