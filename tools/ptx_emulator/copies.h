// Descriptors of the copy engine, as this emulator writes and reads them.
#pragma once

#include "types.h"

namespace emulator {

// In the 128 bytes of a CUtensorMap.
struct TensorMap {
  static constexpr u32 kMagic = 0x7e4503a9u;
  u64 base;
  u64 sizes[5];
  u64 strides[5];  // bytes; of the innermost: of an element
  u16 boxes[5];
  u16 rank;
  u32 magic;

  u32 row_bytes() const { return u32(boxes[0] * strides[0]); }

  u32 rows() const {
    u32 rows = 1;
    for (u32 i = 1; i < rank; ++i) {
      rows *= boxes[i];
    }
    return rows;
  }
};
static_assert(sizeof(TensorMap) <= 128);

}  // namespace emulator
