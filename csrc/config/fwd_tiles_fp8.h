// The tiles of the forward kernels for e4m3. Shared memory: Q ring + K ring + V ring + V as loaded
// + O, in KiB.
//
// Speeds are TFLOP/s at 16k tokens, heads * head dim = 2048, full / causal, H200, 2026-11-22. At
// head dims 64 and 128 they were taken with a softmax without scales, which is 0 to 2 % faster than
// the present one.
#pragma once

#include "config/fwd_tiles.h"

namespace fa3 {

constexpr FwdConfig fp8_tile(FwdConfig tile) {
  tile.values = ValuesKind::kTransposed;
  tile.scales = ScalesKind::kBlocks;
  return tile;
}

// P ends at 448 = 2^8.8, and the largest P is scaled to 2^8. Rows with small sums use 0 instead
// (softmax_fp8.h).
constexpr float kFp8LazyLog2 = 0.8f;

// 24 + 24 + 24 + 24 + 24 = 120 KiB. S = 8k: 673 / 592, S = 512: 433 / 247; with two stages 662 /
// 585, 390 / 238. Every new maximum is adopted: 0.3 % slower than adopting only growth by 2^0.8;
// reading the sums first costs 1.3 % (2026-11-23).
inline constexpr FwdConfig kFwdTileFp8D64 = fp8_tile({.output = OutputKind::kStaged,
                                                      .consumer_warpgroups = 3,
                                                      .tile_n = 128,
                                                      .stages = 3,
                                                      .q_stages = 2,
                                                      .raw_stages = 3,
                                                      .producer = ProducerSize::kWide,
                                                      .ping_pong = false,
                                                      .tile_overlap = true,
                                                      .lazy_rescale_log2 = 0.f});

// 48 + 36 + 48 + 24 + 48 = 204 KiB: transposed, 96 keys of V take the space of 128. S = 8k: 946 /
// 937, S = 512: 564 / 354; with two stages 935 / 920, 521 / 337. 32 registers for the producer
// instead of 56 gain causal 2 % from 2k on, 32/8 heads 2 to 3 %, packed sequences and windows 1 %;
// full loses 0 to 1.6 % (H200, 2026-11-24). One k-step of Q in registers gains full 2 to 3 % from
// 2k to 16k, two lose 2 %, three spill; masked kernels are 0 to 8 % slower with it (H200,
// 2026-11-25).
inline constexpr FwdConfig kFwdTileFp8D128 = fp8_tile({.output = OutputKind::kStaged,
                                                       .consumer_warpgroups = 3,
                                                       .tile_n = 96,
                                                       .stages = 3,
                                                       .q_stages = 2,
                                                       .raw_stages = 2,
                                                       .ping_pong = false,
                                                       .tile_overlap = true,
                                                       .lazy_rescale_log2 = kFp8LazyLog2,
                                                       .query_steps = 1,
                                                       .fixed_keys = 240});

// 32 + 48 + 48 + 48 + 32 = 208 KiB. With two stages S = 8k: 862 / 874, S = 512: 620 / 359. With the
// scale warp sending O, S = 512: 664 / 390, S = 1k: 758 / 559; three stages are 0 to 2 % faster.
// Ping-pong, tried with another form of the softmax: 859 / 871 against 869 / 865 without, 617 / 375
// against 631 / 365.
inline constexpr FwdConfig kFwdTileFp8D128Short = fp8_tile({.output = OutputKind::kSent,
                                                            .tile_n = 128,
                                                            .stages = 3,
                                                            .q_stages = 2,
                                                            .raw_stages = 3,
                                                            .producer = ProducerSize::kWide,
                                                            .ping_pong = false,
                                                            .tile_overlap = true,
                                                            .lazy_rescale_log2 = kFp8LazyLog2,
                                                            .relative_speed = 89,
                                                            .fixed_keys = 215});

// 64 + 64 + 64 + 32 = 224 KiB, which leaves no space for O. Overlap in a warpgroup needs 64
// registers for S, 128 for O and 16 for P of the K tile before, so all that a narrow producer
// leaves. There is space for one V as loaded: its halves are loaded and transposed alternately,
// otherwise the copy of one waits for the transposition of the one before. S = 8k: 1235 / 1198, S =
// 512: 847 / 492; with neither overlap nor halves: 1049 / 1099, 752 / 462; with overlap of tiles
// too: 1208 / 1195, 825 / 482 (H200, 2026-11-24). General kernels with 96 keys and 56 registers for
// the producer, which spill nothing, take 1.4 to 1.5 times as long (packed sequences, windows; the
// same day).
inline constexpr FwdConfig kFwdTileFp8D256 = fp8_tile({.output = OutputKind::kRegisters,
                                                       .tile_n = 128,
                                                       .q_stages = 2,
                                                       .raw_stages = 1,
                                                       .raw_parts = 2,
                                                       .producer = ProducerSize::kNarrow,
                                                       .lazy_rescale_log2 = kFp8LazyLog2});

// (192, 128), the head dims of MLA: 64 + 64 + 32 + 32 + 32 = 224 KiB.
inline constexpr FwdConfig kFwdTileFp8D192x128 = fp8_tile({.output = OutputKind::kSent,
                                                           .tile_n = 128,
                                                           .q_stages = 2,
                                                           .raw_stages = 2,
                                                           .producer = ProducerSize::kWide,
                                                           .tile_overlap = true,
                                                           .lazy_rescale_log2 = kFp8LazyLog2});

// Adds sums of PV in fp32, in addition to those of the products.
constexpr FwdConfig promoted(FwdConfig tile, int shared_sums) {
  tile.sums = SumsKind::kPromoted;
  tile.shared_sums = shared_sums;
  tile.lazy_rescale_log2 = tile.is_skewed() ? 0.f : tile.lazy_rescale_log2;
  return tile;
}

// 120 KiB, and 48 KiB for all of the sums.
inline constexpr FwdConfig kFwdTileFp8D64Promote = promoted(kFwdTileFp8D64, 32);

// 32 + 48 + 48 + 32 + 32 = 192 KiB, and 32 KiB for half of the sums. All sums in registers, with a
// third stage of V as loaded, spill 72 bytes, and S = 8k takes 4 to 5 % longer; with a quarter in
// shared memory 10 % longer (H200, 2026-11-25).
inline constexpr FwdConfig kFwdTileFp8D128Promote = [] {
  FwdConfig tile = promoted(kFwdTileFp8D128Short, 32);
  tile.raw_stages = 2;
  return tile;
}();

// 64 + 64 + 32 + 32 = 192 KiB, and 32 KiB for half of the sums, so that O is stored from registers.
// With 96 keys, staged, S = 2k takes 4 to 5 % longer, 8k 1 %; without ping-pong 2k takes 1 to 2 %
// longer, 8k between 1 % less and 1 % more (H200, 2026-11-25).
inline constexpr FwdConfig kFwdTileFp8D192x128Promote = [] {
  FwdConfig tile = promoted(kFwdTileFp8D192x128, 32);
  tile.output = OutputKind::kRegisters;
  return tile;
}();

// The sums are in the registers of O, without overlap: the sum of a K tile is in those of S.
inline constexpr FwdConfig kFwdTileFp8D256Promote = [] {
  FwdConfig tile = kFwdTileFp8D256;
  tile.overlap = OverlapKind::kSerial;
  return promoted(tile, 0);
}();

// On a cache: all of the ring of V as loaded is in flight too.
constexpr FwdConfig fp8_on_cache(int tile_n, int stages, int q_stages) {
  FwdConfig tile = fp8_tile(on_cache(tile_n, stages, q_stages));
  tile.raw_stages = stages;
  tile.lazy_rescale_log2 = kFp8LazyLog2;
  return tile;
}

// 8 + 64 + 64 + 64 = 200 KiB, 16 + 64 + 64 + 64 = 208 KiB, 16 + 96 + 48 + 48 = 208 KiB, 32 + 48 +
// 48 + 48 = 176 KiB.
inline constexpr FwdConfig kFwdTileFp8D64Cache = fp8_on_cache(128, 8, 2);
inline constexpr FwdConfig kFwdTileFp8D128Cache = fp8_on_cache(128, 4, 2);
inline constexpr FwdConfig kFwdTileFp8D192x128Cache = fp8_on_cache(128, 3, 1);
inline constexpr FwdConfig kFwdTileFp8D256Cache = fp8_on_cache(64, 3, 2);

}  // namespace fa3
