// Replaces the CUDA runtime: memory of the host is memory of the GPU, a launch has ended when it
// returns.
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>

#include "copies.h"
#include "machine.h"
#include "memory.h"

void register_kernels();

namespace emulator {
namespace {

constexpr int kRegistersOfSm = 65536;
constexpr int kThreadsOfSm = 2048;
constexpr int kSharedOfSm = 227 * 1024;

int sm_count = 3;  // few, so that small problems give a CTA several tiles
std::string last_error;

std::map<std::string, Kernel>& kernels() {
  static std::map<std::string, Kernel> all;
  return all;
}

std::map<void const*, Kernel const*>& kernels_of_host() {
  static std::map<void const*, Kernel const*> all;
  return all;
}

int ctas_of_sm(void const* function, int threads, size_t dynamic_bytes) {
  Kernel const& kernel = *kernels_of_host().at(function);
  return std::min({kRegistersOfSm / (kernel.most_registers * threads), kThreadsOfSm / threads,
                   kSharedOfSm / int(dynamic_bytes + size_t(kernel.static_bytes) + kStaticBegin)});
}

LaunchSize size_of(cudaLaunchConfig_t const& config, void const* function) {
  u32 const cluster_ctas = u32(kernels_of_host().at(function)->cluster_ctas);
  LaunchSize size{config.gridDim.x, config.blockDim.x, u32(config.dynamicSmemBytes), cluster_ctas,
                  false};
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    cudaLaunchAttribute const& one = config.attrs[i];
    if (one.id == cudaLaunchAttributeClusterDimension) {
      size.cluster_ctas = one.val.clusterDim.x;
    } else if (one.id == cudaLaunchAttributeCooperative) {
      size.is_together = one.val.cooperative != 0;
    }
  }
  return size;
}

CUresult encode_map(CUtensorMap* target, CUtensorMapDataType type, cuuint32_t rank, void* base,
                    cuuint64_t const* sizes, cuuint64_t const* strides, cuuint32_t const* boxes,
                    cuuint32_t const*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                    CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  constexpr u64 kMostSize = u64(1) << 32;
  constexpr u64 kStrideEnd = u64(1) << 40;
  constexpr u32 kMostBox = 256;
  TensorMap map{};
  map.base = reinterpret_cast<u64>(base);
  map.rank = u16(rank);
  map.magic = TensorMap::kMagic;
  bool is_fine = map.base % 16 == 0;
  for (u32 i = 0; i < rank; ++i) {
    map.sizes[i] = sizes[i];
    map.boxes[i] = u16(boxes[i]);
    map.strides[i] = i > 0 ? strides[i - 1] : type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2;
    is_fine = is_fine && sizes[i] > 0 && sizes[i] <= kMostSize && boxes[i] > 0 &&
              boxes[i] <= kMostBox &&
              (i == 0 || (map.strides[i] % 16 == 0 && map.strides[i] < kStrideEnd));
  }
  is_fine = is_fine && map.row_bytes() == (swizzle == CU_TENSOR_MAP_SWIZZLE_128B  ? 128u
                                           : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64u
                                                                                  : 32u);
  memcpy(target, &map, sizeof map);
  return is_fine ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

void add_kernel(Kernel const& kernel) { kernels()[kernel.name] = kernel; }

}  // namespace emulator

using namespace emulator;

#define VISIBLE extern "C" __attribute__((visibility("default")))

// ------------------------------------------------------------------------------ for Python's
// ctypes
VISIBLE void emulator_seed(u32 value) { seed(value); }
VISIBLE void emulator_set_sm_count(int count) { sm_count = count; }

// 1 if there is a kernel with these words in its mangled name.
VISIBLE int emulator_has_kernel(char const* words) {
  register_kernels();
  return std::any_of(kernels().begin(), kernels().end(),
                     [&](auto const& one) { return one.first.find(words) != std::string::npos; });
}

VISIBLE void emulator_forget_memory() { forget_memory(); }
VISIBLE void emulator_add_memory(u64 begin, u64 bytes, int is_writable) {
  add_memory(begin, bytes, is_writable != 0 ? Access::kWrite : Access::kRead);
}

// The error, or null.
VISIBLE char const* emulator_launch(char const* kernel, u32 grid, u32 threads, u32 dynamic_bytes,
                                    u32 cluster_ctas, void const* parameters) {
  register_kernels();
  try {
    launch(kernels().at(kernel), LaunchSize{grid, threads, dynamic_bytes, cluster_ctas, false},
           parameters);
    return nullptr;
  } catch (std::exception const& error) {
    last_error = error.what();
    return last_error.c_str();
  }
}

// -------------------------------------------------------------------------------- the CUDA runtime
extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  register_kernels();
  return &handle;
}

void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, char const*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 1; }

void __cudaRegisterFunction(void**, char const* host, char*, char const* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
  kernels_of_host()[host] = &kernels().at(name);
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, void const* host) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}

// Only the launches of triple angle brackets need them; there are none.
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, CUstream_st*) { std::abort(); }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { std::abort(); }
cudaError_t cudaLaunchKernel(void const*, dim3, dim3, void**, size_t, cudaStream_t) {
  std::abort();
}
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  std::abort();
}

// Counters; nobody frees them.
cudaError_t cudaMalloc(void** memory, size_t bytes) {
  constexpr size_t kAlignment = 256;
  *memory = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  keep_memory(reinterpret_cast<u64>(*memory), bytes);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  memset(memory, value, bytes);
  return cudaSuccess;
}

// There are no streams, and so no graphs.
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = nullptr;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                     unsigned long long*, cudaGraph_t*, cudaGraphNode_t const**,
                                     cudaGraphEdgeData const**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetId(cudaStream_t, unsigned long long*) { std::abort(); }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaUserObjectCreate(cudaUserObject_t*, void*, cudaHostFn_t, unsigned, unsigned) {
  std::abort();
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) {
  std::abort();
}

char const* cudaGetErrorString(cudaError_t) { return "an error of the emulator"; }
cudaError_t cudaFuncSetAttribute(void const*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  constexpr int kL2Bytes = 50 << 20;
  *value = which == cudaDevAttrMultiProcessorCount      ? sm_count
           : which == cudaDevAttrL2CacheSize            ? kL2Bytes
           : which == cudaDevAttrComputeCapabilityMajor ? 9
                                                        : 0;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* ctas, void const* function,
                                                                   int threads, size_t bytes,
                                                                   unsigned) {
  *ctas = ctas_of_sm(function, threads, bytes);
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* ctas, void const* function,
                                                          int threads, size_t bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(ctas, function, threads, bytes, 0);
}

cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, void const* function,
                                           cudaLaunchConfig_t const* config) {
  LaunchSize const size = size_of(*config, function);
  int const ctas = sm_count * ctas_of_sm(function, int(size.threads), size.dynamic_bytes);
  *clusters = std::max(1, ctas / int(size.cluster_ctas));
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(char const*, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(&encode_map);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(cudaLaunchConfig_t const* config, void const* function,
                                void** arguments) {
  LaunchSize const size = size_of(*config, function);
  if (size.is_together &&
      int(size.grid) > sm_count * ctas_of_sm(function, int(size.threads), size.dynamic_bytes)) {
    return cudaErrorCooperativeLaunchTooLarge;
  }
  launch(*kernels_of_host().at(function), size, arguments[0]);
  return cudaSuccess;
}

}  // extern "C"
