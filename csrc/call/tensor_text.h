// A tensor's shape and device in error texts.
#pragma once

#include "core/problem.h"
#include "call/text.h"

namespace fa3 {

// By dtype; after those, the lists of a call.
inline constexpr char const* kDtypeNames[] = {"float16", "bfloat16", "float8_e4m3fn", "float32",
                                              "float64", "other",    "int32",         "bool"};

// As Python writes it: "(2, 8)", "(2,)".
inline std::string shape_text(int64_t const* size, int rank) {
  std::string shape = "(";
  for (int i = 0; i < rank; ++i) {
    shape += text(i > 0 ? ", " : "", size[i]);
  }
  return shape + (rank == 1 ? ",)" : ")");
}

inline std::string device_text(TensorMeta const& meta) {
  return meta.device == DeviceType::kCuda ? text(meta.device_name, ":", meta.device_index)
                                          : meta.device_name;
}

inline bool same_device(TensorMeta const& a, TensorMeta const& b) {
  return a.device == b.device &&
         (a.device != DeviceType::kCuda || a.device_index == b.device_index);
}

}  // namespace fa3
