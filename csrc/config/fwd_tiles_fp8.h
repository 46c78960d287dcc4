// The tiles of the forward kernel for e4m3, one struct each. Shared memory: Q ring + K ring + V
// ring + V as it comes + O, in KiB.
//
// Speeds are TFLOP/s at 16k tokens, heads * head dim = 2048, full / causal, H200, 2026-11-22; at
// head dims 64 and 128 with a softmax that knows no scales, 0 to 2 % faster than that of now.
#pragma once

#include "config/fwd_config.h"

namespace fa3 {

struct Fp8Defaults : FwdDefaults {
  static constexpr int kRawStages = 2;
  static constexpr int kQStages = 2;
  static constexpr ProducerSize kProducerSize = ProducerSize::kWide;
  static constexpr bool kStageOutput = true;
  // P ends at 448 = 2^8.8, and the largest one is brought to 2^8. In rows with small sums 0 is in
  // place of this (softmax_fp8.h).
  static constexpr float kLazyRescaleLog2 = 0.8f;
};

// 24 + 24 + 24 + 24 + 24 = 120 KiB. S = 8k: 673 / 592, S = 512: 433 / 247; with two stages
// 662 / 585, 390 / 238.
// Maxima are always taken over: that is 0.3 % slower than only those that have grown by 2^0.8, and
// to look at sums first 1.3 % (2026-11-23).
struct FwdTileFp8D64 : Fp8Defaults {
  static constexpr int kHeadDim = 64;
  static constexpr int kHeadDimV = 64;
  static constexpr float kLazyRescaleLog2 = 0.f;
  static constexpr int kConsumerWarpgroups = 3;
  static constexpr int kTileN = 128;
  static constexpr int kStages = 3;
  static constexpr int kRawStages = 3;
  static constexpr bool kPingPong = false;
  static constexpr bool kTileOverlap = true;
};

// 48 + 36 + 48 + 24 + 48 = 204 KiB: 96 keys of V take 128 turned round. S = 8k: 946 / 937, S = 512:
// 564 / 354; with two stages 935 / 920, 521 / 337. The registers of a producer of 32 in place of 56
// gain causal 2 % from 2k on, 32/8 heads 2 to 3 %, packed sequences and windows 1 %, full 0 to
// - 1.6 % (H200, 2026-11-24). One k-step of Q in registers gains full 2 to 3 % from 2k to 16k, two
// lose 2 %, three spill (H200, 2026-11-25; two and three the day before).
struct FwdTileFp8D128 : Fp8Defaults {
  static constexpr ProducerSize kProducerSize = ProducerSize::kUsual;
  static constexpr int kHeadDim = 128;
  static constexpr int kHeadDimV = 128;
  static constexpr int kConsumerWarpgroups = 3;
  static constexpr int kTileN = 96;
  static constexpr int kStages = 3;
  static constexpr bool kPingPong = false;
  static constexpr bool kTileOverlap = true;
  static constexpr int kFixedKeys = 240;
  static constexpr int kQuerySteps = 1;
};

// 32 + 48 + 48 + 48 + 32 = 208 KiB. With two stages S = 8k: 862 / 874, S = 512: 620 / 359; since O
// is sent by the scale warp S = 512: 664 / 390, S = 1k: 758 / 559; three are 0 to 2 % faster.
// Turns, tried with another form of the softmax: 859 / 871 of 869 / 865, 617 / 375 of 631 / 365.
// Fewer registers for the producer were not measured here.
struct FwdTileFp8D128Short : FwdTileFp8D128 {
  static constexpr ProducerSize kProducerSize = ProducerSize::kWide;
  static constexpr int kConsumerWarpgroups = 2;
  static constexpr int kTileN = 128;
  static constexpr int kStages = 3;
  static constexpr int kRawStages = 3;
  static constexpr int kRelativeSpeed = 89;
  static constexpr int kFixedKeys = 215;
  static constexpr int kQuerySteps = 0;
};

// 64 + 64 + 64 + 32 = 224 KiB: O has no room here. Overlap in a warpgroup needs 64 registers for S,
// 128 for O and 16 for P of the tile before, so all that a narrow producer leaves. V as it comes
// has room once: its halves are loaded and transposed in turn, else the copy of one waits for the
// transposition of the one before. S = 8k: 1235 / 1198, S = 512: 847 / 492; neither overlap nor
// halves: 1049 / 1099, 752 / 462; overlap of tiles too: 1208 / 1195, 825 / 482 (H200, 2026-11-24).
// General kernels with 96 keys and 56 registers for the producer, which spill nothing, take 1.4 to
// 1.5 times as long (packed sequences, windows; the same day).
struct FwdTileFp8D256 : Fp8Defaults {
  static constexpr int kHeadDim = 256;
  static constexpr int kHeadDimV = 256;
  static constexpr int kTileN = 128;
  static constexpr int kRawStages = 1;
  static constexpr int kRawParts = 2;
  static constexpr ProducerSize kProducerSize = ProducerSize::kNarrow;
  static constexpr bool kStageOutput = false;
};

// 64 + 64 + 32 + 32 + 32 = 224 KiB. MLA.
struct FwdTileFp8D192x128 : Fp8Defaults {
  static constexpr int kHeadDim = 192;
  static constexpr int kHeadDimV = 128;
  static constexpr int kTileN = 128;
  static constexpr bool kTileOverlap = true;
};

// With sums of PV in fp32, beside those of the products: 120 KiB and 48 for them.
struct FwdTileFp8D64Promote : FwdTileFp8D64 {
  static constexpr bool kPromote = true;
  static constexpr int kSharedSums = 32;
};

// 32 + 48 + 48 + 32 + 32 KiB, and 32 for half of the sums. All in registers, with a third stage of
// V as it comes, spill 72 bytes, and S = 8k takes 4 to 5 % longer; with a quarter in shared memory
// 10 % (H200, 2026-11-25).
struct FwdTileFp8D128Promote : FwdTileFp8D128Short {
  static constexpr float kLazyRescaleLog2 = 0.f;
  static constexpr int kRawStages = 2;
  static constexpr bool kPromote = true;
  static constexpr int kSharedSums = 32;
};

// 64 + 64 + 32 + 32 KiB, and 32 for half of the sums, so that O leaves from registers. With 96
// keys, staged, S = 2k takes 4 to 5 % longer, 8k 1 %; without turns 2k 1 to 2 %, 8k - 1 to + 1 %
// (H200, 2026-11-25).
struct FwdTileFp8D192x128Promote : FwdTileFp8D192x128 {
  static constexpr float kLazyRescaleLog2 = 0.f;
  static constexpr bool kStageOutput = false;
  static constexpr bool kPromote = true;
  static constexpr int kSharedSums = 32;
};

// In the registers of O, with no overlap: the sum of a K tile has those of S.
struct FwdTileFp8D256Promote : FwdTileFp8D256 {
  static constexpr bool kIntraOverlap = false;
  static constexpr bool kPromote = true;
};

}  // namespace fa3
