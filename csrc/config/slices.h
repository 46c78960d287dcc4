// The layout of rows in shared memory: slices of 128 bytes, which a TMA box writes and the swizzle
// permutes. Also the limits of a multiprocessor.
#pragma once

#include "core/int_math.h"
#include "core/problem.h"
#include "core/row_packing.h"

namespace fa3 {

constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupWarps = kWarpgroupThreads / 32;

// Per CTA and per multiprocessor on sm_90; each CTA takes 1 KiB more than it asks for.
constexpr int kMaxSharedBytes = 232448;
constexpr int kSharedBytesPerSm = 228 * 1024;

// Columns of a slice of 16-bit elements.
constexpr int kSliceColumns = 64;

// Columns of a slice of 32 bytes.
constexpr int kNarrowSliceColumns = 16;

constexpr int element_bytes(Dtype dtype) { return dtype == Dtype::kFloat8E4M3 ? 1 : 2; }

// e4m3 with head dims of up to 64 has slices of 64 bytes.
constexpr int slice_columns(Dtype dtype, int head_dim) {
  return dtype == Dtype::kFloat8E4M3 && head_dim > 64 ? 128 : kSliceColumns;
}

// e4m3: keys of a slice of V, which is stored transposed.
constexpr int slice_keys(int tile_n) { return tile_n % 128 == 0 || tile_n % 128 > 64 ? 128 : 64; }

constexpr int padded_columns(int columns, int slice = kSliceColumns) {
  return round_up(columns, slice);
}

}  // namespace fa3
