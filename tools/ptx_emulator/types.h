// The words of the emulator: numbers by their width, floats as their bits, errors.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <sstream>
#include <string>
#include <type_traits>

namespace emulator {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;

// The value of a register before anything is written to it.
constexpr u16 kUnset = 0xbeef;

inline float to_float(u32 bits) { return std::bit_cast<float>(bits); }
inline u32 to_bits(float value) { return std::bit_cast<u32>(value); }

template <class... Parts>
std::string text(Parts const&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

// Ends the launch with an error that names the kernel and the thread.
[[noreturn]] void fail(std::string const& what);

template <class T>
T read_as(void const* address) {
  T value;
  memcpy(&value, address, sizeof value);
  return value;
}

}  // namespace emulator
