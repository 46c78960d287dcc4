// Flags in global memory by which one CTA hands data over to another. One thread of each speaks.
//
// The copy engine works through a proxy of its own, which acquire and release do not order: where
// it reads, writes or adds to the data, a proxy fence stands between its work and the flag, on
// either side.
#pragma once

#include "device/cute.h"

namespace fa3 {

// What was done before the flag was set to this value is then seen.
CUTE_DEVICE void wait_for_flag(int const* flag, int value) {
  int seen;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
  } while (seen != value);
}

CUTE_DEVICE void set_flag(int* flag, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

CUTE_DEVICE void fence_global_for_async_proxy() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace fa3
