// Warps 1 and 2 of the producer warpgroup where two CTAs share the products (mma_by_products.h): dS
// to the other CTA, and the order of the sums of dQ. One thread of each runs these.
#pragma once

#include "backward/storage.h"
#include "backward/turns.h"
#include "device/bulk_copy.h"
#include "device/cluster.h"

namespace fa3 {

// Sends dS of every step to the other CTA, and expects the other CTA's. A buffer is free there when
// it is free here (`ds_empty`).
template <class Traits>
CUTE_DEVICE void send_scores(BwdStorage<Traits>& shared) {
  constexpr uint32_t kBytes = sizeof(shared.ds[0]);
  auto& exchange = shared.exchange;
  int const other = 1 - cluster_rank();
  uint32_t const end = shared.work.steps();
  for (uint32_t count = 0; count < end; ++count) {
    int const buffer = count % kExchangeBuffers;
    exchange.ds_full[buffer].wait(count / kExchangeBuffers % 2);
    exchange.ds_other_full[buffer].arrive_and_expect_tx(kBytes);
    bulk_send(other, exchange.ds_other[buffer], shared.ds[buffer], kBytes,
              exchange.ds_other_full[buffer]);
  }
}

// Deterministic mode: waits for this CTA's turn to add dQ, and passes it on, since warpgroup 2 has
// no registers for it. Warpgroup 2 sees dS of the other CTA when it is this CTA's turn, and has
// added dQ when it releases dS.
template <class Traits>
CUTE_DEVICE void keep_turns(BwdStorage<Traits>& shared, BwdDeviceParams const& p) {
  int const rank = cluster_rank();
  uint32_t count = 0;
  for (BwdSteps steps(shared.work); steps.valid(); steps.next(), ++count) {
    int const buffer = count % kExchangeBuffers;
    wait_for_turn<Traits>(p, steps, rank);
    shared.exchange.ds_other_full[buffer].arrive();
    shared.exchange.ds_empty[buffer].wait(count / kExchangeBuffers % 2);
    end_turn<Traits>(p, steps, rank);
  }
}

}  // namespace fa3
