// Which CTA adds when to a tile of dQ. The first one stores, so nobody has to zero the accumulator,
// and the others wait until it has; a tile to which none adds is zero (postprocess.h). No deadlock:
// a CTA that claims to be the first has computed what it will store. For long sequences the
// accumulator is zeroed, and nobody waits (BwdConfig::stored_keys). A tile has one flag for each
// adder of a CTA (BwdConfig::dq_adders): each always adds to the same part of a tile, and waits
// only for its counterparts in other CTAs.
//
// Deterministic mode: a sum of floats depends on its order, so CTAs add in a fixed one, the last
// tile of keys first. The flag counts those that have added; an adder waits until it equals the
// number of its predecessors. No deadlock: a CTA waits only for CTAs with smaller numbers in the
// order of work. CTAs draw those numbers when they start, so a CTA that is waited for is running or
// has ended, however few CTAs fit on the GPU.
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

// What a flag says outside deterministic mode.
struct DqFlag {
  static constexpr int kEmpty = 0;
  static constexpr int kClaimed = -1;  // the first is about to store
  static constexpr int kStored = 1;
};

// What an adder adds to at a step: its part of a tile of queries, whose index in the workspaces is
// `rows`.
template <class Traits>
struct DqAddition {
  BwdDeviceParams const& p;
  BwdWork const& work;
  int m;
  int64_t rows;
  int adder;

  // Whether another CTA has added, so far as is known. Deterministic mode: waits for the
  // predecessors.
  CUTE_DEVICE bool follows_another() const {
    if (!p.is_deterministic) {
      return p.dq_is_zeroed || read_flag(flag()) == DqFlag::kStored;
    }
    int const before = predecessors<Traits>(p, work, m);
    wait_for_flag(flag(), before);
    return before > 0;
  }

  // Called next, if none is known to have added: whether this one is the first, and stores.
  CUTE_DEVICE bool is_first() const {
    if (p.is_deterministic || claim_flag(flag(), DqFlag::kEmpty, DqFlag::kClaimed)) {
      return true;
    }
    wait_for_flag(flag(), DqFlag::kStored);
    return false;
  }

  // Called when the sums are in global memory.
  CUTE_DEVICE void publish(bool is_first) const {
    if (p.is_deterministic) {
      set_flag(flag(), predecessors<Traits>(p, work, m) + 1);
    } else if (is_first) {
      set_flag(flag(), DqFlag::kStored);
    }
  }

 private:
  CUTE_DEVICE int* flag() const { return p.dq_flags + rows * Traits::kDqAdders + adder; }
};

}  // namespace fa3
