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

constexpr int kUsersOfSlab = 256;
constexpr int64_t kCountersOfUser = kLaunchCounters + kPairCounters;
constexpr size_t kBytes = kCountersOfUser * sizeof(int);

void check(cudaError_t error, char const* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("flash_attn3: could not ") + what + ": " +
                             cudaGetErrorString(error));
  }
}

// (device, stream, capture); capture 0 means none.
using User = std::tuple<int, unsigned long long, unsigned long long>;

struct Pool {
  std::mutex mutex;
  std::map<User, int*> used;
  std::map<int, std::vector<int*>> zeros;     // by device, ready for use
  std::map<int, std::vector<int*>> returned;  // by device, from destroyed graphs
};

// The pool is never destroyed, because CUDA may destroy a graph while the process exits.
Pool& pool() {
  static Pool* const all = new Pool;
  return *all;
}

// The mutex that a LaunchPair holds.
std::mutex& pair_mutex() {
  static std::mutex* const mutex = new std::mutex;
  return *mutex;
}

// Counters that a graph returns when it is destroyed, after its last launch has ended.
struct GraphCounters {
  User user;
  int* counters;
};

// CUDA calls this in one of its own threads, where other callbacks wait. So no CUDA function may be
// called while the mutex is held.
void return_counters(void* graph_counters) {
  std::unique_ptr<GraphCounters> const owned(static_cast<GraphCounters*>(graph_counters));
  Pool& all = pool();
  std::lock_guard const lock(all.mutex);
  all.returned[std::get<0>(owned->user)].push_back(owned->counters);
  all.used.erase(owned->user);
}

std::vector<int*> take_returned(int device) {
  std::vector<int*> found;
  Pool& all = pool();
  std::lock_guard const lock(all.mutex);
  found.swap(all.returned[device]);
  return found;
}

// Clears returned counters or, if there are none, a new slab. WHY returned counters are cleared: a
// graph whose copies ran at the same time leaves arbitrary values.
cudaError_t make_zeros(std::vector<int*>& zeros, cudaStream_t stream) {
  if (zeros.empty()) {
    void* slab = nullptr;
    cudaError_t const error = cudaMalloc(&slab, kUsersOfSlab * kBytes);
    for (int i = 0; i < kUsersOfSlab && error == cudaSuccess; ++i) {
      zeros.push_back(static_cast<int*>(slab) + i * kCountersOfUser);
    }
    return error ? error : cudaMemsetAsync(slab, 0, kUsersOfSlab * kBytes, stream);
  }
  cudaError_t error = cudaSuccess;
  for (size_t i = 0; i < zeros.size() && error == cudaSuccess; ++i) {
    error = cudaMemsetAsync(zeros[i], 0, kBytes, stream);
  }
  return error;
}

// Provides zeroed counters for more users. They are written on a separate stream, so that no
// capture records the writes.
void add_zeros(int device) {
  std::vector<int*> zeros = take_returned(device);
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  check(cudaThreadExchangeStreamCaptureMode(&mode), "allow an allocation during a capture");
  cudaStream_t stream = nullptr;
  cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error == cudaSuccess) {
    error = make_zeros(zeros, stream);
    cudaError_t const end = cudaStreamSynchronize(stream);
    error = error ? error : end;
    cudaStreamDestroy(stream);
  }
  cudaThreadExchangeStreamCaptureMode(&mode);
  {
    Pool& all = pool();
    std::lock_guard const lock(all.mutex);
    std::vector<int*>& target = error ? all.returned[device] : all.zeros[device];
    target.insert(target.end(), zeros.begin(), zeros.end());
  }
  check(error, "allocate counters");
}

// The capture that a stream takes part in.
struct Capture {
  unsigned long long id = 0;
  cudaGraph_t graph = nullptr;
};

Capture capture_of(cudaStream_t stream) {
  Capture capture;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamGetCaptureInfo(stream, &status, &capture.id, &capture.graph) != cudaSuccess) {
    cudaGetLastError();  // the legacy stream fails while another stream is captured
  }
  return status == cudaStreamCaptureStatusActive ? capture : Capture{};
}

// A unique number of the stream. WHY not its handle: the handle of the per-thread default stream is
// the same in all threads.
unsigned long long number_of(cudaStream_t stream) {
  unsigned long long number = reinterpret_cast<uintptr_t>(stream);
  if (stream == cudaStreamPerThread) {
    check(cudaStreamGetId(stream, &number), "read the number of a stream");
    number = ~number;  // larger than any handle
  }
  return number;
}

void attach_to_graph(GraphCounters const& counters, cudaGraph_t graph) {
  cudaUserObject_t object = nullptr;
  auto graph_counters = std::make_unique<GraphCounters>(counters);
  check(cudaUserObjectCreate(&object, graph_counters.get(), return_counters, 1,
                             cudaUserObjectNoDestructorSync),
        "keep counters for a graph");
  graph_counters.release();
  check(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove),
        "keep counters for a graph");
}

int* counters_of(User const& user, Capture const& capture) {
  Pool& all = pool();
  int const device = std::get<0>(user);
  std::unique_lock lock(all.mutex);
  auto found = all.used.find(user);
  while (found == all.used.end() && all.zeros[device].empty()) {
    lock.unlock();
    add_zeros(device);
    lock.lock();
    found = all.used.find(user);  // another thread may launch on the same stream
  }
  if (found != all.used.end()) {
    return found->second;
  }
  int* const counters = all.zeros[device].back();
  all.zeros[device].pop_back();
  all.used.emplace(user, counters);
  lock.unlock();
  if (capture.graph != nullptr) {
    try {
      attach_to_graph(GraphCounters{user, counters}, capture.graph);
    } catch (...) {
      lock.lock();
      all.used.erase(user);
      all.zeros[device].push_back(counters);
      throw;
    }
  }
  return counters;
}

}  // namespace

int* launch_counters(void* stream) {
  // WHY the last result is cached: the map and its lock take longer than the comparison.
  thread_local User last{-1, 0, 0};
  thread_local int* last_counters = nullptr;
  auto const call_stream = static_cast<cudaStream_t>(stream);
  int device = 0;
  check(cudaGetDevice(&device), "read the current device");
  Capture const capture = capture_of(call_stream);
  User const user{device, number_of(call_stream), capture.id};
  if (capture.id != 0 || user != last) {
    last_counters = counters_of(user, capture);
    last = user;
  }
  return last_counters;
}

LaunchPair::LaunchPair(int* counters, void* stream)
    : counters_(counters + kLaunchCounters), stream_(stream) {
  pair_mutex().lock();
}

LaunchPair::~LaunchPair() {
  if (!is_complete_) {
    cudaMemsetAsync(counters_, 0, kPairCounters * sizeof(int), static_cast<cudaStream_t>(stream_));
  }
  pair_mutex().unlock();
}

void clear_counters(int* counters, int64_t count, void* stream) {
  check(cudaMemsetAsync(counters, 0, count * sizeof(int), static_cast<cudaStream_t>(stream)),
        "clear counters");
}

}  // namespace fa3
