// Copies of 16 and 4 bytes by a thread from global to shared memory (cp.async).
#pragma once

#include "device/barriers.h"

namespace fa3 {

// Copies 16 bytes.
CUTE_DEVICE void copy_chunk(uint32_t target, char const* source) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(target), "l"(source)
               : "memory");
}

// Copies 16 bytes, or writes zeros.
CUTE_DEVICE void copy_chunk(uint32_t target, char const* source, bool is_read) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(is_read ? 16 : 0)
               : "memory");
}

// Copies a float, or writes zero.
CUTE_DEVICE void copy_float(float* target, float const* source, bool is_read) {
  asm volatile(
      "cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(cute::cast_smem_ptr_to_uint(target)),
      "l"(source), "r"(is_read ? 4 : 0)
      : "memory");
}

// Arrives for this thread at the mbarrier at an address of shared memory, once its copies are
// complete.
CUTE_DEVICE void arrive_after_copies(uint32_t full) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full) : "memory");
}

CUTE_DEVICE void arrive_after_copies(Mbarrier& full) {
  arrive_after_copies(cute::cast_smem_ptr_to_uint(&full));
}

}  // namespace fa3
