// Consumers by keys: a CTA goes from one tile of keys to the next. The load warp finds them, the
// other roles follow.
#pragma once

#include "backward/add_order.h"
#include "backward/storage.h"

namespace fa3 {

template <class Traits>
CUTE_DEVICE int key_buffer(uint32_t tile) {
  return tile % Traits::k.key_buffers();
}

// Of the barriers of K.
template <class Traits>
CUTE_DEVICE uint32_t key_phase(uint32_t tile) {
  return tile / Traits::k.key_buffers() % 2;
}

template <class Traits>
CUTE_DEVICE BwdWork& work_slot(BwdStorage<Traits>& shared, uint32_t tile) {
  return shared.works[tile % Traits::k.works()];
}

// The CTA's next work in the order of work, or one without keys. WHY by ticket: tiles take
// different times. The first tickets are the indices of the CTAs; but in deterministic mode each
// ticket is drawn (add_order.h).
template <class Traits>
CUTE_DEVICE BwdWork next_work(BwdDeviceParams const& p, bool is_first) {
  int number = int(blockIdx.x);
  if (p.is_deterministic()) {
    number = draw_number(p);
  } else if (!is_first) {
    number = int(gridDim.x) + draw_number(p);
  }
  if (number >= p.tiles) {
    BwdWork none{};
    none.kv_head = -1;
    return none;
  }
  return work_of_number<Traits>(p, number, 0);
}

template <class Traits>
CUTE_DEVICE BwdStep& step_slot(BwdStorage<Traits>& shared, uint32_t n) {
  return shared.steps[n % kStepSlots];
}

// Whether the CTA has a step n. Waits until that is known.
template <class Traits>
CUTE_DEVICE bool has_step(BwdStorage<Traits>& shared, uint32_t n) {
  shared.exchange.step_full[n % kStepSlots].wait(n / kStepSlots % 2);
  return (step_slot(shared, n).bits & BwdStep::kIsNone) == 0;
}

}  // namespace fa3
