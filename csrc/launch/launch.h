// Host side of a launch: errors that name the kernel variant, launch attributes, and a start that
// may overlap with the end of the previous launch.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace fa3 {

inline void check_launch(cudaError_t error, char const* variant, int grid, int shared_bytes) {
  if (error != cudaSuccess) {
    throw std::runtime_error("flash_attn3: launch of " + std::string(variant) + " failed: " +
                             cudaGetErrorString(error) + " (grid " + std::to_string(grid) +
                             ", shared memory " + std::to_string(shared_bytes) + " bytes)");
  }
}

// Binds a CUDA context to this host thread. WHY: a thread that has not used this runtime yet has no
// context, and driver functions (cuTensorMapEncodeTiled) need one.
inline void bind_thread(char const* variant, int grid, int shared_bytes) {
  thread_local bool is_bound = false;
  if (!is_bound) {
    int device = 0;
    check_launch(cudaGetDevice(&device), variant, grid, shared_bytes);
    check_launch(cudaSetDevice(device), variant, grid, shared_bytes);
    is_bound = true;
  }
}

struct LaunchShape {
  char const* variant;
  int grid;
  int threads;
  int shared_bytes;
  int cluster = 1;  // CTAs in a cluster, where the kernel has no attribute that says it
};

// Lets a kernel use shape.shared_bytes of shared memory. The attribute belongs to the kernel as
// loaded on a device, so it is set once per device. `devices_ready` belongs to this kernel alone.
template <class Kernel>
void allow_shared_memory(Kernel* kernel, LaunchShape const& shape,
                         std::atomic<uint64_t>& devices_ready) {
  int device = 0;
  check_launch(cudaGetDevice(&device), shape.variant, shape.grid, shape.shared_bytes);
  uint64_t const bit = uint64_t(1) << (device % 64);
  if (!(devices_ready.load(std::memory_order_relaxed) & bit)) {
    check_launch(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      shape.shared_bytes),
                 shape.variant, shape.grid, shape.shared_bytes);
    devices_ready.fetch_or(bit, std::memory_order_relaxed);
  }
}

// Launches a kernel whose CTAs may start while the previous launch still runs. The kernel itself
// waits for that launch.
template <class Kernel, class Params>
void launch_early(Kernel* kernel, LaunchShape const& shape, Params const& params, void* stream) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = unsigned(shape.cluster);
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.grid);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = shape.cluster > 1 ? 2 : 1;
  check_launch(cudaLaunchKernelEx(&config, kernel, params), shape.variant, shape.grid,
               shape.shared_bytes);
}

}  // namespace fa3
