// The tiles of the backward kernel: queries of a step x keys of a CTA. Shared memory: K, by keys
// twice, and V + rings of Q and dO + two dS + the data that consumers exchange or that leave, in
// KiB (227 KiB for one CTA). Variants add the head dims.
#pragma once

#include "config/bwd_config.h"

namespace fa3 {

// 48 + 64 + 64 + 32 = 208 KiB. S and dP take 64 registers each, dK and dV 32.
inline constexpr BwdConfig kBwdTileD64{.tile_m = 128};

// 80 + 80 + 32 + 32 = 224 KiB. As D128; a block of dQ has 48 columns.
inline constexpr BwdConfig kBwdTileD96{.q_stages = 3};

// 96 + 64 + 32 + 32 = 224 KiB. S and dP take 32 registers each, dK and dV 64.
inline constexpr BwdConfig kBwdTileD128{};

// 48 + 96 + 16 + 48 = 208 KiB. dK and dV take 96 registers each, a third of dQ 32.
inline constexpr BwdConfig kBwdTileD192{.split = BwdSplit::kProducts,
                                        .consumer_warpgroups = 3,
                                        .cluster_size = 2,
                                        .registers = {184, 184, 120}};

// 64 + 96 + 16 + 48 = 224 KiB. dK and dV take 128 registers each, a quarter of dQ 32. For head dim
// 512 two CTAs split the columns.
inline constexpr BwdConfig kBwdTileD256{.split = BwdSplit::kProducts,
                                        .consumer_warpgroups = 3,
                                        .cluster_size = 2,
                                        .dout_stages = 1,
                                        .registers = {208, 216, 64}};

// As D128; dK or dV takes fewer registers. 64x128 and 96x64: 64 + 72 + 32 + 32 = 200 KiB; 128x64:
// 80 + 72 + 32 + 32 = 216 KiB.
inline constexpr BwdConfig kBwdTileD128Narrow{.q_stages = 3, .dout_stages = 3};

// Tiles named by the head dim of Q and K x that of V.

// 40 + 128 + 16 + 40 = 224 KiB. dV takes 128 registers, dK 32, dQ 32: a CTA of a cluster computes
// dQ at every other step.
inline constexpr BwdConfig kBwdTileD64x256{.split = BwdSplit::kProducts,
                                           .consumer_warpgroups = 3,
                                           .cluster_size = 2,
                                           .q_stages = 3,
                                           .dout_stages = 3,
                                           .registers = {216, 160, 112},
                                           .scores_first = true};

// 40 + 120 + 16 + 48 = 224 KiB. dV takes 64 registers, dK 96, a third of dQ 32.
inline constexpr BwdConfig kBwdTileD192x128{.split = BwdSplit::kProducts,
                                            .consumer_warpgroups = 3,
                                            .cluster_size = 2,
                                            .q_stages = 3,
                                            .dout_stages = 3,
                                            .registers = {184, 184, 120},
                                            .scores_first = true};

}  // namespace fa3
