// The tiles of the 16-bit forward kernels. A variant adds head dims, dtype and kind. Sums in the
// comments are shared memory in KiB: Q ring + K ring + V ring (227 KiB for one CTA).
//
// Up to head dim 128 there are a long tile and a short one: in the long one three warpgroups share
// each K and V tile, which saves power and fills the gaps of one another's softmax, but 192 rows
// fit short sequences and the diagonal worse.
//
// TFLOP/s of a tile / of the one that it was compared with, at a sequence length; 16k tokens, heads
// * head dim = 2048, bf16, H200, 2026-11-21, each pair from one interleaved run:
//
//   tile        compared with         full                            causal
//   D64         128 x 128, ping-pong  512: 398/392, 16k: 558/455
//   D64Short    D64                                                   512: 275/225, 2k: 427/408,
//                                                                     16k: 477/549
//   D128        D128Short             512: 531/603, 2k: 724/704,      512: 311/343, 2k: 563/617,
//                                     16k: 756/684                    8k: 683/683
//   D96         D96Short              512: 436/494, 4k: 666/592,      512: 260/301, 4k: 588/573,
//                                     16k: 661/565                    16k: 654/561
//   D96 (112)   D112Short             512: 446/536, 4k: 672/603,      512: 267/320, 4k: 557/575,
//                                     16k: 691/598                    16k: 654/627
//   D192        128 x 112, one Q      512: 561/533, 4k: 742/718,      512: 333/290, 4k: 692/657,
//                                     16k: 748/755                    16k: 739/742
//   D256Short   D256                  512: 569/549, 1k: 659/685       512: 330/306, 1k: 508/499,
//                                                                     4k: 682/722
#pragma once

#include "config/fwd_config.h"

