// The shared memory of a CTA as a list of buffers. The kernels' structs, the planner, explain() and
// the tests read the same list.
#pragma once

#include <string_view>

namespace fa3 {

// `count` buffers of one name, each of `bytes` bytes.
struct SharedBuffer {
  char const* name = "";
  int count = 0;
  int bytes = 0;

  constexpr int total() const { return count * bytes; }
};

struct SharedMemory {
  static constexpr int kMost = 8;

  SharedBuffer buffers[kMost] = {};
  int size = 0;

  // Buffers that a kernel does not have are not listed.
  constexpr SharedMemory& add(char const* name, int count, int bytes) {
    if (count * bytes > 0) {
      buffers[size++] = SharedBuffer{name, count, bytes};
    }
    return *this;
  }

  // The bytes of all buffers with this name; 0: there are none.
  constexpr int total(std::string_view name) const {
    int sum = 0;
    for (int i = 0; i < size; ++i) {
      sum += buffers[i].name == name ? buffers[i].total() : 0;
    }
    return sum;
  }

  constexpr int total() const {
    int sum = 0;
    for (int i = 0; i < size; ++i) {
      sum += buffers[i].total();
    }
    return sum;
  }
};

}  // namespace fa3
