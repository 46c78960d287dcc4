// Counters in device memory: for the tickets of tiles (forward/work.h), and for the parts of output
// tiles (forward/cache/combine_parts.h). They are zero when a launch begins, and the launch leaves
// them zero.
#pragma once

#include <cstdint>

namespace fa3 {

constexpr int64_t kLaunchCounters = 4096;

// kLaunchCounters counters on the current device for launches on a stream (a cudaStream_t). The
// launches of one stream share them, since they follow each other; two that run side by side have
// different ones (ops/cache_launch.cpp). A stream that is captured has
// counters of its own for each capture, also one that joins the capture as a branch. They belong to
// the graph, which may be replayed on any stream.
//
// INVARIANT: executable graphs that were made from one captured graph, and its copies as child
// graphs, share counters, as they share each tensor of the graph. They must not run at the same
// time.
//
// Never waits for the GPU, but for the first counters of a device and for those that graphs gave
// back. Throws std::runtime_error.
int* launch_counters(void* stream);

// Two launches, of which the first leaves counters set for the second. While this lives no other
// thread makes such launches. WHY a lock: the stream may be the same. WHY counters of their own:
// others may launch between. Without complete() they are cleared at the end: a launch was refused.
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

// Zeros `count` counters elsewhere, on the stream.
void clear_counters(int* counters, int64_t count, void* stream);

}  // namespace fa3
