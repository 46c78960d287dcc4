// Counters in device memory: for the tickets of tiles (forward/work.h), and for the parts of output
// tiles (forward/output_parts.h). They are zero when a launch begins, and the launch leaves them
// zero.
#pragma once

#include <cstdint>

namespace fa3 {

constexpr int64_t kLaunchCounters = 2048;

// kLaunchCounters counters on the current device for launches on a stream (a cudaStream_t). The
// launches of one stream share them, since they follow each other. Those that a CUDA graph captures
// have counters of their own, which belong to the graph: it may be replayed on any stream.
//
// Never waits for the GPU, but for the first counters of a device. Throws std::runtime_error.
int* launch_counters(void* stream);

// Zeros `count` counters elsewhere, on the stream.
void clear_counters(int* counters, int64_t count, void* stream);

}  // namespace fa3
