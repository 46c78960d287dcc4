#include "call/device_info.h"

#include "call/text.h"

namespace fa3 {
namespace {

std::string version_text(int version) { return text(version / 1000, ".", version % 1000 / 10); }

// The first driver series of a CUDA major version.
char const* driver_series(int cuda_major) { return cuda_major >= 13 ? "580" : "525"; }

}  // namespace

std::string driver_problem(int driver_version, int runtime_version) {
  int const major = runtime_version / 1000;
  if (driver_version == 0 || driver_version >= major * 1000) {
    return {};
  }
  return error_text(
      "device",
      text("an NVIDIA driver for CUDA ", major, ".0 or later (series ", driver_series(major), ")"),
      text("a driver for CUDA ", version_text(driver_version)),
      "update the driver (nvidia-smi shows its version), or build flash_attn3 with an older CUDA");
}

std::string capability_problem(DeviceInfo const& info) {
  if (info.capability_major == 9 && info.capability_minor == 0) {
    return {};
  }
  return error_text("device", "a GPU of compute capability 9.0 (Hopper: H100, H200, GH200)",
                    text("cuda:", info.index, " of capability ", info.capability_major, ".",
                         info.capability_minor),
                    "flash_attn3.flash_attn_func runs PyTorch's attention there");
}

}  // namespace fa3
