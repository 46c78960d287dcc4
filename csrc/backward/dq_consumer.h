// Warpgroup 2 where the consumers split the products (mma_by_products.h): dQ.
#pragma once

#include "backward/products.h"
#include "device/cluster.h"
#include "device/global_add.h"

namespace fa3 {

template <class Traits>
struct DqConsumer : BwdProducts<Traits> {
  using Base = BwdProducts<Traits>;
  using Exchange = BwdExchange<Traits>;
  using Base::Base, Base::p, Base::shared, Base::thread;

  CUTE_DEVICE void run() {
    int const rank = cluster_rank();
    shared.k_full[0].wait(0);
    shared.exchange.wait_for_keys();
    uint32_t count = 0;
    for (StepsOf<Traits> steps(shared.exchange.work); steps.valid(); steps.next(), ++count) {
      int const buffer = count % kExchangeBuffers;
      uint32_t const phase = count / kExchangeBuffers % 2;
      shared.exchange.ds_full[buffer].wait(phase);
      shared.exchange.wait_for_scores(buffer, phase);
      bool const is_first = is_first_to_add(buffer, phase);
      int const end = DqLayout::first_of(rank + 1, Traits::kDqBlocks, steps.m);
      CUTE_NO_UNROLL
      for (int block = DqLayout::first_of(rank, Traits::kDqBlocks, steps.m); block < end; ++block) {
        auto tQrDq = Base::dq_fragment();
        issue_dq(rank, buffer, block, tQrDq);
        wait_gemm<0>(tQrDq);
        add_block(steps.tile(p) * Traits::kDqBlocks + block, is_first, tQrDq);
      }
      Base::arrive_from_warps(shared.exchange.dq_added[buffer]);
      Base::arrive_from_warps(shared.exchange.ds_empty[buffer]);
      if (Exchange::kDsReaders > 1 && thread % 32 == 0) {
        shared.exchange.ds_empty[buffer].arrive(1 - rank);
      }
    }
    named_sync(NamedBarrier::kKeysRead, Traits::kWarpgroups * kWarpgroupThreads);
  }

 private:
  // Waits until this step may be added.
  CUTE_DEVICE bool is_first_to_add(int buffer, uint32_t phase) const {
    if (p.dq_is_zeroed) {
      return false;
    }
    shared.exchange.dq_turn[buffer].wait(phase);
    return shared.exchange.dq_is_first[buffer];
  }

  // A block of dQ, summed over the keys of the cluster.
  template <class Fragment>
  CUTE_DEVICE void issue_dq(int rank, int buffer, int block, Fragment& tQrDq) {
    constexpr DqLayout kDq = Traits::kDq;
    int const column = block * kDq.columns;
    // WHY: ptxas would keep the descriptors of dS in registers over all blocks.
    asm volatile("" : "+r"(buffer));
    if constexpr (Traits::kSplitsColumns) {
      Base::issue_dq_gemm(shared.ds[buffer], 0, shared.k[0], column - rank * Traits::kHeadDim,
                          tQrDq);
    } else {
      Base::issue_dq_gemm(shared.ds[buffer], 0, shared.k[0], column, tQrDq);
      Base::issue_dq_gemm(shared.exchange.ds_other[buffer], 0, shared.exchange.k_other,
                          column - Exchange::other_column(rank), tQrDq, false);
    }
  }

  // Adds a block to the accumulator, or stores the first, in the order of config/dq_layout.h.
  template <class Fragment>
  CUTE_DEVICE void add_block(int64_t block, bool is_first, Fragment const& tQrDq) {
    constexpr DqLayout kDq = Traits::kDq;
    float4* const target =
        reinterpret_cast<float4*>(p.dq_sum + block * kDq.block_floats()) + thread;
    auto const for_all = [&](auto&& put) {
      CUTE_UNROLL
      for (int j = 0; j < kDq.columns / 8; ++j) {
        put(target + j * kWarpgroupThreads,
            make_float4(tQrDq(4 * j), tQrDq(4 * j + 1), tQrDq(4 * j + 2), tQrDq(4 * j + 3)));
      }
    };
    if (is_first) {
      for_all(store_to_global);
    } else {
      for_all(add_to_global);
    }
  }
};

}  // namespace fa3
