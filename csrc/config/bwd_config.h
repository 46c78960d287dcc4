// What a variant of the backward may choose; the counterpart of config/fwd_config.h, with the same
// rules. A variant is a tile of config/bwd_tiles.h plus dtype and mask.
#pragma once

#include "config/fwd_config.h"
#include "core/dq_layout.h"

namespace fa3 {

constexpr int kWarpgroupWarps = kWarpgroupThreads / 32;

// What the consumer warpgroups share out among them.
enum class BwdSplit : int {
  kKeys = 0,     // each has 64 keys of the tile, and computes all five products (backward/mma.h)
  kProducts = 1  // all have the same 64 keys: one makes dV, one dK, one dQ (mma_by_product.h)
};

struct BwdDefaults {
  static constexpr BwdSplit kSplit = BwdSplit::kKeys;
  static constexpr int kConsumerWarpgroups = 2;
  // Buffers of the ring of Q and of the ring of dO.
  static constexpr int kStages = 2;
  // Registers of a thread that has dK or dV among its accumulators.
  static constexpr int kRegisters = 240;
  static constexpr int kProducerRegisters = 24;
  // With BwdSplit::kProducts: columns of a block of dQ, and registers of the warpgroup that makes it.
  static constexpr int kDqColumns = 0;
  static constexpr int kDqRegisters = 0;
};

struct BwdByProducts : BwdDefaults {
  static constexpr BwdSplit kSplit = BwdSplit::kProducts;
  static constexpr int kConsumerWarpgroups = 3;
  static constexpr int kTileM = 64;
};

// Buffers of what one warpgroup writes while another reads: dS, and P with BwdSplit::kProducts.
constexpr int kExchangeBuffers = 2;

template <class Config>
constexpr int bwd_threads() {
  return (Config::kConsumerWarpgroups + 1) * kWarpgroupThreads;
}

template <class Config>
constexpr int bwd_tile_n() {
  return Config::kSplit == BwdSplit::kKeys ? Config::kConsumerWarpgroups * kWarpgroupRows
                                           : kWarpgroupRows;
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

// fp32 columns of the accumulator of dQ, for each query.
template <class Config>
constexpr int bwd_dq_columns() {
  return bwd_dq_blocks<Config>() * bwd_dq_layout<Config>().block_floats() / Config::kTileM;
}

// Shared memory of a variant: K, V, the rings of Q and dO with LSE and delta of their rows, dS, the
// staged dQ or P, the mbarriers. backward/launch.h asserts that the kernel's struct fits.
template <class Config>
constexpr int bwd_shared_bytes() {
  bool const by_keys = Config::kSplit == BwdSplit::kKeys;
  int const columns = padded_columns(Config::kHeadDim);
  int const tile_n = bwd_tile_n<Config>();
  int const key_bytes = 2 * tile_n * columns * 2;
  int const query_bytes = Config::kStages * 2 * Config::kTileM * columns * 2;
  int const ds_bytes = kExchangeBuffers * Config::kTileM * tile_n * 2;
  int const dq_bytes = Config::kTileM * bwd_dq_columns<Config>() * 4;
  int const row_bytes = Config::kStages * 2 * Config::kTileM * 4;
  int const work_bytes = 32;
  int const barriers =
      2 + 4 * Config::kStages + (by_keys ? 2 * Config::kConsumerWarpgroups : 4 * kExchangeBuffers);
  return key_bytes + query_bytes + ds_bytes + (by_keys ? dq_bytes : ds_bytes) +
         (row_bytes + work_bytes + barriers * 8 + 1023) / 1024 * 1024;
}

// A variant's constants as values, for the planner.
struct BwdVariantFacts {
  char const* name;
  Dtype dtype;
  MaskKind mask;
  int head_dim;
  int tile_m;
  int tile_n;
  int consumer_warpgroups;
  int stages;
  int threads;
  int dq_columns;
  int producer_registers;
  int consumer_registers;  // with dK or dV among the accumulators
  int dq_registers;        // of a warpgroup that only makes dQ; 0: there is none
  int shared_bytes;
};

template <class Config>
constexpr BwdVariantFacts bwd_facts(char const* name) {
  constexpr DqLayout kDq = bwd_dq_layout<Config>();
  static_assert(Config::kHeadDim % 16 == 0, "a k-step of a product has 16 columns");
  static_assert(Config::kTileM == kWarpgroupRows || Config::kTileM == bwd_tile_n<Config>(),
                "dQ is shared out by columns or by rows");
  static_assert(
      !kDq.side_by_side || bwd_dq_blocks<Config>() == 1 || kDq.columns % kSliceColumns == 0,
      "a block of dQ's columns begins with a slice of K");
  static_assert(bwd_shared_bytes<Config>() <= kMaxSharedBytes,
                "the tile does not fit into shared memory");
  return BwdVariantFacts{name,
                         Config::kDtype,
                         Config::kMask,
                         Config::kHeadDim,
                         Config::kTileM,
                         bwd_tile_n<Config>(),
                         Config::kConsumerWarpgroups,
                         Config::kStages,
                         bwd_threads<Config>(),
                         bwd_dq_columns<Config>(),
                         Config::kProducerRegisters,
                         Config::kRegisters,
                         Config::kDqRegisters,
                         bwd_shared_bytes<Config>()};
}

}  // namespace fa3
