// Error texts. They all have one form, `flash_attn3.<op>: expected ..., got ...; hint: ...`, and
// are built only when a call is refused.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

namespace fa3 {

inline void append(std::string& out, std::string const& part) { out += part; }
inline void append(std::string& out, std::string_view part) { out += part; }
inline void append(std::string& out, char const* part) { out += part; }
inline void append(std::string& out, int part) { out += std::to_string(part); }
inline void append(std::string& out, int64_t part) { out += std::to_string(part); }
inline void append(std::string& out, uint64_t part) { out += std::to_string(part); }
inline void append(std::string& out, double part) {
  char digits[32];
  std::snprintf(digits, sizeof(digits), "%.9g", part);
  out += digits;
}

// The parts, one after another.
template <class... Parts>
std::string text(Parts const&... parts) {
  std::string out;
  (append(out, parts), ...);
  return out;
}

inline std::string error_text(char const* op, std::string const& expected, std::string const& got,
                              std::string const& hint = "") {
  std::string const error = text("flash_attn3.", op, ": expected ", expected, ", got ", got);
  return hint.empty() ? error : text(error, "; hint: ", hint);
}

}  // namespace fa3
