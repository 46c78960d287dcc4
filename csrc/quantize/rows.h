// What the kernels of quantize_fp8 share: the tile and columns of a thread, loads, rotation, casts
// and stores.
#pragma once

#include <bit>
#include <type_traits>

#include "quantize/chunk.h"
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

  // spread: spread_signs() of the spans of a row of this head.
  CUTE_DEVICE void change_signs(ThreadPlace const& place, uint32_t const* spread) {
    uint32_t const* const first = spread + unsigned(place.column) / kSpanColumns;
    LaneSigns<Element> const signs(first[0], first[unsigned(place.width) / kLaneColumns]);
    signs.template apply<0>(spans[0]);
    signs.template apply<1>(spans[1]);
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
    if (!exists) {
      return;
    }
    uint4 const zeros = make_uint4(0, 0, 0, 0);
    uint4 const first = make_uint4(fours[0], fours[1], fours[2], fours[3]);
    store_span(target, counts ? first : zeros, place.has_full_span(), is_aligned);
    if (place.has_second()) {
      uint4 const second = make_uint4(fours[4], fours[5], fours[6], fours[7]);
      store_span(target + place.width / 2, counts ? second : zeros, true, is_aligned);
    }
  }
};

CUTE_DEVICE uint32_t cast_four(float const* four, float factor) {
  return pack_four_e4m3(multiply_exactly(four[0], factor), multiply_exactly(four[1], factor),
                        multiply_exactly(four[2], factor), multiply_exactly(four[3], factor));
}

struct Row {
  float columns[kLaneColumns];

  template <class Element>
  CUTE_DEVICE void unpack(RawRow<Element> const& raw) {
    raw.spans[0].unpack(columns);
    raw.spans[1].unpack(columns + kSpanColumns);
  }

  // The largest absolute value; NaN does not count. Four at a time: each waits for the one before.
  CUTE_DEVICE float largest() const {
    float found[4] = {0.f, 0.f, 0.f, 0.f};
    CUTE_UNROLL
    for (int i = 0; i < kLaneColumns; ++i) {
      found[i % 4] = fmaxf(found[i % 4], fabsf(columns[i]));
    }
    return fmaxf(fmaxf(found[0], found[1]), fmaxf(found[2], found[3]));
  }

  CUTE_DEVICE void make_infinities_nan() {
    CUTE_UNROLL
    for (float& column : columns) {
      column = is_infinite(column) ? __uint_as_float(0x7fffffffu) : column;
    }
  }

  // kDim: 0 or of one or two pieces.
  template <int kDim>
  CUTE_DEVICE void rotate(int width) {
    constexpr int kWidest = int(std::bit_floor(unsigned(kDim)));
    if (kDim == kWidest || width == kWidest) {
      rotate_row<kWidest>(columns, width);
    } else {
      rotate_row<kDim - kWidest>(columns, width);
    }
  }

  // Each value times `factor`.
  CUTE_DEVICE CastRow cast(float factor) const {
    CastRow result;
    CUTE_UNROLL
    for (int i = 0; i < kLaneColumns / 4; ++i) {
      result.fours[i] = cast_four(columns + 4 * i, factor);
    }
    return result;
  }
};

// A row that is not rotated, as it lies in memory: it takes half the registers.
template <class Element>
class PlainRow {
  static constexpr bool kIsBFloat = std::is_same_v<Element, cutlass::bfloat16_t>;
  static constexpr uint32_t kHalfInfinity = kIsBFloat ? 0x7f80u : 0x7c00u;

  RawRow<Element> raw_;

  CUTE_DEVICE Row unpacked() const {
    Row row;
    row.unpack(raw_);
    return row;
  }

 public:
  CUTE_DEVICE void unpack(RawRow<Element> const& raw) { raw_ = raw; }

  template <int kDim>
  CUTE_DEVICE void rotate(int) {}

  // Two at a time, as integers: without signs they are ordered as the floats are, NaN behind all.
  // That leaves nothing unpacked, which ptxas (13.0) would keep in memory until the cast.
  CUTE_DEVICE float largest() const {
    uint32_t found[2] = {0, 0};
    CUTE_UNROLL
    for (int i = 0; i < RawSpan<Element>::kWords; ++i) {
      found[0] = max_of_halves(found[0], raw_.spans[0].words[i] & 0x7fff7fffu);
      found[1] = max_of_halves(found[1], raw_.spans[1].words[i] & 0x7fff7fffu);
    }
    uint32_t const two = max_of_halves(found[0], found[1]);
    uint32_t const one = max(two & 0xffffu, two >> 16);
    return one > kHalfInfinity ? unpacked().largest() : unpack_two<Element>(one).x;
  }

  CUTE_DEVICE void make_infinities_nan() {
    CUTE_UNROLL
    for (RawSpan<Element>& span : raw_.spans) {
      CUTE_UNROLL
      for (uint32_t& word : span.words) {
        word |= (word & 0x7fffu) == kHalfInfinity ? 0x7fffu : 0u;
        word |= (word >> 16 & 0x7fffu) == kHalfInfinity ? 0x7fff0000u : 0u;
      }
    }
  }

  CUTE_DEVICE CastRow cast(float factor) const { return unpacked().cast(factor); }
};

CUTE_DEVICE float scale_of(uint32_t maximum_bits) {
  return divide_by_448(fmaxf(__uint_as_float(maximum_bits), kSmallestMaximum));
}

// What a rotated value is multiplied by before it is cast.
CUTE_DEVICE float factor_of(float norm, float scale) {
  return multiply_exactly(norm, invert(scale));
}

}  // namespace fa3
