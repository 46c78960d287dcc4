// By keys: a CTA goes from one tile of keys to the next, and its steps form one sequence. The load
// warp decides it, and publishes each step in a ring in shared memory; consumers and store warps
// have no registers for more than the number of the step.
#pragma once

#include "backward/storage.h"

namespace fa3 {

template <class Traits>
CUTE_DEVICE int key_buffer(uint32_t tile) {
  return tile % Traits::k.key_buffers();
}

// The phase of the barriers of a buffer of K.
template <class Traits>
CUTE_DEVICE uint32_t key_phase(uint32_t tile) {
  return tile / Traits::k.key_buffers() % 2;
}

// What is published of step n.
template <class Traits>
CUTE_DEVICE BwdStep& step_slot(BwdStorage<Traits>& shared, uint32_t n) {
  return shared.exchange.steps[n % kStepSlots];
}

template <class Traits>
CUTE_DEVICE BwdWork& work_slot(BwdStorage<Traits>& shared, int tile) {
  return shared.exchange.works[tile % kWorkSlots];
}

// The flags of step n, once they are known. BwdStep::kNone: the CTA has no step n.
template <class Traits>
CUTE_DEVICE uint32_t wait_for_step(BwdStorage<Traits>& shared, uint32_t n) {
  shared.exchange.step_full[n % kStepSlots].wait(n / kStepSlots % 2);
  return step_slot(shared, n).flags;
}

// The load warp's side. INVARIANT: a slot is written again eight steps later, when Q of the step
// four later has been released: dQ of this one is then staged, and the store warp has added the one
// before. A work is written again four tiles later, when K of the tile two later has been released.
template <class Traits>
struct StepPublisher {
  BwdStorage<Traits>& shared;
  uint32_t before = 0;  // flags of the last step

  // n: of the step; tile: of keys, among those of the CTA; rows: the tile of queries, in the
  // workspaces.
  CUTE_DEVICE void publish(uint32_t n, StepsOf<Traits> const& steps, int tile, int rows,
                           bool is_first) {
    uint32_t const flags = (is_first ? BwdStep::kIsFirst : 0) |
                           (steps.is_last() ? BwdStep::kIsLast : 0) |
                           (steps.template is_masked<Traits>() ? BwdStep::kIsMasked : 0) |
                           (key_buffer<Traits>(tile) ? BwdStep::kBuffer : 0) | steps.own_flags();
    publish(n, BwdStep{flags, tile, rows, steps.m});
  }

  // After the last step.
  CUTE_DEVICE void publish_end(uint32_t n) {
    publish(n, BwdStep{BwdStep::kNone | BwdStep::kIsFirst, 0, 0, 0});
  }

 private:
  CUTE_DEVICE void publish(uint32_t n, BwdStep step) {
    static_assert(BwdStep::kBufferBefore == BwdStep::kBuffer << 1);
    static_assert(BwdStep::kBufferTwoBefore == BwdStep::kBuffer << 2);
    uint32_t const buffers = before << 1 & (BwdStep::kBufferBefore | BwdStep::kBufferTwoBefore);
    bool const follows_first = n > 1 && before & BwdStep::kIsFirst;
    step.flags |= buffers | (follows_first ? BwdStep::kFollowsFirst : 0);
    before = step.flags;
    step_slot(shared, n) = step;
    shared.exchange.step_full[n % kStepSlots].arrive();
  }
};

}  // namespace fa3
