// Where a role stands in a ring of buffers, in one register, for roles that have few; else as
// RingState (device/barriers.h).
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace fa3 {

template <int kStages>
struct CompactRing {
  int turn = 0;  // of two rounds

  FA3_HD constexpr int stage() const { return turn < kStages ? turn : turn - kStages; }
  FA3_HD constexpr uint32_t phase() const { return turn < kStages ? 0 : 1; }
  FA3_HD constexpr void advance() { turn = turn + 1 < 2 * kStages ? turn + 1 : 0; }
};

}  // namespace fa3
