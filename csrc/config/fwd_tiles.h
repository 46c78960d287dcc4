// The tiles of the forward kernel, one struct each, with the reason and the date beside its
// numbers. Shared memory: Q ring + K ring + V ring, in KiB (228 KiB per SM, 227 for one CTA).
//
// Speeds are TFLOP/s at 16k tokens, heads * head dim = 2048, bf16, H200, 2026-11-21; those of one
// comparison come from one interleaved run. Up to head dim 128 there are a long tile and a short
// one: three warpgroups share each K and V tile, which saves power and fills the gaps of one
// another's softmax, but 192 rows are cut off worse by short sequences and by the diagonal.
#pragma once

#include "config/fwd_config.h"

namespace fa3 {

// 48 + 32 + 32 = 112 KiB. Against 128 x 128 with turns: full 398 / 392 (S = 512) to 558 / 455
// (16k). 192 x 96 with Q in registers: 0.92 to 0.98 of this one.
struct FwdTileD64 : FwdDefaults {
  static constexpr int kHeadDim = 64;
  static constexpr int kHeadDimV = 64;
  static constexpr int kConsumerWarpgroups = 3;
  static constexpr int kTileN = 128;
  static constexpr int kQStages = 2;
  static constexpr bool kPingPong = false;
  static constexpr bool kTileOverlap = true;
  static constexpr bool kMaximaFirst = true;
  static constexpr int kFixedKeys = 80;
};

// For causal problems only: 32 + 32 + 32 = 96 KiB. Against the above: 275 / 225 at S = 512, 427 /
// 408 at 2k, 477 / 549 at 16k.
struct FwdTileD64Short : FwdDefaults {
  static constexpr int kHeadDim = 64;
  static constexpr int kHeadDimV = 64;
  static constexpr int kTileN = 128;
  static constexpr int kQStages = 2;
  static constexpr bool kTileOverlap = true;
  static constexpr int kRelativeSpeed = 86;
  static constexpr int kFixedKeys = 40;
};

// For full attention: 96 + 60 + 60 = 216 KiB. Against the short tile: 531 / 603 at S = 512, 724 /
// 704 at 2k, 756 / 684 at 16k; causal 311 / 343, 563 / 617, 683 / 683 at 8k. Two stages: 1 %
// slower; 192 x 64: 2 to 8 %; 192 x 96 does not fit into the registers. One k-step of Q in
// registers gains 1 % from 2k to 16k, two the same (H200, 2026-11-25).
struct FwdTileD128 : FwdDefaults {
  static constexpr int kHeadDim = 128;
  static constexpr int kHeadDimV = 128;
  static constexpr int kConsumerWarpgroups = 3;
  static constexpr int kTileN = 80;
  static constexpr int kStages = 3;
  static constexpr int kQStages = 2;
  static constexpr bool kPingPong = false;
  static constexpr bool kTileOverlap = true;
  static constexpr int kFixedKeys = 300;
  static constexpr int kQuerySteps = 1;
};

// 96 + 64 + 64 = 224 KiB. Two Q stages: causal - 2 % at S = 512, - 1 % at 1k, else the same.
struct FwdTileD128Short : FwdDefaults {
  static constexpr int kHeadDim = 128;
  static constexpr int kHeadDimV = 128;
  static constexpr int kTileN = 128;
  static constexpr int kQStages = 3;
  static constexpr bool kTileOverlap = true;
  static constexpr bool kMaximaFirst = true;
  static constexpr int kRelativeSpeed = 94;
  static constexpr int kFixedKeys = 300;
};

// 96 + 60 + 60 = 216 KiB; O takes 96 registers. Against 128 x 112 with one Q stage: full 561 / 533
// at S = 512, 742 / 718 at 4k, 748 / 755 at 16k; causal 333 / 290, 692 / 657, 739 / 742.
struct FwdTileD192 : FwdDefaults {
  static constexpr int kHeadDim = 192;
  static constexpr int kHeadDimV = 192;
  static constexpr int kTileN = 80;
  static constexpr int kQStages = 2;
  static constexpr bool kTileOverlap = true;
};

// 64 + 64 + 64 = 192 KiB. O takes 128 registers, S 32. 128 x 80: 1 to 2 % slower.
struct FwdTileD256 : FwdDefaults {
  static constexpr int kHeadDim = 256;
  static constexpr int kHeadDimV = 256;
  static constexpr int kTileN = 64;
  static constexpr int kFixedKeys = 200;
};

// 128 + 48 + 48 = 224 KiB: room for the next tile's Q. Against the above: full 569 / 549 at S =
// 512, 659 / 685 at 1k; causal 330 / 306, 508 / 499, 682 / 722 at 4k.
struct FwdTileD256Short : FwdDefaults {
  static constexpr int kHeadDim = 256;
  static constexpr int kHeadDimV = 256;
  static constexpr int kTileN = 48;
  static constexpr int kQStages = 2;
  static constexpr bool kTileOverlap = true;
  static constexpr int kRelativeSpeed = 91;
  static constexpr int kFixedKeys = 100;
};

// One warpgroup, for problems that have fewer tiles of two or three warpgroups than the GPU has
// multiprocessors. Keys per tile are those of a larger tile, so that the results are the same, bit
// for bit. 24 + 32 + 32 = 88 KiB up to 48 + 64 + 64 = 176. Batch 1, 8 heads, 1k, full: d64 8.7 us
// against 16.4, d128 11.7 / 14.2, d256 17.4 / 23.3.
//
// O of a tile leaves through the buffer of its Q: with two of them the next Q but one is loaded
// when O is out, with three while that happens. Batch 8192, S = 64, full: d128 2029 us against 2380
// (2026-11-22).
struct FwdTileD64Small : FwdTileD64 {
  static constexpr int kConsumerWarpgroups = 1;
  static constexpr int kQStages = 3;
  static constexpr int kRelativeSpeed = 65;
};

struct FwdTileD128Small : FwdTileD128 {
  static constexpr int kConsumerWarpgroups = 1;
  static constexpr int kQStages = 3;
  static constexpr int kQuerySteps = 0;
  static constexpr int kRelativeSpeed = 59;
};

struct FwdTileD128ShortSmall : FwdTileD128Short {
  static constexpr int kConsumerWarpgroups = 1;
  static constexpr bool kPingPong = false;
  static constexpr int kRelativeSpeed = 60;
};

struct FwdTileD256Small : FwdTileD256 {
  static constexpr int kConsumerWarpgroups = 1;
  static constexpr bool kPingPong = false;
  static constexpr int kRelativeSpeed = 63;
};

struct FwdTileD256ShortSmall : FwdTileD256Short {
  static constexpr int kConsumerWarpgroups = 1;
  static constexpr bool kPingPong = false;
  static constexpr int kRelativeSpeed = 57;
};

// For packed sequences of up to 64 rows, whose tiles are mostly waiting: two CTAs a multiprocessor.
// What the planner goes by is not fitted: it has them taken up to 64 rows, however many keys there
// are (at 4096 they are within 1 % of one CTA with tiles of 64 x 128). 24 + 16 + 16 = 56 KiB. 8192
// sequences of 1 to 64: 1732 us against 3534 of such tiles (2026-11-22).
struct FwdTileD64Tiny : FwdTileD64Small {
  static constexpr int kTileN = 64;
  static constexpr int kCtasPerSm = 2;
  static constexpr int kRelativeSpeed = 60;
  static constexpr int kFixedKeys = 60;
};

// 48 + 32 + 32 = 112 KiB, just half of a multiprocessor's. As above: 1343 us against 2148.
struct FwdTileD128Tiny : FwdTileD128ShortSmall {
  static constexpr int kTileN = 64;
  static constexpr int kCtasPerSm = 2;
  static constexpr int kFixedKeys = 240;
};

// The head dims in between: the products leave out the steps that are filling, shared memory holds
// whole slices of 64 columns.
struct FwdTileD32 : FwdTileD64 {
  static constexpr int kHeadDim = 32;
  static constexpr int kHeadDimV = 32;
};

struct FwdTileD48 : FwdTileD64 {
  static constexpr int kHeadDim = 48;
  static constexpr int kHeadDimV = 48;
};

// 96 + 48 + 48 = 192 KiB. d96 against its short tile: full 436 / 494 at S = 512, 666 / 592 at 4k,
// 661 / 565 at 16k; causal 260 / 301, 588 / 573, 654 / 561; 192 x 80: 3 to 5 % slower. With one
// k-step of Q in registers: full 0 to 1 % slower (H200, 2026-11-25).
struct FwdTileD96 : FwdTileD128 {
  static constexpr int kHeadDim = 96;
  static constexpr int kHeadDimV = 96;
  static constexpr int kTileN = 96;
  static constexpr int kStages = 2;
  static constexpr int kQuerySteps = 0;
  static constexpr int kFixedKeys = 380;
};

struct FwdTileD96Short : FwdTileD128Short {
  static constexpr int kHeadDim = 96;
  static constexpr int kHeadDimV = 96;
  static constexpr int kRelativeSpeed = 86;
};

struct FwdTileD80 : FwdTileD96 {
  static constexpr int kHeadDim = 80;
  static constexpr int kHeadDimV = 80;
};

struct FwdTileD80Short : FwdTileD96Short {
  static constexpr int kHeadDim = 80;
  static constexpr int kHeadDimV = 80;
};

// Against its short tile: full 446 / 536 at S = 512, 672 / 603 at 4k, 691 / 598 at 16k; causal 267
// / 320, 557 / 575, 654 / 627. 192 x 80: 4 to 5 % slower full, 3 % faster causal.
struct FwdTileD112 : FwdTileD96 {
  static constexpr int kHeadDim = 112;
  static constexpr int kHeadDimV = 112;
};

struct FwdTileD112Short : FwdTileD128Short {
  static constexpr int kHeadDim = 112;
  static constexpr int kHeadDimV = 112;
  static constexpr int kRelativeSpeed = 90;
};

struct FwdTileD144 : FwdTileD192 {
  static constexpr int kHeadDim = 144;
  static constexpr int kHeadDimV = 144;
};

struct FwdTileD160 : FwdTileD192 {
  static constexpr int kHeadDim = 160;
  static constexpr int kHeadDimV = 160;
};

struct FwdTileD176 : FwdTileD192 {
  static constexpr int kHeadDim = 176;
  static constexpr int kHeadDimV = 176;
};

struct FwdTileD208 : FwdTileD256 {
  static constexpr int kHeadDim = 208;
  static constexpr int kHeadDimV = 208;
};

struct FwdTileD224 : FwdTileD256 {
  static constexpr int kHeadDim = 224;
  static constexpr int kHeadDimV = 224;
};

struct FwdTileD240 : FwdTileD256 {
  static constexpr int kHeadDim = 240;
  static constexpr int kHeadDimV = 240;
};

// Value head dims that are not those of q and k.

// 96 + 48 + 48 = 192 KiB.
struct FwdTileD96x64 : FwdTileD64 {
  static constexpr int kHeadDim = 96;
};

// 96 + 48 + 48 = 192 KiB.
struct FwdTileD128x64 : FwdTileD64 {
  static constexpr int kHeadDim = 128;
};

// 96 + 30 + 60 = 186 KiB: O needs buffers of twice Q's size.
struct FwdTileD64x128 : FwdTileD128 {
  static constexpr int kHeadDim = 64;
};

// 96 + 72 + 48 = 216 KiB.
struct FwdTileD192x128 : FwdTileD192 {
  static constexpr int kHeadDimV = 128;
  static constexpr int kTileN = 96;
};

// 128 + 16 + 64 = 208 KiB: O needs buffers of four times Q's size.
struct FwdTileD64x256 : FwdTileD256Short {
  static constexpr int kHeadDim = 64;
  static constexpr int kTileN = 64;
};

}  // namespace fa3
