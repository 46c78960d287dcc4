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

// What an adder adds to at a step: its part of a tile of queries, whose index in the workspaces is
// `rows`.
template <class Traits>
struct DqAddition {
  BwdDeviceParams const& p;
  BwdWork const& work;
  int m;
  int64_t rows;
  int adder;

  // Called before the addition.
  CUTE_DEVICE void wait_for_predecessors() const {
    wait_for_flag(flag(), predecessors<Traits>(p, work, m));
  }

  // Called when it is complete.
  CUTE_DEVICE void publish() const { set_flag(flag(), predecessors<Traits>(p, work, m) + 1); }

  CUTE_DEVICE int* flag() const { return p.dq_flags + rows * Traits::kDqAdders + adder; }
};

}  // namespace fa3
