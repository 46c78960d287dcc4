// The position of a role in a ring of buffers, in one register, for roles that have few registers.
// Otherwise as RingState (device/barriers.h).
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace fa3 {

template <int kStages>
struct CompactRing {
  int index = 0;  // over two passes through the ring

  FA3_HD constexpr int stage() const { return index < kStages ? index : index - kStages; }
  FA3_HD constexpr uint32_t phase() const { return index < kStages ? 0 : 1; }
  FA3_HD constexpr void advance() { index = index + 1 < 2 * kStages ? index + 1 : 0; }
};

}  // namespace fa3
