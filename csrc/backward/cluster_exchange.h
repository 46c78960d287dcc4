// Warps 1 to 3 of the producer warpgroup where two CTAs share the products (mma_by_products.h): one
// sends dS to a CTA with neighbouring keys, two keep the order of additions to dQ. One thread of
// each warp runs these.
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

template <class Traits>
CUTE_DEVICE DqAddition<Traits> cluster_addition(BwdDeviceParams const& p,
                                                StepsOf<Traits> const& steps) {
  return DqAddition<Traits>{p, *steps.work, steps.order_number(), steps.tile(p), cluster_rank()};
}

// Lets warpgroup 2 store or add its dQ of a step (add_order.h), up to a step ahead of it. WHY not
// warpgroup 2 itself: it has no registers for it.
template <class Traits>
CUTE_DEVICE void grant_turns(BwdStorage<Traits>& shared, BwdDeviceParams const& p) {
  wait_for_earlier_launches();  // the preprocess kernel zeroes the flags
  auto& exchange = shared.exchange;
  uint32_t count = 0;
  for (StepsOf<Traits> steps(exchange.work); steps.valid(); steps.next(), ++count) {
    int const buffer = count % kExchangeBuffers;
    uint32_t const phase = count / kExchangeBuffers % 2;
    auto const addition = cluster_addition<Traits>(p, steps);
    bool const follows = addition.follows_another();
    exchange.ds_full[buffer].wait(phase);
    exchange.wait_for_scores(buffer, phase);
    exchange.dq_published[buffer].wait(phase ^ 1);
    exchange.dq_is_first[buffer] = !follows && addition.is_first();
    exchange.dq_turn[buffer].arrive();
  }
}

// Publishes what warpgroup 2 has stored or added.
template <class Traits>
CUTE_DEVICE void publish_turns(BwdStorage<Traits>& shared, BwdDeviceParams const& p) {
  auto& exchange = shared.exchange;
  uint32_t count = 0;
  for (StepsOf<Traits> steps(exchange.work); steps.valid(); steps.next(), ++count) {
    int const buffer = count % kExchangeBuffers;
    exchange.dq_added[buffer].wait(count / kExchangeBuffers % 2);
    cluster_addition<Traits>(p, steps).publish(exchange.dq_is_first[buffer]);
    exchange.dq_published[buffer].arrive();
  }
}

template <class Traits>
CUTE_DEVICE void run_exchange(BwdStorage<Traits>& shared, BwdDeviceParams const& p, int warp) {
  if (warp == 1) {
    if constexpr (!Traits::kSplitsColumns) {
      send_scores<Traits>(shared);
    }
  } else if (warp == 2 && !p.dq_is_zeroed) {
    grant_turns<Traits>(shared, p);
  } else if (!p.dq_is_zeroed) {
    publish_turns<Traits>(shared, p);
  }
}

}  // namespace fa3
