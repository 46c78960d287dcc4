// What a variant of the backward may choose; the counterpart of config/fwd_config.h, with the same
// rules. A variant is a tile of config/bwd_tiles.h plus dtype and mask.
#pragma once

#include "config/fwd_config.h"
#include "core/dq_layout.h"

namespace fa3 {

constexpr int kWarpgroupWarps = kWarpgroupThreads / 32;

// What the consumer warpgroups share out among them.
enum class BwdSplit : int {
  // Each has 64 keys of the tile, and computes all five products (backward/mma_by_keys.h).
  kKeys = 0,
  // All have the same 64 keys: one makes dV, one dK, one dQ (backward/mma_by_products.h), in a
  // cluster of two CTAs, which share out the columns of dQ.
  kProducts = 1
};

struct BwdDefaults {
  static constexpr BwdSplit kSplit = BwdSplit::kKeys;
  static constexpr int kConsumerWarpgroups = 2;
  static constexpr int kClusterSize = 1;
  // Buffers of the rings of Q and of dO.
  static constexpr int kQStages = 2;
  static constexpr int kDoutStages = 2;
  // Of a thread, of each consumer warpgroup.
  static constexpr int kRegisters[] = {240, 240, 0};
  static constexpr int kProducerRegisters = 24;
  // With BwdSplit::kProducts: columns of a block of dQ; and whether S and dP of the next step come
  // before dV and dK of this one, and P and dS are worked out beside those: 16 registers more.
  static constexpr int kDqColumns = 0;
  static constexpr bool kScoresFirst = false;
};

struct BwdByProducts : BwdDefaults {
  static constexpr BwdSplit kSplit = BwdSplit::kProducts;
  static constexpr int kConsumerWarpgroups = 3;
  static constexpr int kClusterSize = 2;
  static constexpr int kTileM = 64;
  static constexpr int kDqColumns = 64;
};

// Buffers of what one warpgroup writes while another reads: dS, and P with BwdSplit::kProducts.
constexpr int kExchangeBuffers = 2;

template <class Config>
constexpr int bwd_threads() {
  return (Config::kConsumerWarpgroups + 1) * kWarpgroupThreads;
}

// Keys of a CTA.
template <class Config>
constexpr int bwd_tile_n() {
  return Config::kSplit == BwdSplit::kKeys ? Config::kConsumerWarpgroups * kWarpgroupRows
                                           : kWarpgroupRows;
}

// Keys that have their steps in common.
template <class Config>
constexpr int bwd_cluster_keys() {
  return bwd_tile_n<Config>() * Config::kClusterSize;
}

// Columns of K that a CTA has of the other one's keys: for its blocks of dQ. Of an odd number, the
// middle one goes from hand to hand.
template <class Config>
constexpr int bwd_other_columns() {
  int const blocks = Config::kHeadDim / kSliceColumns;
  return Config::kClusterSize == 1 ? 0 : (blocks + 1) / 2 * kSliceColumns;
}

// dQ of a tile in blocks. Where the warpgroups share the keys each computes one: 64 rows where the
// tile has as many for each, else a share of the columns.
template <class Config>
constexpr DqLayout bwd_dq_layout() {
  int const columns = padded_columns(Config::kHeadDim);
  if (Config::kSplit == BwdSplit::kProducts) {
    return DqLayout{Config::kDqColumns, true};
  }
  bool const by_columns = Config::kTileM == kWarpgroupRows;
  return DqLayout{by_columns ? columns / Config::kConsumerWarpgroups : Config::kHeadDim,
                  by_columns};
}

template <class Config>
constexpr int bwd_dq_blocks() {
  if (Config::kSplit == BwdSplit::kProducts) {
    return Config::kHeadDim / bwd_dq_layout<Config>().columns;
  }
  return Config::kConsumerWarpgroups;
}

// Those who add to the dQ of a step, each always to the same part of a tile: a store warp for each
// block, or each CTA of a cluster.
template <class Config>
constexpr int bwd_dq_adders() {
  return Config::kSplit == BwdSplit::kKeys ? Config::kConsumerWarpgroups : Config::kClusterSize;
}

// fp32 columns of the accumulator of dQ, for each query.
template <class Config>
constexpr int bwd_dq_columns() {
  return bwd_dq_blocks<Config>() * bwd_dq_layout<Config>().block_floats() / Config::kTileM;
}

// Shared memory of a variant: K, V, the rings of Q and dO with LSE and delta of their rows, dS,
// what the consumers hand on (the staged dQ; or P, dS and K of the other CTA), limits of keys under
// a general mask, the mbarriers.
// backward/launch.h asserts that the kernel's struct fits.
template <class Config>
constexpr int bwd_shared_bytes() {
  bool const by_keys = Config::kSplit == BwdSplit::kKeys;
  int const columns = padded_columns(Config::kHeadDim);
  int const columns_v = padded_columns(Config::kHeadDimV);
  int const tile_n = bwd_tile_n<Config>();
  int const key_bytes = tile_n * (columns + columns_v) * 2;
  int const stages = Config::kQStages + Config::kDoutStages;
  int const query_bytes =
      Config::kTileM * (Config::kQStages * columns + Config::kDoutStages * columns_v) * 2;
  int const ds_bytes = kExchangeBuffers * Config::kTileM * tile_n * 2;
  int const dq_bytes = Config::kTileM * bwd_dq_columns<Config>() * 4;
  int const products_bytes = 2 * ds_bytes + tile_n * bwd_other_columns<Config>() * 2;
  int const row_bytes = stages * Config::kTileM * 4;
  int const work_bytes = 64;
  int const limit_bytes = is_general(Config::kMask) ? tile_n * 8 : 0;
  int const barriers =
      2 + 2 * stages + (by_keys ? 2 * Config::kConsumerWarpgroups : 5 * kExchangeBuffers + 1);
  return key_bytes + query_bytes + ds_bytes + (by_keys ? dq_bytes : products_bytes) +
         (row_bytes + work_bytes + limit_bytes + barriers * 8 + 1023) / 1024 * 1024;
}

// A variant's constants as values, for the planner.
struct BwdVariantFacts {
  char const* name;
  Dtype dtype;
  MaskKind mask;
  int head_dim;    // of q and k
  int head_dim_v;  // of v
  int tile_m;
  int tile_n;  // of all CTAs of a cluster
  int cluster_size;
  int consumer_warpgroups;
  int q_stages;
  int dout_stages;
  int threads;
  int dq_columns;
  int dq_adders;
  int producer_registers;
  int consumer_registers[3];  // by warpgroup; 0: there is none
  int shared_bytes;
};

template <class Config>
constexpr BwdVariantFacts bwd_facts(char const* name) {
  constexpr DqLayout kDq = bwd_dq_layout<Config>();
  static_assert(Config::kHeadDim % 16 == 0 && Config::kHeadDimV % 16 == 0,
                "a k-step of a product has 16 columns");
  static_assert(Config::kTileM == kWarpgroupRows || Config::kTileM == bwd_tile_n<Config>(),
                "dQ is shared out by columns or by rows");
  static_assert(!kDq.side_by_side || bwd_dq_blocks<Config>() == 1 ||
                    kDq.columns % kSliceColumns == 0 || 2 * kDq.columns == kSliceColumns,
                "a block of dQ has slices of K, or half of one");
  static_assert(bwd_shared_bytes<Config>() <= kMaxSharedBytes,
                "the tile does not fit into shared memory");
  return BwdVariantFacts{name,
                         Config::kDtype,
                         Config::kMask,
                         Config::kHeadDim,
                         Config::kHeadDimV,
                         Config::kTileM,
                         bwd_cluster_keys<Config>(),
                         Config::kClusterSize,
                         Config::kConsumerWarpgroups,
                         Config::kQStages,
                         Config::kDoutStages,
                         bwd_threads<Config>(),
                         bwd_dq_columns<Config>(),
                         bwd_dq_adders<Config>(),
                         Config::kProducerRegisters,
                         {Config::kRegisters[0], Config::kRegisters[1], Config::kRegisters[2]},
                         bwd_shared_bytes<Config>()};
}

}  // namespace fa3
