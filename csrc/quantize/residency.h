// How many CTAs, or clusters of them, of a kernel the GPU has room for at once.
#pragma once

#include "launch/launch.h"

namespace fa3 {

// CTAs of an SM; of clusters of more than one CTA: those of the GPU, whose SMs stand in groups that
// a cluster cannot leave.
template <class Kernel>
int ask_room(Kernel* kernel, LaunchShape const& shape, int cluster_ctas) {
  int room = 0;
  if (cluster_ctas == 1) {
    check_launch(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&room, kernel, shape.threads,
                                                               shape.shared_bytes),
                 shape.variant, 0, shape.shared_bytes);
    return room;
  }
  cudaLaunchAttribute attributes[] = {cluster_of(cluster_ctas)};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(cluster_ctas);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.attrs = attributes;
  config.numAttrs = 1;
  check_launch(cudaOccupancyMaxActiveClusters(&room, kernel, &config), shape.variant, cluster_ctas,
               shape.shared_bytes);
  return room;
}

// known: the kernel's own; it keeps the answer for the device and the CTAs that were last asked
// for, which take microseconds to ask. Their shared memory follows from their threads, or is too
// little to matter.
template <class Kernel>
int room_for(Kernel* kernel, LaunchShape const& shape, int cluster_ctas,
             std::atomic<uint64_t>& known) {
  int device = 0;
  check_launch(cudaGetDevice(&device), shape.variant, 0, shape.shared_bytes);
  uint64_t const asked = uint64_t(device + 1) << 32 | uint64_t(shape.threads * 8 + cluster_ctas - 1)
                                                          << 16;
  uint64_t const answer = known.load(std::memory_order_relaxed);
  if (answer >> 16 == asked >> 16) {
    return int(answer & 0xffff);
  }
  int const room = ask_room(kernel, shape, cluster_ctas);
  known.store(asked | uint64_t(room), std::memory_order_relaxed);
  return room;
}

}  // namespace fa3
