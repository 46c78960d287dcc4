// Deterministic mode: a sum of floats depends on its order, so the CTAs that add to a tile of dQ do
// so in a fixed order, the last tile of keys first. A flag counts those that have added; an adder
// waits until the flag equals the number of its predecessors. A tile has one flag for each adder of
// a CTA (BwdConfig::dq_adders): each always adds to the same part of a tile, and waits only for its
// counterparts in other CTAs.
//
// No deadlock: a CTA waits only for CTAs with smaller numbers in the order of work. CTAs draw those
// numbers when they start, so a CTA that is waited for is running or has ended, however few CTAs
// fit on the GPU.
#pragma once

#include "backward/work.h"
#include "device/barriers.h"
#include "device/flags.h"

namespace fa3 {

// Draws the number of a CTA or cluster in the order of work. WHY: CUDA does not promise to start
// CTAs in the order of their index.
CUTE_DEVICE int draw_number(BwdDeviceParams const& p) {
  wait_for_earlier_launches();  // the preprocess kernel zeroes ticket and flags
  return atomicAdd(p.ticket, 1);
}

template <class Traits>
CUTE_DEVICE int* flag_of(BwdDeviceParams const& p, BwdSteps const& steps, int adder) {
  return p.dq_flags + steps.tile(p) * Traits::kDqAdders + adder;
}

// Called before the dQ of a step is added.
template <class Traits>
CUTE_DEVICE void wait_for_predecessors(BwdDeviceParams const& p, BwdSteps const& steps, int adder) {
  wait_for_flag(flag_of<Traits>(p, steps, adder), predecessors<Traits>(p, steps));
}

// Called when it has been added.
template <class Traits>
CUTE_DEVICE void publish_added(BwdDeviceParams const& p, BwdSteps const& steps, int adder) {
  set_flag(flag_of<Traits>(p, steps, adder), predecessors<Traits>(p, steps) + 1);
}

}  // namespace fa3
