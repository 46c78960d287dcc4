// Warps 1 and 2 of the producer warpgroup where two CTAs share the products (mma_by_products.h):
// one sends dS to the other CTA, the other keeps the order of the sums of dQ. One thread of each
// warp runs these.
#pragma once

#include "backward/storage.h"
#include "backward/add_order.h"
#include "device/bulk_copy.h"
#include "device/cluster.h"

namespace fa3 {

// Sends dS of every step to the other CTA, and expects the other CTA's dS. `ds_empty` covers both:
// a buffer that is free here is free in the other CTA.
template <class Traits>
CUTE_DEVICE void send_scores(BwdStorage<Traits>& shared) {
  constexpr uint32_t kBytes = sizeof(shared.ds[0]);
  auto& exchange = shared.exchange;
  int const other = 1 - cluster_rank();
  uint32_t const end = shared.exchange.work.steps();
  for (uint32_t count = 0; count < end; ++count) {
    int const buffer = count % kExchangeBuffers;
    exchange.ds_full[buffer].wait(count / kExchangeBuffers % 2);
    exchange.ds_other_full[buffer].arrive_and_expect_tx(kBytes);
    bulk_send(other, exchange.ds_other[buffer], shared.ds[buffer], kBytes,
              exchange.ds_other_full[buffer]);
  }
}

// Deterministic mode: waits until the predecessors of this CTA have added their dQ, lets warpgroup
// 2 add, and publishes that it has added. WHY not warpgroup 2 itself: it has no registers for it.
// Warpgroup 2 adds once `ds_other_full` completes, which takes an arrival from here, and has added
// once it releases dS.
template <class Traits>
CUTE_DEVICE void run_add_order(BwdStorage<Traits>& shared, BwdDeviceParams const& p) {
  int const rank = cluster_rank();
  uint32_t count = 0;
  for (BwdSteps steps(shared.exchange.work); steps.valid(); steps.next(), ++count) {
    int const buffer = count % kExchangeBuffers;
    DqAddition<Traits> const addition{p, *steps.work, steps.m, steps.tile(p), rank};
    addition.wait_for_predecessors();
    shared.exchange.ds_other_full[buffer].arrive();
    shared.exchange.ds_empty[buffer].wait(count / kExchangeBuffers % 2);
    addition.publish();
  }
}

}  // namespace fa3
