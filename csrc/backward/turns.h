// Deterministic mode: a sum of floats depends on its order, so the CTAs that add to a tile of dQ
// take turns, the last tile of keys first. Whose turn it is says a flag, one for each of those who
// add for a CTA: each always adds to the same part of a tile, and waits only for its like.
//
// A CTA waits only for CTAs with smaller numbers in the order of work. They draw those numbers when
// they start, so whoever is waited for is running or has ended, however few CTAs fit on the GPU.
#pragma once

#include "backward/work.h"
#include "device/barriers.h"
#include "device/flags.h"

namespace fa3 {

// The number of a cluster in the order of work.
// WHY: CUDA does not promise to start CTAs in the order of their index.
CUTE_DEVICE int draw_number(BwdDeviceParams const& p) {
  wait_for_earlier_launches();  // the preprocess kernel zeroes ticket and flags
  return atomicAdd(p.ticket, 1);
}

template <class Traits>
CUTE_DEVICE int* flag_of(BwdDeviceParams const& p, BwdSteps const& steps, int adder) {
  return p.dq_flags + steps.tile(p) * Traits::kDqAdders + adder;
}

// Before the dQ of a step is added.
template <class Traits>
CUTE_DEVICE void wait_for_turn(BwdDeviceParams const& p, BwdSteps const& steps, int adder) {
  wait_for_flag(flag_of<Traits>(p, steps, adder), turn_of<Traits>(p, steps));
}

// When it has been added.
template <class Traits>
CUTE_DEVICE void end_turn(BwdDeviceParams const& p, BwdSteps const& steps, int adder) {
  set_flag(flag_of<Traits>(p, steps, adder), turn_of<Traits>(p, steps) + 1);
}

}  // namespace fa3
