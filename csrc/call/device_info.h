// What the library knows about a GPU and its driver, and why it cannot run there.
#pragma once

#include <cstdint>
#include <string>

#include "core/problem.h"

namespace fa3 {

struct DeviceInfo {
  int index = 0;
  int sm_count = 0;
  int64_t l2_bytes = 0;
  int capability_major = 0;
  int capability_minor = 0;
};

// Asked of the driver once a device, then cached; throws when the driver or the GPU will not do. In
// ops/device_info.cpp.
DeviceInfo const& device_info(int device);

// Facts about a tensor's GPU; zeros where it has none.
inline DeviceInfo device_info_of(TensorMeta const& meta) {
  return meta.device == DeviceType::kCuda ? device_info(meta.device_index) : DeviceInfo{};
}

inline DeviceLimits limits_of(DeviceInfo const& info) {
  return DeviceLimits{info.sm_count, info.l2_bytes};
}

// Why a driver cannot run a library built with CUDA runtime `runtime_version`; empty if it can.
// Versions as CUDA counts them: 13020 is 13.2. A driver runs every runtime of its own or an older
// major version. 0 means that there is no driver, hence no GPU, which is not an error here.
std::string driver_problem(int driver_version, int runtime_version);

// Empty when the kernels run on the GPU: they are built for compute capability 9.0 exactly
// (sm_90a).
std::string capability_problem(DeviceInfo const& info);

}  // namespace fa3
