// Clusters. The CTAs of a cluster run at the same time and can access each other's shared memory.
#pragma once

#include "device/barriers.h"

namespace fa3 {

CUTE_DEVICE int cluster_rank() { return int(cute::block_rank_in_cluster()); }

// Synchronises all threads of the cluster: writes before the barrier are visible after it. It does
// not wait for threads that have exited.
CUTE_DEVICE void cluster_sync() {
  cute::cluster_arrive();
  cute::cluster_wait();
}

// The address in the CTA `rank` of the cluster that corresponds to `local` in this CTA.
CUTE_DEVICE uint32_t remote_address(int rank, void const* local) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(cute::cast_smem_ptr_to_uint(local)), "r"(rank));
  return address;
}

// Reads an int from another CTA's shared memory.
CUTE_DEVICE int read_remote(int rank, int const& local) {
  int value;
  asm volatile("ld.shared::cluster.s32 %0, [%1];"
               : "=r"(value)
               : "r"(remote_address(rank, &local))
               : "memory");
  return value;
}

// Stores 16 bytes at a remote address (remote_address()); the mbarrier at `full`, in the same CTA,
// counts them.
CUTE_DEVICE void send_async(uint32_t address, float4 const& x, uint32_t full) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
      :
      : "r"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(full)
      : "memory");
}

// Arrives at the barrier that corresponds to `local` in another CTA. offset: 0, in a register that
// depends on what has to come first. WHY not with release.cluster: it waits until all earlier
// accesses of the thread are visible to the whole GPU.
CUTE_DEVICE void arrive_remote(int rank, Mbarrier& local, uint32_t offset) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];"
               :
               : "r"(remote_address(rank, &local) + offset)
               : "memory");
}

// Copies shared memory to the corresponding address `target` of another CTA; its mbarrier counts
// the bytes.
CUTE_DEVICE void bulk_send(int rank, void* target, void const* source, uint32_t bytes,
                           Mbarrier& full) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :
      : "r"(remote_address(rank, target)), "r"(cute::cast_smem_ptr_to_uint(source)), "r"(bytes),
        "r"(remote_address(rank, &full))
      : "memory");
}

}  // namespace fa3
