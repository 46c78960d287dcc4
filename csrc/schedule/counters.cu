#include "schedule/counters.h"

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "launch/launch.h"

namespace fa3 {
namespace {

constexpr int kCountersOfSlab = 256;
constexpr size_t kBytes = kLaunchCounters * sizeof(int);

void check(cudaError_t error, char const* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("flash_attn3: could not ") + what + ": " +
                             cudaGetErrorString(error));
  }
}

// Device, stream, capture; capture 0: none.
using User = std::tuple<int, unsigned long long, unsigned long long>;

std::mutex mutex;
std::map<int, std::vector<int*>> unused;  // by device
std::map<User, int*> used;

// What a graph gives back when it is destroyed.
struct OfGraph {
  User user;
};

void give_back(void* of_graph) {
  std::unique_ptr<OfGraph> const owned(static_cast<OfGraph*>(of_graph));
  std::lock_guard const lock(mutex);
  auto const found = used.find(owned->user);
  unused[std::get<0>(owned->user)].push_back(found->second);
  used.erase(found);
}

// Zeros for some more users. They are written on a stream of its own: no capture may notice.
void add_slab(int device) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  check(cudaThreadExchangeStreamCaptureMode(&mode), "allow an allocation during a capture");
  void* slab = nullptr;
  cudaStream_t stream = nullptr;
  cudaError_t error = cudaMalloc(&slab, kCountersOfSlab * kBytes);
  error = error ? error : cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  error = error ? error : cudaMemsetAsync(slab, 0, kCountersOfSlab * kBytes, stream);
  error = error ? error : cudaStreamSynchronize(stream);
  error = error ? error : cudaStreamDestroy(stream);
  cudaThreadExchangeStreamCaptureMode(&mode);
  check(error, "allocate counters");
  for (int i = 0; i < kCountersOfSlab; ++i) {
    unused[device].push_back(static_cast<int*>(slab) + i * kLaunchCounters);
  }
}

// The capture that a stream is part of.
struct Capture {
  unsigned long long id = 0;
  cudaGraph_t graph = nullptr;
};

Capture capture_of(cudaStream_t stream) {
  Capture capture;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamGetCaptureInfo(stream, &status, &capture.id, &capture.graph) != cudaSuccess) {
    cudaGetLastError();  // the legacy stream, while another one is capturing
  }
  return status == cudaStreamCaptureStatusActive ? capture : Capture{};
}

// A number of the stream. The handle of the default stream of a thread is the same in all threads.
unsigned long long number_of(cudaStream_t stream) {
  unsigned long long number = reinterpret_cast<uintptr_t>(stream);
  if (stream == cudaStreamPerThread) {
    check(cudaStreamGetId(stream, &number), "read the number of a stream");
    number = ~number;  // no handle is so large
  }
  return number;
}

void belong_to_graph(User const& user, cudaGraph_t graph) {
  cudaUserObject_t object = nullptr;
  auto of_graph = std::make_unique<OfGraph>(OfGraph{user});
  check(cudaUserObjectCreate(&object, of_graph.get(), give_back, 1, cudaUserObjectNoDestructorSync),
        "keep counters for a graph");
  of_graph.release();
  check(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove),
        "keep counters for a graph");
}

int* counters_of(User const& user, Capture const& capture) {
  std::unique_lock lock(mutex);
  auto const found = used.find(user);
  if (found != used.end()) {
    return found->second;
  }
  int const device = std::get<0>(user);
  if (unused[device].empty()) {
    add_slab(device);
  }
  int* const counters = unused[device].back();
  unused[device].pop_back();
  used.emplace(user, counters);
  lock.unlock();
  if (capture.graph != nullptr) {
    belong_to_graph(user, capture.graph);
  }
  return counters;
}

}  // namespace

int* launch_counters(void* stream) {
  // WHY: the map and its lock take longer than the comparison.
  thread_local User last{-1, 0, 0};
  thread_local int* counters_of_last = nullptr;
  auto const of_call = static_cast<cudaStream_t>(stream);
  int device = 0;
  check(cudaGetDevice(&device), "read the current device");
  Capture const capture = capture_of(of_call);
  User const user{device, number_of(of_call), capture.id};
  if (capture.id != 0 || user != last) {
    counters_of_last = counters_of(user, capture);
    last = user;
  }
  return counters_of_last;
}

void clear_counters(int* counters, int64_t count, void* stream) {
  check(cudaMemsetAsync(counters, 0, count * sizeof(int), static_cast<cudaStream_t>(stream)),
        "clear counters");
}

}  // namespace fa3
