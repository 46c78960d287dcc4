// csrc/schedule/counters.cu on a CUDA runtime without a GPU, for test_counters.py: streams,
// captures and graphs are numbers, memory is that of the host.
#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "schedule/counters.cu"

namespace {

using Destructor = std::function<void()>;

std::recursive_mutex runtime;
std::map<cudaStream_t, cudaGraph_t> capturing;
std::map<cudaGraph_t, unsigned long long> ids;
std::map<cudaGraph_t, std::vector<Destructor>> owned;
std::map<cudaUserObject_t, Destructor> objects;
unsigned long long made = 0;
int refused = 0;  // allocations from now on
int allocated = 0;
void (*during_allocation)() = nullptr;
thread_local unsigned long long thread_number = ++made;
std::string last_error;

template <class Handle>
Handle handle(unsigned long long number) {
  return reinterpret_cast<Handle>(number);
}

}  // namespace

#define VISIBLE extern "C" __attribute__((visibility("default")))

// -------------------------------------------------------------------------------- for ctypes
// The address, or null.
VISIBLE int* counters(cudaStream_t stream) {
  try {
    return fa3::launch_counters(stream);
  } catch (std::exception const& error) {
    last_error = error.what();
    return nullptr;
  }
}

VISIBLE char const* error_text() { return last_error.c_str(); }

// Two launches, the first of which sets counters; the second fails or clears them. Gives what the
// counters are afterwards.
VISIBLE int pair(cudaStream_t stream, int fails) {
  int* found = nullptr;
  {
    fa3::LaunchPair both(fa3::launch_counters(stream), stream);
    found = both.counters();
    found[0] += 5;
    found[1] += 7;
    if (!fails) {
      found[0] -= 5;
      found[1] -= 7;
      both.complete();
    }
  }
  return found[0] | found[1];
}

VISIBLE cudaGraph_t begin(cudaStream_t stream) {
  std::lock_guard const lock(runtime);
  auto const graph = handle<cudaGraph_t>(++made);
  ids[graph] = ++made;
  capturing[stream] = graph;
  return graph;
}

VISIBLE void join(cudaStream_t stream, cudaGraph_t graph) { capturing[stream] = graph; }

VISIBLE void end(cudaGraph_t graph) {
  std::lock_guard const lock(runtime);
  std::erase_if(capturing, [&](auto const& one) { return one.second == graph; });
}

// As CUDA does when a graph and all that was made of it are gone, or a capture has failed.
VISIBLE void destroy(cudaGraph_t graph) {
  end(graph);
  for (Destructor const& destructor : owned[graph]) {
    destructor();
  }
  owned.erase(graph);
}

VISIBLE void refuse_allocations(int count) { refused = count; }
VISIBLE int allocations() { return allocated; }
VISIBLE void call_during_allocation(void (*function)()) { during_allocation = function; }

// -------------------------------------------------------------------------------- the runtime
extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  if (during_allocation != nullptr) {
    during_allocation();
  }
  if (refused > 0) {
    --refused;
    return cudaErrorMemoryAllocation;
  }
  ++allocated;
  *memory = std::malloc(bytes);
  memset(*memory, 0xff, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  memset(memory, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = handle<cudaStream_t>(++made << 8);
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     cudaGraphNode_t const**, cudaGraphEdgeData const**, size_t*) {
  std::lock_guard const lock(runtime);
  auto const found = capturing.find(stream);
  *status = cudaStreamCaptureStatusNone;
  if (found != capturing.end()) {
    *status = cudaStreamCaptureStatusActive;
    *graph = found->second;
    *id = ids.at(found->second);
  }
  return cudaSuccess;
}

cudaError_t cudaStreamGetId(cudaStream_t, unsigned long long* id) {
  *id = thread_number;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
char const* cudaGetErrorString(cudaError_t) { return "out of memory"; }

cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* data, cudaHostFn_t destructor,
                                 unsigned, unsigned) {
  std::lock_guard const lock(runtime);
  *object = handle<cudaUserObject_t>(++made);
  objects[*object] = [=] { destructor(data); };
  return cudaSuccess;
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned,
                                      unsigned) {
  std::lock_guard const lock(runtime);
  owned[graph].push_back(objects.at(object));
  objects.erase(object);
  return cudaSuccess;
}

}  // extern "C"
