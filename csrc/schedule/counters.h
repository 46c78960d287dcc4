// Counters in device memory, for the tickets of tiles (forward/work.h) and the parts of output
// tiles (forward/cache/combine_parts.h). They are zero when a launch begins, and the launch leaves
// them zero.
#pragma once

#include <cstdint>

namespace fa3 {

constexpr int64_t kLaunchCounters = 4096;

// Returns kLaunchCounters counters on the current device for launches on a stream (a cudaStream_t).
// Launches of one stream run one after another and share counters; two launches that overlap use
// different counters (ops/forward_run.cpp). A captured stream has separate counters for each
// capture, even if it joins the capture as a branch. They belong to the graph, which may be
// replayed on any stream.
//
// INVARIANT: executable graphs instantiated from one captured graph, and its copies as child
// graphs, share counters, as they share every tensor of the graph. They must not run at the same
// time.
//
// Never waits for the GPU, except for the first counters of a device and for counters that graphs
// returned. Throws std::runtime_error.
int* launch_counters(void* stream);

// A pair of launches, of which the first leaves counters set for the second. While a LaunchPair
// lives, no other thread launches a pair. WHY a lock: both threads may use the same stream. WHY
// separate counters: other launches may come in between. Without complete(), which means that a
// launch was refused, the destructor clears the counters.
class LaunchPair {
 public:
  // counters: from launch_counters(stream).
  LaunchPair(int* counters, void* stream);
  ~LaunchPair();
  LaunchPair(LaunchPair const&) = delete;
  LaunchPair& operator=(LaunchPair const&) = delete;

  int* counters() const { return counters_; }
  void complete() { is_complete_ = true; }

 private:
  int* counters_;
  void* stream_;
  bool is_complete_ = false;
};
constexpr int64_t kPairCounters = 2;

// Zeroes `count` counters of the caller, on the stream.
void clear_counters(int* counters, int64_t count, void* stream);

}  // namespace fa3
