// What a variant of the backward may choose; the counterpart of config/fwd_config.h, with the same
// rules. A variant is a tile of config/bwd_tiles.h plus dtype and mask.
#pragma once

#include "config/fwd_config.h"
#include "core/dq_layout.h"

namespace fa3 {

struct BwdDefaults {
  // Consumer warpgroups, of 64 keys each.
  static constexpr int kConsumerWarpgroups = 2;
  // Buffers of the ring of Q and of the ring of dO.
  static constexpr int kStages = 2;
};

// Buffers of dS: one is written while the other is read (backward/README.md).
constexpr int kDsBuffers = 2;

template <class Config>
constexpr int bwd_threads() {
  return (Config::kConsumerWarpgroups + 1) * kWarpgroupThreads;
}

template <class Config>
constexpr int bwd_consumer_registers() {
  return Config::kConsumerWarpgroups == 2 ? 240 : 160;
}

template <class Config>
constexpr int bwd_producer_registers() {
  return Config::kConsumerWarpgroups == 2 ? 24 : 32;
}

// Keys of a tile: every consumer warpgroup has the scores of 64.
template <class Config>
constexpr int bwd_tile_n() {
  return Config::kConsumerWarpgroups * kWarpgroupRows;
}

// dQ of a tile is shared out among the warpgroups: by rows where there are enough, else by columns.
template <class Config>
constexpr DqLayout bwd_dq_layout() {
  bool const by_columns = Config::kTileM == kWarpgroupRows;
  int const columns =
      by_columns ? Config::kHeadDim / Config::kConsumerWarpgroups : Config::kHeadDim;
  return DqLayout{columns, by_columns};
}

// Shared memory of a variant: K, V, the rings of Q and dO with LSE and delta of their rows, dS, the
// staged dQ, the mbarriers. backward/storage.h asserts that this is what the kernel's struct takes.
template <class Config>
constexpr int bwd_shared_bytes() {
  int const columns = padded_columns(Config::kHeadDim);
  int const tile_n = bwd_tile_n<Config>();
  int const key_bytes = 2 * tile_n * columns * 2;
  int const query_bytes = Config::kStages * 2 * Config::kTileM * columns * 2;
  int const ds_bytes = kDsBuffers * Config::kTileM * tile_n * 2;
  int const dq_bytes = Config::kTileM * Config::kHeadDim * 4;
  int const row_bytes = Config::kStages * 2 * Config::kTileM * 4;
  int const work_bytes = 32;
  int const barriers = 2 + 4 * Config::kStages + 2 * Config::kConsumerWarpgroups;
  return key_bytes + query_bytes + ds_bytes + dq_bytes +
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
  int producer_registers;
  int consumer_registers;
  int shared_bytes;
};

template <class Config>
constexpr BwdVariantFacts bwd_facts(char const* name) {
  static_assert(Config::kHeadDim % kSliceColumns == 0, "the products read whole slices");
  static_assert(Config::kTileM == kWarpgroupRows || Config::kTileM == bwd_tile_n<Config>(),
                "dQ is shared out by columns or by rows");
  static_assert(bwd_dq_layout<Config>().columns % kSliceColumns == 0,
                "a share of dQ's columns begins with a slice of K");
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
                         bwd_producer_registers<Config>(),
                         bwd_consumer_registers<Config>(),
                         bwd_shared_bytes<Config>()};
}

}  // namespace fa3
