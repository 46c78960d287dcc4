// The tiles of the forward kernels for e4m3. Sums in the comments are shared memory in KiB: Q ring
// + K ring + V ring + V as loaded + O.
//
// TFLOP/s, full / causal, at a sequence length; 16k tokens, heads * head dim = 2048, H200,
// 2026-11-22 (D256: 2026-11-24). The softmax of D64 and D128 had no scales then, which is 0 to 2 %
// faster.
//
//   tile        variant                            S = 512      S = 8k
//   D64         this one                           433 / 247    673 / 592
//               two stages                         390 / 238    662 / 585
//   D128        this one                           564 / 354    946 / 937
//               two stages                         521 / 337    935 / 920
//   D128Short   this one, two stages               620 / 359    862 / 874
//               O sent by the scale warp           664 / 390
//   D256        this one                           847 / 492   1235 / 1198
//               no overlap, no halves of V         752 / 462   1049 / 1099
//               overlap of tiles                   825 / 482   1208 / 1195
#pragma once

#include "config/fwd_tiles.h"

namespace fa3 {

constexpr FwdConfig fp8_tile(FwdConfig tile) {
  tile.values = ValuesKind::kTransposed;
  return tile;
}

// P ends at 448 = 2^8.8, and the largest P is scaled to 2^8. Rows with small sums use 0 instead
// (softmax_fp8.h).
constexpr float kFp8LazyLog2 = 0.8f;

// 24 + 24 + 24 + 24 + 24 = 120. Every new maximum is adopted, which is 0.3 % slower than adopting
// only growth by 2^0.8, where the sums would have to be read first for 1.3 % (2026-11-23).
inline constexpr FwdConfig kFwdTileFp8D64 =
    fp8_tile({.output = OutputKind::kStaged,
              .consumer_warpgroups = 3,
              .tile_n = 128,
              .stages = 3,
              .q_stages = 2,
              .overlap = {.ping_pong = false, .tiles = true},
              .raw = {.stages = 3},
              .measured = {.lazy_rescale_log2 = 0.f},
              .tuning = {.producer = ProducerSize::kWide}});

// 48 + 36 + 48 + 24 + 48 = 204, since 96 transposed keys of V take the space of 128. With 32
// registers for the producer instead of 56 causal problems gain 2 % from 2k on, and full ones lose
// 0 to 1.6 % (H200, 2026-11-24). One k-step of Q in registers gains full problems 2 to 3 % from 2k
// on; masked ones would lose 0 to 8 % (H200, 2026-11-25).
inline constexpr FwdConfig kFwdTileFp8D128 =
    fp8_tile({.output = OutputKind::kStaged,
              .consumer_warpgroups = 3,
              .tile_n = 96,
              .stages = 3,
              .q_stages = 2,
              .overlap = {.ping_pong = false, .tiles = true},
              .raw = {.stages = 2},
              .measured = {.lazy_rescale_log2 = kFp8LazyLog2, .fixed_keys = 240},
              .tuning = {.query_steps = 1}});

// 32 + 48 + 48 + 48 + 32 = 208. Three stages are 0 to 2 % faster than two; ping-pong gains nothing.
inline constexpr FwdConfig kFwdTileFp8D128Short = fp8_tile(
    {.output = OutputKind::kSent,
     .tile_n = 128,
     .stages = 3,
     .q_stages = 2,
     .overlap = {.ping_pong = false, .tiles = true},
     .raw = {.stages = 3},
     .measured = {.lazy_rescale_log2 = kFp8LazyLog2, .relative_speed = 89, .fixed_keys = 215},
     .tuning = {.producer = ProducerSize::kWide}});

// 64 + 64 + 64 + 32 = 224, which leaves no space for O. Overlap in a warpgroup needs 64 registers
// for S, 128 for O and 16 for P of the K tile before, which is all that a narrow producer leaves.
// There is space for one V as loaded, so its halves are loaded and transposed alternately;
// otherwise the copy of one would wait for the transposition of the one before. General kernels
// with 96 keys and 56 registers for the producer spill nothing, but take 1.4 to 1.5 times as long
// (H200, 2026-11-24).
inline constexpr FwdConfig kFwdTileFp8D256 =
    fp8_tile({.output = OutputKind::kRegisters,
              .tile_n = 128,
              .q_stages = 2,
              .raw = {.stages = 1, .parts = 2},
              .measured = {.lazy_rescale_log2 = kFp8LazyLog2},
              .tuning = {.producer = ProducerSize::kNarrow}});

// 64 + 64 + 32 + 32 + 32 = 224, for the head dims of MLA.
inline constexpr FwdConfig kFwdTileFp8D192x128 =
    fp8_tile({.output = OutputKind::kSent,
              .tile_n = 128,
              .q_stages = 2,
              .overlap = {.tiles = true},
              .raw = {.stages = 2},
              .measured = {.lazy_rescale_log2 = kFp8LazyLog2},
              .tuning = {.producer = ProducerSize::kWide}});

// Adds sums of PV in fp32, in addition to those of the GEMMs.
constexpr FwdConfig promoted(FwdConfig tile, int shared_sums) {
  tile.sums = SumsKind::kPromoted;
  tile.tuning.shared_sums = shared_sums;
  tile.measured.lazy_rescale_log2 = tile.is_skewed() ? 0.f : tile.measured.lazy_rescale_log2;
  return tile;
}

// 120, and 48 for all of the sums.
inline constexpr FwdConfig kFwdTileFp8D64Promote = promoted(kFwdTileFp8D64, 32);

// 32 + 48 + 48 + 32 + 32 = 192, and 32 for half of the sums. With all sums in registers and a third
// stage of V as loaded 8k keys take 4 to 5 % longer, with a quarter of them in shared memory 10 %
// (H200, 2026-11-25).
inline constexpr FwdConfig kFwdTileFp8D128Promote = [] {
  FwdConfig tile = promoted(kFwdTileFp8D128Short, 32);
  tile.raw.stages = 2;
  return tile;
}();

// 64 + 64 + 32 + 32 = 192, and 32 for half of the sums, so that O is stored from registers. With O
// staged and 96 keys, 2k keys take 4 to 5 % longer, 8k 1 %; without ping-pong 2k take 1 to 2 %
// longer (H200, 2026-11-25).
inline constexpr FwdConfig kFwdTileFp8D192x128Promote = [] {
  FwdConfig tile = promoted(kFwdTileFp8D192x128, 32);
  tile.output = OutputKind::kRegisters;
  return tile;
}();

// The sums are in the registers of O, without overlap: the sum of a K tile is in those of S.
inline constexpr FwdConfig kFwdTileFp8D256Promote = [] {
  FwdConfig tile = kFwdTileFp8D256;
  tile.overlap.kind = OverlapKind::kSerial;
  return promoted(tile, 0);
}();

// On a cache: all of the ring of V as loaded is in flight too.
constexpr FwdConfig fp8_on_cache(int tile_n, int stages, int q_stages) {
  FwdConfig tile = fp8_tile(on_cache(tile_n, stages, q_stages));
  tile.raw.stages = stages;
  tile.measured.lazy_rescale_log2 = kFp8LazyLog2;
  return tile;
}

// 8 + 64 + 64 + 64 = 200, 16 + 64 + 64 + 64 = 208, 16 + 96 + 48 + 48 = 208, 32 + 48 + 48 + 48 =
// 176.
inline constexpr FwdConfig kFwdTileFp8D64Cache = fp8_on_cache(128, 8, 2);
inline constexpr FwdConfig kFwdTileFp8D128Cache = fp8_on_cache(128, 4, 2);
inline constexpr FwdConfig kFwdTileFp8D192x128Cache = fp8_on_cache(128, 3, 1);
inline constexpr FwdConfig kFwdTileFp8D256Cache = fp8_on_cache(64, 3, 2);

}  // namespace fa3
