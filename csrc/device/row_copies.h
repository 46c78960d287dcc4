// TMA copies of boxes of q, k, v and tensors of the same shapes, between global and shared memory.
// The map of a dense batch has four dimensions: columns; rows and heads, in either order; batch.
// Other maps have a fifth dimension, the row at which a sequence ends (RowDims in
// launch/tensor_map.h).
#pragma once

#include "core/packed_tiles.h"
#include "device/cute.h"

namespace fa3 {

// Dimensions of a map.
template <class Location>
constexpr int kMapRank = 5;
template <>
inline constexpr int kMapRank<DenseLocation> = 4;

// The coordinates of a box: column; row and head in the order of the map; and the sequence.
template <class Location>
struct BoxCoordinates {
  int c0;
  int c1;
  int c2;
  Location const& location;
  int end;
};

// Loads a box; `barrier` counts its bytes.
template <class Location>
CUTE_DEVICE void load_box(CUtensorMap const& map, uint64_t* barrier, uint64_t hint, void* target,
                          BoxCoordinates<Location> const& box) {
  auto const& [c0, c1, c2, location, end] = box;
  if constexpr (kMapRank<Location> == 4) {
    cute::SM90_TMA_LOAD_4D::copy(&map, barrier, hint, target, c0, c1, c2, location.batch);
  } else {
    cute::SM90_TMA_LOAD_5D::copy(&map, barrier, hint, target, c0, c1, c2, location.batch, end);
  }
}

// Stores a box, in the thread's current bulk group.
template <class Location>
CUTE_DEVICE void store_box(CUtensorMap const& map, void const* source,
                           BoxCoordinates<Location> const& box) {
  auto const& [c0, c1, c2, location, end] = box;
  if constexpr (kMapRank<Location> == 4) {
    cute::SM90_TMA_STORE_4D::copy(&map, source, c0, c1, c2, location.batch);
  } else {
    cute::SM90_TMA_STORE_5D::copy(&map, source, c0, c1, c2, location.batch, end);
  }
}

}  // namespace fa3
