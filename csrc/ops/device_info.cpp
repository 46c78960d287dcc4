// Facts about GPU and driver. Those of a GPU are read once, in its first call, through the static
// CUDA runtime. When Python loads the library, the version of the driver is read from the driver
// itself: that works without a driver, and leaves CUDA uninitialised, so that a process may fork.
#include "call/device_info.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <array>
#include <mutex>
#include <stdexcept>

#include "call/text.h"
#include "ops/library.h"

namespace fa3 {
namespace {

constexpr int kMaxDevices = 128;

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  cudaError_t const error = cudaDeviceGetAttribute(&value, which, device);
  if (error != cudaSuccess) {
    throw std::runtime_error(error_text("device", text("to read the attributes of cuda:", device),
                                        text("a CUDA error: ", cudaGetErrorString(error))));
  }
  return value;
}

DeviceInfo query(int device) {
  std::string const error = current_driver_problem();
  if (!error.empty()) {
    throw std::runtime_error(error);
  }
  DeviceInfo info;
  info.index = device;
  info.sm_count = attribute(cudaDevAttrMultiProcessorCount, device);
  info.l2_bytes = attribute(cudaDevAttrL2CacheSize, device);
  info.capability_major = attribute(cudaDevAttrComputeCapabilityMajor, device);
  info.capability_minor = attribute(cudaDevAttrComputeCapabilityMinor, device);
  std::string const wrong = capability_problem(info);
  if (!wrong.empty()) {
    throw std::runtime_error(wrong);
  }
  return info;
}

// 0 without a driver. The driver stays open: every use of CUDA needs it.
int installed_driver_version() {
  void* const driver = dlopen("libcuda.so.1", RTLD_LAZY);
  void* const function = driver ? dlsym(driver, "cuDriverGetVersion") : nullptr;
  int version = 0;
  if (function) {
    reinterpret_cast<decltype(&cuDriverGetVersion)>(function)(&version);
  }
  return version;
}

}  // namespace

std::string current_driver_problem() {
  return driver_problem(installed_driver_version(), CUDART_VERSION);
}

DeviceInfo const& device_info(int device) {
  static std::array<DeviceInfo, kMaxDevices> infos;
  static std::array<std::once_flag, kMaxDevices> asked;
  if (device < 0 || device >= kMaxDevices) {
    throw std::runtime_error(
        error_text("device", text("a CUDA device below ", kMaxDevices), text(device)));
  }
  std::call_once(asked[device], [device] { infos[device] = query(device); });
  return infos[device];
}

}  // namespace fa3