namespace fa3 {

// 48 + 32 + 32 = 112. Also for head dims 32 and 48, (96, 64) and (128, 64), whose GEMMs skip the
// steps that pad a slice; 192 x 96 with Q in registers has 0.92 to 0.98 times its speed.
inline constexpr FwdConfig kFwdTileD64{.consumer_warpgroups = 3,
                                       .tile_n = 128,
                                       .q_stages = 2,
                                       .overlap = {.ping_pong = false, .tiles = true},
                                       .measured = {.fixed_keys = 80},
                                       .tuning = {.maxima_first = true}};

// 32 + 32 + 32 = 96. Only for causal problems.
inline constexpr FwdConfig kFwdTileD64Short{.tile_n = 128,
                                            .q_stages = 2,
                                            .overlap = {.tiles = true},
                                            .measured = {.relative_speed = 86, .fixed_keys = 40}};

// 96 + 60 + 60 = 216. For full attention, and for (64, 128); two stages are 1 % slower, 192 x 64 is
// 2 to 8 % slower, and 192 x 96 does not fit into the registers.
inline constexpr FwdConfig kFwdTileD128{.consumer_warpgroups = 3,
                                        .tile_n = 80,
                                        .stages = 3,
                                        .q_stages = 2,
                                        .overlap = {.ping_pong = false, .tiles = true},
                                        .measured = {.fixed_keys = 300}};

// 96 + 64 + 64 = 224. With two Q stages causal problems are 1 to 2 % slower up to 1k keys. With
// late_wait they are 1 to 3 % faster from 2k keys on (H100, 2026-11-26); other tiles would lose 0
// to 3 %.
inline constexpr FwdConfig kFwdTileD128Short{.tile_n = 128,
                                             .q_stages = 3,
                                             .overlap = {.tiles = true},
                                             .measured = {.relative_speed = 95, .fixed_keys = 300},
                                             .tuning = {.late_wait = true}};

// 96 + 60 + 60 = 216. O takes 96 registers. Also for head dims 144 to 176.
inline constexpr FwdConfig kFwdTileD192{.tile_n = 80, .q_stages = 2, .overlap = {.tiles = true}};

// 64 + 64 + 64 = 192. O takes 128 registers, S 32; 128 x 80 is 1 to 2 % slower. Also for head dims
// 208 to 240, and for those above 256, of which each of two CTAs has 256 columns, with 32 for S of
// the other CTA.
inline constexpr FwdConfig kFwdTileD256{.tile_n = 64, .measured = {.fixed_keys = 200}};

// 128 + 48 + 48 = 224, which holds the next tile's Q.
inline constexpr FwdConfig kFwdTileD256Short{.tile_n = 48,
                                             .q_stages = 2,
                                             .overlap = {.tiles = true},
                                             .measured = {.relative_speed = 91, .fixed_keys = 100}};

// 96 + 48 + 48 = 192. Also for head dims 80 and 112; 192 x 80 is 3 to 5 % slower.
inline constexpr FwdConfig kFwdTileD96 = [] {
  FwdConfig tile = kFwdTileD128;
  tile.tile_n = 96;
  tile.stages = 2;
  tile.measured.fixed_keys = 380;
  return tile;
}();

// Also for head dim 80.
inline constexpr FwdConfig kFwdTileD96Short = [] {
  FwdConfig tile = kFwdTileD128Short;
  tile.measured.relative_speed = 86;
  return tile;
}();

inline constexpr FwdConfig kFwdTileD112Short = [] {
  FwdConfig tile = kFwdTileD128Short;
  tile.measured.relative_speed = 90;
  return tile;
}();

// Tiles whose V has another head dim than Q and K.

// 96 + 72 + 48 = 216.
inline constexpr FwdConfig kFwdTileD192x128 = [] {
  FwdConfig tile = kFwdTileD192;
  tile.tile_n = 96;
  return tile;
}();

// 128 + 16 + 64 = 208. O needs buffers of four times the size of Q.
inline constexpr FwdConfig kFwdTileD64x256 = [] {
  FwdConfig tile = kFwdTileD256Short;
  tile.tile_n = 64;
  return tile;
}();

// One warpgroup, for problems that have fewer tiles of two or three warpgroups than the GPU has
// multiprocessors. A K tile has as many keys as in the larger tile, so that the results have the
// same bits. 24 + 32 + 32 = 88 up to 48 + 64 + 64 = 176. Batch 1, 8 heads, 1k keys, full: D64 8.7
// us instead of 16.4, D128 11.7 instead of 14.2, D256 17.4 instead of 23.3.
constexpr FwdConfig one_warpgroup(FwdConfig tile, int relative_speed) {
  tile.consumer_warpgroups = 1;
  tile.overlap.ping_pong = false;
  tile.tuning.late_wait = false;
  tile.measured.relative_speed = relative_speed;
  return tile;
}

// O of a tile is stored through the buffer of its Q. With two buffers the Q after the next one is
// loaded once O is stored, with three while O is being stored. Batch 8192, 64 keys, full, D128:
// 2029 us instead of 2380 (2026-11-22).
constexpr FwdConfig three_queries(FwdConfig tile) {
  tile.q_stages = 3;
  return tile;
}

inline constexpr FwdConfig kFwdTileD64Small = three_queries(one_warpgroup(kFwdTileD64, 65));
inline constexpr FwdConfig kFwdTileD128Small = three_queries(one_warpgroup(kFwdTileD128, 59));
inline constexpr FwdConfig kFwdTileD128ShortSmall = one_warpgroup(kFwdTileD128Short, 60);
inline constexpr FwdConfig kFwdTileD256Small = one_warpgroup(kFwdTileD256, 63);
inline constexpr FwdConfig kFwdTileD256ShortSmall = one_warpgroup(kFwdTileD256Short, 57);

// Two CTAs per multiprocessor, for packed sequences of up to 64 rows, whose tiles mostly wait. The
// planner takes these tiles up to 64 rows, whatever the number of keys: even at 4096 keys they are
// within 1 % of one CTA with tiles of 64 x 128.
constexpr FwdConfig two_ctas(FwdConfig tile, int fixed_keys) {
  tile.tile_n = 64;
  tile.measured.ctas_per_sm = 2;
  tile.measured.relative_speed = 60;
  tile.measured.fixed_keys = fixed_keys;
  return tile;
}

// 24 + 16 + 16 = 56. 8192 sequences of 1 to 64 rows take 1732 us, with 64 x 128 3534 us
// (2026-11-22).
inline constexpr FwdConfig kFwdTileD64Tiny = two_ctas(kFwdTileD64Small, 60);

// 48 + 32 + 32 = 112, just half of what a multiprocessor has. 8192 sequences of 1 to 64 rows take
// 1343 us, with one CTA 2148 us (2026-11-22).
inline constexpr FwdConfig kFwdTileD128Tiny = two_ctas(kFwdTileD128ShortSmall, 240);

// With lists of blocks of 64 x 64. 16 + 24 + 24 = 64 and 32 + 32 + 32 = 96.
constexpr FwdConfig of_blocks(FwdConfig tile, int stages) {
  tile.stages = stages;
  tile.q_stages = 2;
  return tile;
}
inline constexpr FwdConfig kFwdTileD64Block = of_blocks(kFwdTileD64Tiny, 3);
inline constexpr FwdConfig kFwdTileD128Block = of_blocks(kFwdTileD128Tiny, 2);

// On a cache the bytes in flight decide the speed; the producer warp also computes the line of
// work. Replays of a CUDA graph (H200, 2026-11-25), in us for kFwdTileD128Cache, for two CTAs with
// 64 keys and 3 stages each, and for one CTA with 64 keys and 6 stages:
//
//   batch 1, 1k keys     9.4    9.7    8.6
//   batch 1, 16k keys   24.2   28.0   23.7
//   batch 64, 4k keys  266    284    268
//   16 queries          71.7           87.7
constexpr FwdConfig on_cache(int tile_n, int stages, int q_stages) {
  return FwdConfig{.consumer_warpgroups = 1,
                   .tile_n = tile_n,
                   .stages = stages,
                   .q_stages = q_stages,
                   .overlap = {.ping_pong = false},
                   .tuning = {.producer = ProducerSize::kWide}};
}

// 16 + 96 + 96 = 208, 32 + 96 + 96 = 224, 48 + 96 + 64 = 208, 32 + 96 + 96 = 224.
inline constexpr FwdConfig kFwdTileD64Cache = on_cache(128, 6, 2);
inline constexpr FwdConfig kFwdTileD128Cache = on_cache(128, 3, 2);
inline constexpr FwdConfig kFwdTileD192x128Cache = on_cache(128, 2, 2);
inline constexpr FwdConfig kFwdTileD256Cache = on_cache(64, 3, 1);

// 32 + 64 + 64 + 16 for S of the other CTA = 176; with a cache of e4m3 32 + 48 + 48 + 36 + 36 + 12
// = 212.
inline constexpr FwdConfig kFwdTileD512Cache = on_cache(64, 2, 1);

// On a cache, up to 64 rows of a KV head, gathered row by row (csrc/decode). Rings of Q, then of K
// and V, for D64; D96 and D128; D192x128; D256: 16 + 160 KiB, 32 + 160, 48 + 128, 64 + 128; and 16
// KiB for P. 64 x 4k: 268 us / 250, pages of one token 386 / 256 (kFwdTileD128Cache / these; H200,
// 2026-11-27).
constexpr FwdConfig decode_tile(int stages) {
  return FwdConfig{.consumer_warpgroups = 1,
                   .tile_n = 128,
                   .stages = stages,
                   .q_stages = 2,
                   .overlap = {.ping_pong = false},
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
  return tile;
}

inline constexpr FwdConfig kFwdTileD64DecodeKv8 = converted_decode_tile(14);
inline constexpr FwdConfig kFwdTileD96DecodeKv8 = converted_decode_tile(9);
inline constexpr FwdConfig kFwdTileD128DecodeKv8 = converted_decode_tile(9);
inline constexpr FwdConfig kFwdTileD192x128DecodeKv8 = converted_decode_tile(8);
inline constexpr FwdConfig kFwdTileD256DecodeKv8 = converted_decode_tile(8);

// Absorbed MLA (csrc/mla): 96 + 64 + 24 KiB of keys, 40 KiB of Q.
inline constexpr FwdConfig kFwdTileLatent{.consumer_warpgroups = 1,
                                          .tile_n = 64,
                                          .stages = 3,
                                          .q_stages = 1,
                                          .overlap = {.ping_pong = false}};

// Up to 16 rows of a latent cache (csrc/decode): 168 KiB of keys, 18 KiB of Q.
inline constexpr FwdConfig kFwdTileLatentDecode = [] {
  FwdConfig tile = decode_tile(7);
  tile.tile_n = 64;
  tile.q_stages = 1;
  return tile;
}();

// With latent columns of e4m3: 144 KiB of keys, 40 KiB of them as loaded, 18 KiB of Q.
inline constexpr FwdConfig kFwdTileLatentDecodeKv8 = [] {
  FwdConfig tile = kFwdTileLatentDecode;
  tile.stages = 6;
  tile.values = ValuesKind::kConverted;
  return tile;
}();

// With latent columns of e4m3: 64 + 64 + 16 KiB of keys, 32 KiB of them as loaded, 40 KiB of Q.
inline constexpr FwdConfig kFwdTileLatentKv8 = [] {
  FwdConfig tile = kFwdTileLatent;
  tile.stages = 2;
  tile.raw.stages = 2;
  tile.values = ValuesKind::kConverted;
  return tile;
}();

// A cache of e4m3 under 16-bit queries: one warpgroup converts K and V. KiB of the rings for Q,
// converted K, converted V, loaded K and loaded V: D64 16 + 32 + 32 + 32 + 32 = 144, D128 32 + 64 +
// 64 + 32 + 32 = 224, (192, 128) 48 + 48 + 32 + 36 + 24 = 188, D256 32 + 64 + 64 + 32 + 32 = 224.
constexpr FwdConfig converted_on_cache(int tile_n, int raw_stages, int q_stages) {
  FwdConfig tile = on_cache(tile_n, 2, q_stages);
  tile.values = ValuesKind::kConverted;
  tile.raw.stages = raw_stages;
  return tile;
}

inline constexpr FwdConfig kFwdTileD64CacheKv8 = converted_on_cache(128, 4, 2);
inline constexpr FwdConfig kFwdTileD128CacheKv8 = converted_on_cache(128, 2, 2);
inline constexpr FwdConfig kFwdTileD192x128CacheKv8 = converted_on_cache(64, 3, 2);
inline constexpr FwdConfig kFwdTileD256CacheKv8 = converted_on_cache(64, 2, 1);
inline constexpr FwdConfig kFwdTileD512CacheKv8 = converted_on_cache(48, 3, 1);

// On a cache, for more queries than a warpgroup takes: two warpgroups share the keys. 16 + 96 + 96
// = 208, 32 + 96 + 96 = 224, 48 + 96 + 64 = 208. At head dim 256 a second one has no registers for
// O. Ping-pong and late_wait, 32 / 8 heads, D128, before / after: 4096 queries and keys 320 / 272
// us, 512 queries and 16k keys 226 / 219, 2 x 128 and 32k 265 / 237 (H200, 2026-11-29).
constexpr FwdConfig long_on_cache(FwdConfig tile) {
  tile.consumer_warpgroups = 2;
  tile.q_stages = 1;
  tile.overlap.ping_pong = true;
  tile.tuning.late_wait = true;
  return tile;
}

inline constexpr FwdConfig kFwdTileD64CacheLong = long_on_cache(kFwdTileD64Cache);
inline constexpr FwdConfig kFwdTileD128CacheLong = long_on_cache(kFwdTileD128Cache);
inline constexpr FwdConfig kFwdTileD192x128CacheLong = long_on_cache(kFwdTileD192x128Cache);

// With split_size, without a cache.
constexpr FwdConfig folded(FwdConfig tile) {
  tile.output = OutputKind::kFolded;
  return tile;
}

inline constexpr FwdConfig kFwdTileD64Folded = folded(kFwdTileD64);
inline constexpr FwdConfig kFwdTileD128Folded = folded(kFwdTileD128Short);
inline constexpr FwdConfig kFwdTileD256Folded = folded(kFwdTileD256);

// 48 + 96 + 64 = 208.
inline constexpr FwdConfig kFwdTileD192x128Folded = [] {
  FwdConfig tile = folded(kFwdTileD128Short);
  tile.q_stages = 1;
  tile.overlap.tiles = false;
  return tile;
}();

}  // namespace fa3
