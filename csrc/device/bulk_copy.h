// Bulk copies (TMA without a tensor map) of contiguous bytes. Sizes and addresses are multiples of
// 16 bytes.
#pragma once

#include "device/barriers.h"

namespace fa3 {

CUTE_DEVICE uint64_t* mbarrier_word(Mbarrier& barrier) {
  return reinterpret_cast<uint64_t*>(&barrier);
}

// Copies from global to shared memory; `full` counts the bytes.
CUTE_DEVICE void bulk_load(void* target, void const* source, uint32_t bytes, Mbarrier& full) {
  cute::SM90_BULK_COPY_G2S::copy(source, mbarrier_word(full), target, int32_t(bytes));
}

// Copies from shared to global memory, in the thread's current bulk group, as bulk_add() does.
CUTE_DEVICE void bulk_store(void* target, void const* source, uint32_t bytes) {
  cute::SM90_BULK_COPY_S2G::copy(source, target, int32_t(bytes));
}

// Adds floats from shared to global memory, in the thread's current bulk group, which
// cute::tma_store_arrive closes.
CUTE_DEVICE void bulk_add(float* target, float const* source, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
               :
               : "l"(target), "r"(cute::cast_smem_ptr_to_uint(source)), "r"(bytes)
               : "memory");
}

// Waits until this thread's bulk groups have written to global memory. (cute::tma_store_wait only
// waits until they have read shared memory.)
CUTE_DEVICE void wait_for_bulk_writes() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace fa3
