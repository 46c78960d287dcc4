// Copies of boxes of q, k, v and what is like them, between global and shared memory. A map of a
// dense batch has four dimensions: columns; rows and heads, in any order; the batch. One of any
// batch has a fifth, the row at which a sequence ends (RowDims in device/tensor_map.h).
#pragma once

#include "core/packed_tiles.h"
#include "device/cute.h"

namespace fa3 {

// Dimensions of a map.
template <class Place>
constexpr int kMapRank = 5;
template <>
inline constexpr int kMapRank<DensePlace> = 4;

// c0, c1, c2: column, and row and head in the order of the map; counted on `barrier`.
template <class Place>
CUTE_DEVICE void load_box(CUtensorMap const& map, uint64_t* barrier, uint64_t hint, void* target,
                          int c0, int c1, int c2, Place const& place, int end) {
  if constexpr (kMapRank<Place> == 4) {
    cute::SM90_TMA_LOAD_4D::copy(&map, barrier, hint, target, c0, c1, c2, place.batch);
  } else {
    cute::SM90_TMA_LOAD_5D::copy(&map, barrier, hint, target, c0, c1, c2, place.batch, end);
  }
}

// Part of the thread's current bulk group.
template <class Place>
CUTE_DEVICE void store_box(CUtensorMap const& map, void const* source, int c0, int c1, int c2,
                           Place const& place, int end) {
  if constexpr (kMapRank<Place> == 4) {
    cute::SM90_TMA_STORE_4D::copy(&map, source, c0, c1, c2, place.batch);
  } else {
    cute::SM90_TMA_STORE_5D::copy(&map, source, c0, c1, c2, place.batch, end);
  }
}

}  // namespace fa3
