// What the kernels of quantize_fp8 share: the tile of a CTA, the rows and columns of a thread, its
// loads, and rows that are not rotated.
#pragma once

#include <bit>

#include "quantize/arithmetic.h"
#include "quantize/quantize.h"

namespace fa3 {

constexpr int kMostThreads = 512;  // of a CTA
constexpr int kMostCtaWarps = kMostThreads / 32;
constexpr uint32_t kInfinity = 0x7f800000u;
constexpr float kSmallestMaximum = 0x1p-64f;
// In place of the head dim that a kernel is made for: any, and not rotated.
constexpr int kPlain = -1;

// The number of this thread. What the compiler works out of it it does not know already.
CUTE_DEVICE int thread_read_anew() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// kDim: columns of a row, where the compiler is to know; else not above 0. rows: of the CTA.
template <LaneOrder kOrder, int kDim>
CUTE_DEVICE auto place_of_thread(QuantizeShape const& s, int rows, int thread = int(threadIdx.x)) {
  __builtin_assume(thread >= 0 && thread < kMostThreads);
  int const head_dim = kDim > 0 ? kDim : s.head_dim;
  if constexpr (kOrder == LaneOrder::kChunks) {
    return chunk_place(thread, head_dim, rows);
  } else {
    bool const is_row = kOrder == LaneOrder::kRows;
    ThreadPlace place =
        is_row ? thread_place_in_row(thread, head_dim) : thread_place(thread, head_dim, rows);
    // What the compiler is to know too. The lanes of a warp have the same width, if not kRows.
    if (!is_row) {
      bool const is_one_piece = kDim > 0 && std::has_single_bit(unsigned(kDim));
      place.width = is_one_piece ? kDim : __shfl_sync(0xffffffffu, place.width, 0);
      __builtin_assume(kDim <= 0 || place.width >= (kDim & -kDim));
      place.distance = max_of(place.width / 2, kSpanColumns);
    }
    if (kDim > 0 && kDim % kSpanColumns == 0) {
      place.first_columns = kSpanColumns;
    }
    if (kDim > 0 && kDim % kLaneColumns == 0) {
      place.second_columns = kSpanColumns;
    }
    return place;
  }
}

// How many of first_tile(0 .. batch) are not behind `tile`, less one: the last entry that does not
// begin behind it. Each step asks 32 of them. Whole warps call it; nonsense gives any entry.
inline __device__ int entry_of_tile(QuantizeParams const& p, int tile) {
  int const lane = int(threadIdx.x) % 32;
  int low = 0;
  int high = p.shape.batch + 1;
  while (low < high) {
    int const step = ceil_div(high - low, 32);
    int64_t const entry = int64_t(low) + int64_t(lane) * step;
    bool const is_before = entry < high && first_tile(p.shape, p.cu_seqlens, int(entry)) <= tile;
    int const count = __popc(__ballot_sync(0xffffffffu, is_before));
    if (count == 0) {
      break;
    }
    high = min_of(high, low + count * step);
    low += (count - 1) * step + 1;
  }
  return low - 1;
}

inline __device__ QuantizeTile tile_of_cta(QuantizeParams const& p, int tile) {
  return p.shape.is_packed
             ? packed_tile(p.shape, p.cu_seqlens, p.seqused, tile, entry_of_tile(p, tile))
             : dense_tile(p.shape, tile);
}

// Of the first column of the first row of a tile, in elements.
CUTE_DEVICE int64_t source_of(QuantizeParams const& p, QuantizeTile const& tile, int head) {
  int64_t const entry = p.shape.is_packed ? 0 : tile.entry;
  return entry * p.x.batch_stride + tile.begin * p.x.row_stride + head * p.x.head_stride;
}

CUTE_DEVICE int64_t target_of(QuantizeShape const& s, QuantizeTile const& tile, int head) {
  int64_t const entry = s.is_packed ? 0 : tile.entry;
  return ((entry * s.rows + tile.begin) * s.heads + head) * s.head_dim;
}

// Where a thread reads and writes: its first row and column there, of one head after the other.
template <class Element>
struct Cursor {
  Element const* source;
  uint8_t* target;

  template <class Place>
  CUTE_DEVICE Cursor(QuantizeParams const& p, Place const& place, QuantizeTile const& tile,
                     int head) {
    source = static_cast<Element const*>(p.x.data) + source_of(p, tile, head) +
             place.row * p.x.row_stride + place.column;
    target = p.values + target_of(p.shape, tile, head) + target_in_tile(p.shape, place);
  }

  template <class Place>
  static CUTE_DEVICE int64_t target_in_tile(QuantizeShape const& s, Place const& place) {
    return place.row * (int64_t(s.heads) * s.head_dim) + place.column;
  }
};

// 16 bytes that nobody writes meanwhile. WHY their whole line of 128 bytes comes to L2: where heads
// share lines, the rest of one is asked for soon (head dims 80 and 96, but rotated blocks of 384 at
// 80: 1 to 4 % faster; 24, 40 and 72 3 to 7 %; 64, 128 and 256 the same; H200, 2026-11-24).
CUTE_DEVICE uint4 load_with_line(void const* source) {
  uint4 four;
  asm volatile("ld.global.nc.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
               : "l"(source));
  return four;
}

// What a thread has of x, as it lies in memory, at multiples of 16 bytes: two spans of columns or
// four chunks. What is not loaded stays as it is.
template <class Element>
struct RawRow {
  static constexpr bool kIsWide = sizeof(Element) == 4;
  static constexpr int kWords = kLaneColumns * int(sizeof(Element)) / 4;

