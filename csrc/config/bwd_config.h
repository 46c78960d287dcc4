// The choices of a variant of the backward; the counterpart of config/fwd_config.h, with the same
// rules: a variant is a named struct with one constexpr value `k`, a tile of config/bwd_tiles.h
// with dtype and kind.
#pragma once

#include "config/dq_layout.h"
#include "config/shared_memory.h"
#include "config/slices.h"
#include "core/key_list.h"

namespace fa3 {

// What the consumer warpgroups split among themselves.
enum class BwdSplit : int {
  // Each has 64 keys of the tile, and computes all five GEMMs (backward/mma_by_keys.h).
  kKeys = 0,
  // All have the same 64 keys: one computes dV, one dK, one dQ (backward/mma_by_products.h), in a
  // cluster of two CTAs, which split the columns of dQ, or all columns.
  kProducts = 1
};

// Number of buffers through which warpgroups exchange data: dS, and P with BwdSplit::kProducts.
constexpr int kExchangeBuffers = 2;

struct BwdConfig {
  char const* name = "";
  Dtype dtype = Dtype::kBFloat16;
  KernelKind kind = {};
  BwdSplit split = BwdSplit::kKeys;
  int head_dim = 0;    // Q, K, dQ and dK
  int head_dim_v = 0;  // V, O, dO and dV
  int tile_m = 64;     // queries of a step
  int consumer_warpgroups = 2;
  int cluster_size = 1;
  int q_stages = 2;
  int dout_stages = 2;
  // Registers of a thread of each consumer warpgroup; 0: no such warpgroup.
  int registers[3] = {240, 240, 0};
  // With BwdSplit::kProducts: S and dP of the next step are issued before dV and dK of this one,
  // and overlap with P and dS. This takes 16 more registers.
  bool scores_first = false;

  constexpr bool by_keys() const { return split == BwdSplit::kKeys; }

  // CTAs of a cluster that split the columns of all tensors (backward/storage.h), and their
  // head dims.
  constexpr int column_ctas() const { return head_dim > 256 ? 2 : 1; }
  constexpr int cta_head_dim() const { return head_dim / column_ctas(); }
  constexpr int cta_head_dim_v() const { return head_dim_v / column_ctas(); }

  // Columns of a slice of K. By keys each warpgroup computes half of the columns of dQ: if those
  // are no slice of 64 or half of one, slices have 16.
  constexpr int key_slice() const {
    return by_keys() && head_dim % kSliceColumns != 0 ? kNarrowSliceColumns : kSliceColumns;
  }

  // A CTA's columns of K, with those that only fill a slice.
  constexpr int key_columns() const { return padded_columns(cta_head_dim(), key_slice()); }

  // Buffers of K: by keys, a CTA loads the next tile while it works on one.
  constexpr int key_buffers() const { return by_keys() ? 2 : 1; }

  // Keys of a copy of dK or dV to global memory: of a warpgroup, or of a warp.
  constexpr int store_rows() const { return by_keys() ? kWarpgroupRows : kWarpgroupRows / 4; }

  // At launch all threads have the same number.
  constexpr int registers_at_launch() const { return 65536 / threads() / 8 * 8; }

  // A thread of the other warpgroup has what the consumers leave.
  constexpr int producer_registers() const {
    return (consumer_warpgroups + 1) * registers_at_launch() - registers[0] - registers[1] -
           registers[2];
  }

  constexpr int threads() const { return (consumer_warpgroups + 1) * kWarpgroupThreads; }

  // Keys of a CTA, and of a cluster, whose CTAs visit the same steps.
  constexpr int cta_keys() const {
    return by_keys() ? consumer_warpgroups * kWarpgroupRows : kWarpgroupRows;
  }
  constexpr int tile_n() const { return cta_keys() * cluster_size / column_ctas(); }

  // Keys of a tile in the order of work: a mask has lists for tiles of 128.
  constexpr int order_keys() const { return kind.has_lists() ? kListedKeys : tile_n(); }

  // Columns of the other CTA's K that a CTA loads for its blocks of dQ. With an odd number of
  // blocks the CTAs alternate on the middle one.
  constexpr int other_columns() const {
    int const blocks = head_dim / kSliceColumns;
    return tile_n() == cta_keys() ? 0 : (blocks + 1) / 2 * kSliceColumns;
  }

  // With BwdSplit::kProducts: what a CTA receives from the other of its cluster. dS of neighbouring
  // keys and columns of their K, or S and dP of the other columns, in fp32.
  constexpr int received_bytes() const {
    int const scores = tile_m * cta_keys();
    return column_ctas() > 1 ? 2 * scores * 4
                             : kExchangeBuffers * scores * 2 + cta_keys() * other_columns() * 2;
  }

