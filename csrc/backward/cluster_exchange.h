// Warps 1 and 2 of the producer warpgroup where two CTAs share the products (mma_by_products.h):
// one sends dS to the other CTA, the other keeps the order of additions to dQ. One thread of each
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

// Lets warpgroup 2 store or add its dQ of a step, and publishes that it has (add_order.h). WHY not
// warpgroup 2 itself: it has no registers for it.
template <class Traits>
CUTE_DEVICE void run_add_order(BwdStorage<Traits>& shared, BwdDeviceParams const& p) {
  wait_for_earlier_launches();  // the preprocess kernel zeroes the flags
  auto& exchange = shared.exchange;
  int const rank = cluster_rank();
  BwdSteps steps(exchange.work);
  auto const addition_of_step = [&] {
    return DqAddition<Traits>{p, *steps.work, steps.m, steps.tile(p), rank};
  };
  bool follows = false;
  for (uint32_t count = 0; steps.valid(); ++count) {
    int const buffer = count % kExchangeBuffers;
    uint32_t const phase = count / kExchangeBuffers % 2;
    DqAddition<Traits> const addition = addition_of_step();
    if (p.is_deterministic) {
      follows = addition.follows_another();
    }
    exchange.ds_full[buffer].wait(phase);
    exchange.ds_other_full[buffer].wait(phase);
    bool const is_first = !follows && addition.is_first();
    exchange.dq_is_first[buffer] = is_first;
    exchange.dq_turn[buffer].arrive();
    steps.next();
    // WHY early: to read a flag takes a part of a step.
    follows = !p.is_deterministic && steps.valid() && addition_of_step().follows_another();
    exchange.dq_added[buffer].wait(phase);
    addition.publish(is_first);
  }
}

}  // namespace fa3