  uint32_t words[kWords];

  CUTE_DEVICE void clear() {
    CUTE_UNROLL
    for (uint32_t& word : words) {
      word = 0;
    }
  }

  // source: of the thread. used: rows of the tile that count.
  CUTE_DEVICE void load(Element const* source, ThreadPlace const& place, int used, int64_t) {
    if (place.row < used) {
      load_columns<kSpanColumns>(words, source, place.first_columns);
      load_columns<kSpanColumns>(words + kWords / 2, source + place.distance, place.second_columns);
    }
  }

  CUTE_DEVICE void load(Element const* source, ChunkPlace const& place, int used,
                        int64_t row_stride) {
    CUTE_UNROLL
    for (int i = 0; i < kChunkRows; ++i) {
      bool const counts = place.row + i * place.row_step < used;
      load_columns<kChunkColumns>(words + kWords / kChunkRows * i,
                                  source + i * place.row_step * row_stride,
                                  counts ? kChunkColumns : 0);
    }
  }

 private:
  // The first `columns`. WHY every 16 bytes by themselves: the compiler puts moves and waits
  // between the loads where one condition is inside another (head dim 64, not rotated, 16k tokens:
  // 56 us for 31; H200, 2026-11-23).
  template <int kMost>
  static CUTE_DEVICE void load_columns(uint32_t* to, Element const* source, int columns) {
    constexpr int kFour = 16 / int(sizeof(Element));  // columns of four words
    CUTE_UNROLL
    for (int i = 0; i < kMost / kFour; ++i) {
      if (columns > kFour * i) {
        uint4 const four = load_with_line(source + kFour * i);
        to[4 * i] = four.x;
        to[4 * i + 1] = four.y;
        to[4 * i + 2] = four.z;
        to[4 * i + 3] = four.w;
      }
    }
  }
};

// 32 values, cast: of a row, or 8 of each of four rows (ChunkPlace).
struct CastRow {
  uint32_t fours[kLaneColumns / 4];

  CUTE_DEVICE void clear() {
    CUTE_UNROLL
    for (uint32_t& four : fours) {
      four = 0;
    }
  }
};

CUTE_DEVICE uint32_t cast_four(float2 first, float2 second, float factor) {
  return pack_four_e4m3(multiply_exactly(first.x, factor), multiply_exactly(first.y, factor),
                        multiply_exactly(second.x, factor), multiply_exactly(second.y, factor));
}

struct NoRotation {
  static constexpr float norm = 1.f;

  template <class Place>
  explicit CUTE_DEVICE NoRotation(Place const&) {}
};

// A row that is not rotated, or chunks of four, as in memory: of 16 bits half the registers.
template <class Element>
class PlainRow {
  using Raw = RawRow<Element>;
  static constexpr uint32_t kHalfInfinity = kIsBFloat<Element> ? 0x7f80u : 0x7c00u;

 public:
  static constexpr bool kMayBeInfinite = true;
  static constexpr int kWords = Raw::kWords;

  uint32_t words[kWords];

  CUTE_DEVICE float unit() const { return 1.f; }
  CUTE_DEVICE void set_unit(float) {}

  template <class Place>
  CUTE_DEVICE void take(Raw const& raw, Place const&, uint32_t const*, NoRotation const&) {
    CUTE_UNROLL
    for (int i = 0; i < kWords; ++i) {
      words[i] = raw.words[i];
    }
  }

  CUTE_DEVICE void rotate(NoRotation const&) {}

  // The largest magnitude that is a number.
  CUTE_DEVICE float largest(float) const { return fmaxf(largest_magnitude<Element>(words), 0.f); }

  CUTE_DEVICE void make_infinities_nan() {
    CUTE_UNROLL
    for (uint32_t& word : words) {
      if constexpr (Raw::kIsWide) {
        word |= (word & 0x7fffffffu) == kInfinity ? 0x7fffffffu : 0u;
      } else {
        word |= (word & 0x7fffu) == kHalfInfinity ? 0x7fffu : 0u;
        word |= (word >> 16 & 0x7fffu) == kHalfInfinity ? 0x7fff0000u : 0u;
      }
    }
  }

  CUTE_DEVICE CastRow cast(float factor) const {
    CastRow result;
    CUTE_UNROLL
    for (int i = 0; i < kLaneColumns / 4; ++i) {
      result.fours[i] = cast_four(columns(4 * i), columns(4 * i + 2), factor);
    }
    return result;
  }

 private:
  // Columns i and i + 1.
  CUTE_DEVICE float2 columns(int i) const {
    if constexpr (Raw::kIsWide) {
      return make_float2(__uint_as_float(words[i]), __uint_as_float(words[i + 1]));
    } else {
      return unpack_two<Element>(words[i / 2]);
    }
  }
};

CUTE_DEVICE float scale_of(uint32_t maximum_bits) {
  return divide_by_448(fmaxf(__uint_as_float(maximum_bits), kSmallestMaximum));
}

// What a rotated value is multiplied by before it is cast.
CUTE_DEVICE float factor_of(float norm, float scale) {
  return multiply_exactly(norm, invert(scale));
}

}  // namespace fa3
