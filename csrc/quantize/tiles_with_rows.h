// Packed sequences in clusters: the tiles that there are, without the numbers between sequences
// that no rows have, so that clusters get equal shares. Nobody knows the lengths at the launch.
#pragma once

#include "quantize/quantize.h"

namespace fa3 {

// A tile by its place among those with rows.
struct FoundTile {
  int entry;
  int number;
};

// Whole warps call its functions, each warp for itself. Nonsense in cu_seqlens gives any tiles.
class TilesWithRows {
  QuantizeShape const& s_;
  int const* const cu_;

  // Of the entry of this lane, of 32 from `first` on.
  CUTE_DEVICE int tiles_of_lane(int first) const {
    int const entry = first + int(threadIdx.x) % 32;
    return entry <= s_.batch ? tiles_of_entry(s_, cu_, entry) : 0;
  }

 public:
  CUTE_DEVICE explicit TilesWithRows(QuantizeParams const& p) : s_(p.shape), cu_(p.cu_seqlens) {}

  CUTE_DEVICE int count() const {
    int64_t total = 0;
#pragma unroll 1
    for (int first = -1; first <= s_.batch; first += 32) {
      total += __reduce_add_sync(0xffffffffu, unsigned(tiles_of_lane(first)));
    }
    return int(total < s_.tiles() ? total : s_.tiles());
  }

  // place: less than count().
  CUTE_DEVICE FoundTile find(int place) const {
#pragma unroll 1
    for (int first = -1;; first += 32) {
      int const own = tiles_of_lane(first);
      int behind = own;  // of this lane and those before it
      CUTE_UNROLL
      for (int distance = 1; distance < 32; distance *= 2) {
        int const other = __shfl_up_sync(0xffffffffu, behind, distance);
        behind += int(threadIdx.x) % 32 >= distance ? other : 0;
      }
      unsigned const is_there = __ballot_sync(0xffffffffu, place < behind);
      if (is_there != 0 || first + 32 > s_.batch) {
        int const lane = is_there != 0 ? __ffs(is_there) - 1 : 31;
        int const entry = min_of(first + lane, s_.batch);
        int const before = __shfl_sync(0xffffffffu, behind - own, lane);
        return FoundTile{entry, first_tile(s_, cu_, entry) + place - before};
      }
      place -= __shfl_sync(0xffffffffu, behind, 31);
    }
  }

  // Writes 1 to the scales of numbers that no rows have. The threads of the grid share the entries.
  CUTE_DEVICE void write_ones(float* scales) const {
    int const places = int(s_.places(s_.tile));
    int const threads = int(gridDim.x * blockDim.x);
#pragma unroll 1
    for (int entry = int(blockIdx.x * blockDim.x + threadIdx.x) - 1; entry <= s_.batch;
         entry += threads) {
      int number = first_tile(s_, cu_, entry) + tiles_of_entry(s_, cu_, entry);
      int const end = entry < s_.batch ? first_tile(s_, cu_, entry + 1) : places + 1;
      for (number = max_of(number, 1); number < min_of(end, places + 1); ++number) {
        for (int head = 0; head < s_.heads; ++head) {
          scales[int64_t(head) * places + number - 1] = 1.f;
        }
      }
    }
  }
};

}  // namespace fa3