  // The blocks of dQ of a tile. Where the warpgroups split the keys each computes one: 64 rows if
  // the tile has 64 for each, otherwise a share of the columns.
  constexpr DqLayout dq_layout() const {
    if (!by_keys()) {
      return DqLayout{kSliceColumns, true};
    }
    bool const by_columns = tile_m == kWarpgroupRows;
    return DqLayout{by_columns ? key_columns() / consumer_warpgroups : head_dim, by_columns};
  }

  constexpr int dq_blocks() const {
    return by_keys() ? consumer_warpgroups : head_dim / dq_layout().columns;
  }

  // How many add to the dQ of a step, each always to the same part of a tile: a store warp for each
  // block, or each CTA of a cluster.
  constexpr int dq_adders() const { return by_keys() ? consumer_warpgroups : cluster_size; }

  // If a query sees at most this many keys, the first CTA to contribute to its dQ stores instead of
  // adding, so the accumulator needs no zeroing (backward/add_order.h). With more keys, waiting for
  // that CTA takes longer (H100, docs/journal/backward.md).
  constexpr int stored_keys() const { return by_keys() ? 4096 : 1024; }

  // By keys: the buffer through which a warpgroup's dQ, dV and dK leave.
  constexpr int staging_bytes() const {
    int const columns = max_of(padded_columns(head_dim), padded_columns(head_dim_v));
    return max_of(dq_layout().block_floats() * 4, kWarpgroupRows * columns * 2);
  }

  // fp32 columns of the accumulator of dQ, for each query.
  constexpr int dq_columns() const { return dq_blocks() * dq_layout().block_floats() / tile_m; }

  // Small data: LSE and delta of the rows of Q and dO, limits of keys under an interval mask, tiles
  // and barriers. backward/storage.h asserts that its members have these sizes.
  constexpr SharedMemory shared_memory() const {
    int const all_stages = q_stages + dout_stages;
    int const row_bytes = all_stages * tile_m * 4;
    int const work_bytes = (by_keys() ? 4 * 68 + 8 * 16 : 76) + 96;  // aligned
    int const limit_bytes = kind.mask == MaskKind::kInterval ? cta_keys() * 8 : 0;
    int const barriers =
        key_buffers() + 1 + 2 * all_stages +
        (by_keys() ? 2 * consumer_warpgroups + key_buffers() + 1 + 8 : 8 * kExchangeBuffers + 1);
    int const score_bytes = tile_m * cta_keys() * 2;
    return SharedMemory{}
        .add("K", key_buffers(), cta_keys() * key_columns() * 2)
        .add("V", 1, cta_keys() * padded_columns(cta_head_dim_v()) * 2)
        .add("Q", q_stages, tile_m * padded_columns(cta_head_dim()) * 2)
        .add("dO", dout_stages, tile_m * padded_columns(cta_head_dim_v()) * 2)
        .add("dS", kExchangeBuffers, score_bytes)
        .add("staged", by_keys() ? consumer_warpgroups : 0, staging_bytes())
        .add("exchanged", by_keys() ? 0 : 1, kExchangeBuffers * score_bytes + received_bytes())
        .add("small data", 1, round_up(row_bytes + work_bytes + limit_bytes + barriers * 8, 1024));
  }

  constexpr int shared_bytes() const { return shared_memory().total(); }
};

// The value of a variant. A choice that no kernel can run is an error of compilation.
constexpr BwdConfig bwd_variant(char const* name, BwdConfig tile, int const (&head_dims)[2],
                                Dtype dtype, KernelKind kind) {
  BwdConfig c = tile;
  c.name = name;
  c.head_dim = head_dims[0];
  c.head_dim_v = head_dims[1];
  c.dtype = dtype;
  c.kind = kind;
  DqLayout const dq = c.dq_layout();
  auto const require = [](bool holds, char const* what) {
    if (!holds) {
      throw what;
    }
  };
  require(c.head_dim % 16 == 0 && c.head_dim_v % 16 == 0, "a k-step of a product has 16 columns");
  require(c.tile_m == kWarpgroupRows || c.tile_m == c.cta_keys(),
          "dQ is split by columns or by rows");
  require(!dq.side_by_side || c.dq_blocks() == 1 || dq.columns % c.key_slice() == 0 ||
              2 * dq.columns == c.key_slice(),
          "a block of dQ has slices of K, or half of one");
  require(c.shared_bytes() <= kMaxSharedBytes, "the tile does not fit into shared memory");
  require(!(c.scores_first && kind.has_softcap()), "a softcap needs P where it was written");
  require(c.column_ctas() == 1 || (!c.by_keys() && c.column_ctas() == c.cluster_size),
          "the CTAs of a cluster split the columns of the products");
  return c;
}

}  // namespace fa3
