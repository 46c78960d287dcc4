// What the kernels of quantize_fp8 share: the tile and columns of a thread, loads, rotation, casts
// and stores.
#pragma once

#include <bit>

#include "quantize/arithmetic.h"
#include "quantize/quantize.h"

namespace fa3 {

constexpr uint32_t kInfinity = 0x7f800000u;
constexpr float kSmallestMaximum = 0x1p-64f;
// In place of the head dim that a kernel is made for: any, and not rotated.
constexpr int kPlain = -1;

// kDim: columns of a row, where the compiler is to know; else not above 0. rows: of the CTA.
template <int kDim>
CUTE_DEVICE ThreadPlace place_of_thread(QuantizeShape const& s, int rows) {
  int const head_dim = kDim > 0 ? kDim : s.head_dim;
  ThreadPlace place = thread_place(int(threadIdx.x), head_dim, rows, 1);
  bool const is_one_piece = kDim > 0 && std::has_single_bit(unsigned(kDim));
  // The lanes of a warp have the same width: the compiler is to know that too.
  place.width = is_one_piece ? kDim : __shfl_sync(0xffffffffu, place.width, 0);
  place.row_step = rows_of_warp(place.width);
  __builtin_assume(kDim <= 0 || place.width >= (kDim & -kDim));
  return place;
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

// Where a thread reads and writes: its row and first span, of one head after the other.
template <class Element>
struct Cursor {
  Element const* source;
  uint8_t* target;

  CUTE_DEVICE Cursor(QuantizeParams const& p, ThreadPlace const& place, QuantizeTile const& tile,
                     int head) {
    source = static_cast<Element const*>(p.x.data) + source_of(p, tile, head) +
             place.row * p.x.row_stride + place.column;
    target = p.values + target_of(p.shape, tile, head) + target_in_tile(p.shape, place);
  }

  static CUTE_DEVICE int64_t target_in_tile(QuantizeShape const& s, ThreadPlace const& place) {
    return place.row * (int64_t(s.heads) * s.head_dim) + place.column;
  }
};

// 16 columns as they lie in memory, at a multiple of 16 bytes.
template <class Element>
struct RawSpan {
  static constexpr int kWords = kSpanColumns * int(sizeof(Element)) / 4;
  static constexpr bool kIsWide = sizeof(Element) == 4;

  uint32_t words[kWords];

  CUTE_DEVICE void clear() {
    CUTE_UNROLL
    for (uint32_t& word : words) {
      word = 0;
    }
  }

  // is_full: all columns, else the first 8.
  CUTE_DEVICE void load(Element const* source, bool is_full) {
    CUTE_UNROLL
    for (int i = 0; i < kWords / 4; ++i) {
      if (i < kWords / 8 || is_full) {
        uint4 const four = __ldg(reinterpret_cast<uint4 const*>(source) + i);
        words[4 * i] = four.x;
        words[4 * i + 1] = four.y;
        words[4 * i + 2] = four.z;
        words[4 * i + 3] = four.w;
      }
    }
  }
};

// Spans that are not loaded stay 0, but for their signs.
template <class Element>
struct RawRow {
  RawSpan<Element> spans[2];

  CUTE_DEVICE void clear() {
    spans[0].clear();
    spans[1].clear();
  }

  CUTE_DEVICE void load(Element const* source, ThreadPlace const& place, bool counts) {
    if (counts) {
      spans[0].load(source, place.has_full_span());
    }
    if (counts && place.has_second()) {
      spans[1].load(source + place.width / 2, true);
    }
  }
};

CUTE_DEVICE void store_span(uint8_t* target, uint4 values, bool is_full, bool is_aligned) {
  if (is_full && is_aligned) {
    *reinterpret_cast<uint4*>(target) = values;
    return;
  }
  reinterpret_cast<uint2*>(target)[0] = make_uint2(values.x, values.y);
  if (is_full) {
    reinterpret_cast<uint2*>(target)[1] = make_uint2(values.z, values.w);
  }
}

// 32 columns, cast.
struct CastRow {
  uint32_t fours[kLaneColumns / 4];

  // A row that does not count is 0. is_aligned: rows are multiples of 16 columns.
  CUTE_DEVICE void store(uint8_t* target, ThreadPlace const& place, bool exists, bool counts,
                         bool is_aligned) const {
    uint4 const zeros = make_uint4(0, 0, 0, 0);
    uint4 const first = counts ? make_uint4(fours[0], fours[1], fours[2], fours[3]) : zeros;
    uint4 const second = counts ? make_uint4(fours[4], fours[5], fours[6], fours[7]) : zeros;
    if (!exists) {
      return;
    }
    store_span(target, first, place.has_full_span(), is_aligned);
    if (place.has_second()) {
      store_span(target + place.width / 2, second, true, is_aligned);
    }
  }
};

CUTE_DEVICE uint32_t cast_four(float2 first, float2 second, float factor) {
  return pack_four_e4m3(multiply_exactly(first.x, factor), multiply_exactly(first.y, factor),
                        multiply_exactly(second.x, factor), multiply_exactly(second.y, factor));
}

// A row that is not rotated, as it lies in memory: of 16 bits it takes half the registers.
template <class Element>
class PlainRow {
  using Raw = RawSpan<Element>;
  static constexpr uint32_t kHalfInfinity = kIsBFloat<Element> ? 0x7f80u : 0x7c00u;

 public:
  static constexpr bool kMayBeInfinite = true;
  static constexpr int kWords = 2 * Raw::kWords;

  uint32_t words[kWords];

  CUTE_DEVICE float unit() const { return 1.f; }
  CUTE_DEVICE void set_unit(float) {}

  CUTE_DEVICE void take(RawRow<Element> const& raw, ThreadPlace const&, uint32_t const*) {
    CUTE_UNROLL
    for (int i = 0; i < kWords; ++i) {
      words[i] = raw.spans[i / Raw::kWords].words[i % Raw::kWords];
    }
  }

  template <int kDim>
  CUTE_DEVICE void rotate(int) {}

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
