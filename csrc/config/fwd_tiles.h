// The tiles of the 16-bit forward kernels, with the reason and the date next to the numbers. A
// variant adds head dims, dtype and kind. Shared memory: Q ring + K ring + V ring, in KiB (228 KiB
// per SM, 227 KiB for one CTA).
//
// Speeds are TFLOP/s at 16k tokens, heads * head dim = 2048, bf16, H200, 2026-11-21, unless a line
// says otherwise; the speeds of one comparison are from one interleaved run. A / B: this tile, then
// the other one. Up to head dim 128 there are a long tile and a short one: in the long one three
// warpgroups share each K and V tile, which saves power and fills the gaps of one another's
// softmax, but 192 rows fit short sequences and the diagonal worse.
#pragma once

#include "config/fwd_config.h"

namespace fa3 {

// 48 + 32 + 32 = 112 KiB. Against 128 x 128 with ping-pong: full 398 / 392 (S = 512) to 558 / 455
// (16k). 192 x 96 with Q in registers: 0.92 to 0.98 times the speed of this one. Also for head dims
// 32 and 48, (96, 64) and (128, 64): products skip the steps that pad a slice.
inline constexpr FwdConfig kFwdTileD64{.consumer_warpgroups = 3,
                                       .tile_n = 128,
                                       .q_stages = 2,
                                       .ping_pong = false,
                                       .tile_overlap = true,
                                       .maxima_first = true,
                                       .fixed_keys = 80};

// Only for causal problems: 32 + 32 + 32 = 96 KiB. Against kFwdTileD64: 275 / 225 at S = 512, 427 /
// 408 at 2k, 477 / 549 at 16k.
inline constexpr FwdConfig kFwdTileD64Short{
    .tile_n = 128, .q_stages = 2, .tile_overlap = true, .relative_speed = 86, .fixed_keys = 40};

// For full attention: 96 + 60 + 60 = 216 KiB. Against the short tile: 531 / 603 at S = 512, 724 /
// 704 at 2k, 756 / 684 at 16k; causal 311 / 343, 563 / 617, 683 / 683 at 8k. Two stages are 1 %
// slower, 192 x 64 is 2 to 8 % slower; 192 x 96 does not fit into the registers. Also for (64,
// 128).
inline constexpr FwdConfig kFwdTileD128{.consumer_warpgroups = 3,
                                        .tile_n = 80,
                                        .stages = 3,
                                        .q_stages = 2,
                                        .ping_pong = false,
                                        .tile_overlap = true,
                                        .fixed_keys = 300};

// 96 + 64 + 64 = 224 KiB. With two Q stages causal is 2 % slower at S = 512 and 1 % slower at 1k,
// otherwise the same. late_wait: causal 1 % faster at 2k, 2 % at 4k, 3 % at 8k and 16k, at the
// power limit 3 to 7 %; other tiles would be 0 to 3 % slower (H100, 2026-11-26).
inline constexpr FwdConfig kFwdTileD128Short{.tile_n = 128,
                                             .q_stages = 3,
                                             .late_wait = true,
                                             .tile_overlap = true,
                                             .relative_speed = 95,
                                             .fixed_keys = 300};

// 96 + 60 + 60 = 216 KiB; O takes 96 registers. Against 128 x 112 with one Q stage: full 561 / 533
// at S = 512, 742 / 718 at 4k, 748 / 755 at 16k; causal 333 / 290, 692 / 657, 739 / 742. Also for
// head dims 144 to 176.
inline constexpr FwdConfig kFwdTileD192{.tile_n = 80, .q_stages = 2, .tile_overlap = true};

// 64 + 64 + 64 = 192 KiB. O takes 128 registers, S 32. 128 x 80 is 1 to 2 % slower. Also for head
// dims 208 to 240.
inline constexpr FwdConfig kFwdTileD256{.tile_n = 64, .fixed_keys = 200};

// 128 + 48 + 48 = 224 KiB, which holds the next tile's Q. Against kFwdTileD256: full 569 / 549 at S
// = 512, 659 / 685 at 1k; causal 330 / 306, 508 / 499, 682 / 722 at 4k.
inline constexpr FwdConfig kFwdTileD256Short{
    .tile_n = 48, .q_stages = 2, .tile_overlap = true, .relative_speed = 91, .fixed_keys = 100};

// 96 + 48 + 48 = 192 KiB. Against the short tile: full 436 / 494 at S = 512, 666 / 592 at 4k, 661 /
// 565 at 16k; causal 260 / 301, 588 / 573, 654 / 561. 192 x 80 is 3 to 5 % slower. Also for head
// dim 80; and for 112, against its short tile: full 446 / 536 at S = 512, 672 / 603 at 4k, 691 /
// 598 at 16k; causal 267 / 320, 557 / 575, 654 / 627.
inline constexpr FwdConfig kFwdTileD96 = [] {
  FwdConfig tile = kFwdTileD128;
  tile.tile_n = 96;
  tile.stages = 2;
  tile.fixed_keys = 380;
  return tile;
}();

// Also for head dim 80.
inline constexpr FwdConfig kFwdTileD96Short = [] {
  FwdConfig tile = kFwdTileD128Short;
  tile.relative_speed = 86;
  return tile;
}();

inline constexpr FwdConfig kFwdTileD112Short = [] {
  FwdConfig tile = kFwdTileD128Short;
  tile.relative_speed = 90;
  return tile;
}();

// Tiles for a head dim of V other than that of Q and K.

// 96 + 72 + 48 = 216 KiB.
inline constexpr FwdConfig kFwdTileD192x128 = [] {
  FwdConfig tile = kFwdTileD192;
  tile.tile_n = 96;
  return tile;
}();

// 128 + 16 + 64 = 208 KiB: O needs buffers of four times Q's size.
inline constexpr FwdConfig kFwdTileD64x256 = [] {
  FwdConfig tile = kFwdTileD256Short;
  tile.tile_n = 64;
  return tile;
}();

// One warpgroup, for problems that have fewer tiles of two or three warpgroups than the GPU has
// multiprocessors. The keys per K tile are those of the larger tile, so that the results are the
// same, bit for bit. 24 + 32 + 32 = 88 KiB up to 48 + 64 + 64 = 176 KiB. Batch 1, 8 heads, S = 1k,
// full: d64 8.7 us against 16.4 us, d128 11.7 / 14.2 us, d256 17.4 / 23.3 us.
constexpr FwdConfig one_warpgroup(FwdConfig tile, int relative_speed) {
  tile.consumer_warpgroups = 1;
  tile.ping_pong = false;
  tile.late_wait = false;
  tile.relative_speed = relative_speed;
  return tile;
}

// O of a tile is stored through the buffer of its Q. With two buffers the Q after the next one is
// loaded once O is stored, with three while O is being stored. Batch 8192, S = 64, full: d128 2029
// us against 2380 us (2026-11-22).
constexpr FwdConfig three_queries(FwdConfig tile) {
  tile.q_stages = 3;
  return tile;
}

inline constexpr FwdConfig kFwdTileD64Small = three_queries(one_warpgroup(kFwdTileD64, 65));
inline constexpr FwdConfig kFwdTileD128Small = three_queries(one_warpgroup(kFwdTileD128, 59));
inline constexpr FwdConfig kFwdTileD128ShortSmall = one_warpgroup(kFwdTileD128Short, 60);
inline constexpr FwdConfig kFwdTileD256Small = one_warpgroup(kFwdTileD256, 63);
inline constexpr FwdConfig kFwdTileD256ShortSmall = one_warpgroup(kFwdTileD256Short, 57);

// For packed sequences of up to 64 rows, whose tiles mostly wait: two CTAs per multiprocessor. The
// planner's numbers are not fitted: it takes these tiles up to 64 rows, whatever the number of keys
// (at 4096 keys they are within 1 % of one CTA with tiles of 64 x 128).
constexpr FwdConfig two_ctas(FwdConfig tile, int fixed_keys) {
  tile.tile_n = 64;
  tile.ctas_per_sm = 2;
  tile.relative_speed = 60;
  tile.fixed_keys = fixed_keys;
  return tile;
}

// 24 + 16 + 16 = 56 KiB. 8192 sequences of 1 to 64 rows: 1732 us against 3534 us with 64 x 128
// (2026-11-22).
inline constexpr FwdConfig kFwdTileD64Tiny = two_ctas(kFwdTileD64Small, 60);

// 48 + 32 + 32 = 112 KiB, just half of a multiprocessor's. For the same sequences: 1343 us against
// 2148 us.
inline constexpr FwdConfig kFwdTileD128Tiny = two_ctas(kFwdTileD128ShortSmall, 240);

// On a cache. What counts is the bytes in flight. The producer warp computes the line of work.
// kFwdTileD128Cache against two CTAs with 64 keys and 3 stages each, replays of a CUDA graph: batch
// 1, 1k keys 9.4 us / 9.7 us, 16k 24.2 / 28.0, batch 64, 4k 266 / 284; against one CTA with 64 keys
// and 6 stages 9.4 / 8.6, 24.2 / 23.7, 266 / 268, 16 queries 71.7 / 87.7 (H200, 2026-11-25).
constexpr FwdConfig on_cache(int tile_n, int stages, int q_stages) {
  return FwdConfig{.consumer_warpgroups = 1,
                   .tile_n = tile_n,
                   .stages = stages,
                   .q_stages = q_stages,
                   .producer = ProducerSize::kWide,
                   .ping_pong = false};
}

// 16 + 96 + 96 = 208 KiB, 32 + 96 + 96 = 224 KiB, 48 + 96 + 64 = 208 KiB, 32 + 96 + 96 = 224 KiB.
inline constexpr FwdConfig kFwdTileD64Cache = on_cache(128, 6, 2);
inline constexpr FwdConfig kFwdTileD128Cache = on_cache(128, 3, 2);
inline constexpr FwdConfig kFwdTileD192x128Cache = on_cache(128, 2, 2);
inline constexpr FwdConfig kFwdTileD256Cache = on_cache(64, 3, 1);

// On a cache, up to 64 rows of a KV head, gathered row by row (csrc/decode). Rings of Q, then of K
// and V, for D64; D96 and D128; D192x128; D256: 16 + 160 KiB, 32 + 160, 48 + 128, 64 + 128; and 16
// KiB for P. 64 x 4k: 268 us / 250, pages of one token 386 / 256 (kFwdTileD128Cache / these; H200,
// 2026-11-27).
constexpr FwdConfig decode_tile(int stages) {
  return FwdConfig{.consumer_warpgroups = 1,
                   .tile_n = 128,
                   .stages = stages,
                   .q_stages = 2,
                   .ping_pong = false,
                   .is_swapped = true};
}

inline constexpr FwdConfig kFwdTileD64Decode = decode_tile(10);
inline constexpr FwdConfig kFwdTileD96Decode = decode_tile(5);
inline constexpr FwdConfig kFwdTileD128Decode = decode_tile(5);
inline constexpr FwdConfig kFwdTileD192x128Decode = decode_tile(4);
inline constexpr FwdConfig kFwdTileD256Decode = decode_tile(4);

// With a cache of e4m3, for queries of 16 bits: 16 + 112 KiB, 32 + 144, 48 + 128 and 64 + 128,
// and 16 KiB for P. 64 x 4k: 205 us / 145 (H200, 2026-11-27).
constexpr FwdConfig converted_decode_tile(int stages) {
  FwdConfig tile = decode_tile(stages);
  tile.values = ValuesKind::kConverted;
  tile.scales = ScalesKind::kHeads;
  return tile;
}

inline constexpr FwdConfig kFwdTileD64DecodeKv8 = converted_decode_tile(14);
inline constexpr FwdConfig kFwdTileD96DecodeKv8 = converted_decode_tile(9);
inline constexpr FwdConfig kFwdTileD128DecodeKv8 = converted_decode_tile(9);
inline constexpr FwdConfig kFwdTileD192x128DecodeKv8 = converted_decode_tile(8);
inline constexpr FwdConfig kFwdTileD256DecodeKv8 = converted_decode_tile(8);

// Absorbed MLA (csrc/mla): 96 + 64 + 24 KiB of keys, 40 KiB of Q.
inline constexpr FwdConfig kFwdTileLatent{
    .consumer_warpgroups = 1, .tile_n = 64, .stages = 3, .q_stages = 1, .ping_pong = false};

// With latent columns of e4m3: 64 + 64 + 16 KiB of keys, 32 KiB of them as loaded, 40 KiB of Q.
inline constexpr FwdConfig kFwdTileLatentKv8 = [] {
  FwdConfig tile = kFwdTileLatent;
  tile.stages = 2;
  tile.raw_stages = 2;
  tile.values = ValuesKind::kConverted;
  tile.scales = ScalesKind::kKeys;
  return tile;
}();

// On a cache of e4m3, for 16-bit queries: a warpgroup converts. Rings of Q, K and V, then of K and
// V as loaded: 16 + 32 + 32 + 32 + 32 = 144 KiB, 32 + 64 + 64 + 32 + 32 = 224 KiB, 48 + 48 + 32 +
// 36 + 24 = 188 KiB, 32 + 64 + 64 + 32 + 32 = 224 KiB.
constexpr FwdConfig converted_on_cache(int tile_n, int raw_stages, int q_stages) {
  FwdConfig tile = on_cache(tile_n, 2, q_stages);
  tile.values = ValuesKind::kConverted;
  tile.scales = ScalesKind::kHeads;
  tile.raw_stages = raw_stages;
  return tile;
}

inline constexpr FwdConfig kFwdTileD64CacheKv8 = converted_on_cache(128, 4, 2);
inline constexpr FwdConfig kFwdTileD128CacheKv8 = converted_on_cache(128, 2, 2);
inline constexpr FwdConfig kFwdTileD192x128CacheKv8 = converted_on_cache(64, 3, 2);
inline constexpr FwdConfig kFwdTileD256CacheKv8 = converted_on_cache(64, 2, 1);

// On a cache, for more queries than a warpgroup takes: two share the keys. 16 + 96 + 96 = 208 KiB,
// 32 + 96 + 96 = 224 KiB, 48 + 96 + 64 = 208 KiB. At head dim 256 a second one has no registers for
// O.
constexpr FwdConfig long_on_cache(FwdConfig tile) {
  tile.consumer_warpgroups = 2;
  tile.q_stages = 1;
  return tile;
}

inline constexpr FwdConfig kFwdTileD64CacheLong = long_on_cache(kFwdTileD64Cache);
inline constexpr FwdConfig kFwdTileD128CacheLong = long_on_cache(kFwdTileD128Cache);
inline constexpr FwdConfig kFwdTileD192x128CacheLong = long_on_cache(kFwdTileD192x128Cache);

}  // namespace fa3
