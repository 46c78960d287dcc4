// Flags in global memory through which one CTA publishes data to another. One elected thread of
// each CTA calls these functions.
//
// TMA uses the async proxy, which acquire and release do not order. If TMA reads, writes or adds to
// the data, both sides need a proxy fence between the TMA operation and the flag.
#pragma once

#include "device/cute.h"

namespace fa3 {

// Reads a flag. Writes made before the flag was set are visible afterwards.
CUTE_DEVICE int read_flag(int const* flag) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

CUTE_DEVICE void wait_for_flag(int const* flag, int value) {
  while (read_flag(flag) != value) {
  }
}

// Changes a flag from `from` to `to`. Returns whether this call made the change.
CUTE_DEVICE bool claim_flag(int* flag, int from, int to) {
  int before;
  asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(before)
               : "l"(flag), "r"(from), "r"(to)
               : "memory");
  return before == from;
}

CUTE_DEVICE void set_flag(int* flag, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

CUTE_DEVICE void fence_global_for_async_proxy() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Adds to a counter and returns its previous value. Writes before one CTA's addition are visible
// after a later addition by another CTA.
CUTE_DEVICE int add_in_order(int* counter, int value) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(value)
               : "memory");
  return before;
}

CUTE_DEVICE unsigned long long add_in_order(unsigned long long* counter, unsigned long long value) {
  unsigned long long before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(counter), "l"(value)
               : "memory");
  return before;
}

}  // namespace fa3
