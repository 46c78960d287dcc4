// Row operations of the append kernels: find a row, load two 16-byte chunks, rotate and quantise
// them.
#pragma once

#include "device/math.h"
#include "kvcache/append.h"

namespace fa3 {

constexpr uint32_t kAllLanes = 0xffffffffu;

enum class AppendTensor { kKeys, kValues, kQueries };

struct Chunk {
  uint32_t words[4];

  static CUTE_DEVICE Chunk load(char const* source) {
    uint4 const four = __ldg(reinterpret_cast<uint4 const*>(source));
    return Chunk{four.x, four.y, four.z, four.w};
  }

  static CUTE_DEVICE Chunk all_nan() { return Chunk{~0u, ~0u, ~0u, ~0u}; }

  CUTE_DEVICE void store(char* target) const {
    *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
  }
};

// Divides the eight elements of a chunk by the scale and converts them to e4m3.
template <class Element>
CUTE_DEVICE uint2 quantised(Chunk const& chunk, float scale) {
  float values[8];
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    float2 const two = unpack_two<Element>(chunk.words[i]);
    values[2 * i] = __fdiv_rn(two.x, scale);
    values[2 * i + 1] = __fdiv_rn(two.y, scale);
  }
  return make_uint2(pack_four_e4m3(values[0], values[1], values[2], values[3]),
                    pack_four_e4m3(values[4], values[5], values[6], values[7]));
}

// Counts the leading indices below `size` for which is_found(index) holds. All lanes of the warp
// pass the same arguments.
template <class IsFound>
CUTE_DEVICE int count_up_to(int size, IsFound const& is_found) {
  WarpSearch search(size);
  while (search.size > 0) {
    int const index = search.probe(lane_of_warp());
    search.narrow(__popc(__ballot_sync(kAllLanes, index >= 0 && is_found(index))));
  }
  return search.begin;
}

CUTE_DEVICE char const* source_of(AppendRows const& rows, RowItem const& item) {
  ByteView const& source = rows.source;
  return source.data + rows.by_entry.div(item.token) * source.batch_stride +
         rows.by_entry.mod(item.token) * source.row_stride + item.head * source.head_stride;
}

// Rotates the two columns of a word, in float32.
template <class Element>
CUTE_DEVICE uint32_t rotate_pair(uint32_t word, float cosine, float sine) {
  float2 const x = unpack_two<Element>(word);
  return pack_two<Element>(x.x * cosine - x.y * sine, x.y * cosine + x.x * sine);
}

template <class Element>
CUTE_DEVICE void rotate_interleaved(Chunk& first, Chunk& second, Chunk const& cosines,
                                    Chunk const& sines) {
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    float2 const c = unpack_two<Element>(cosines.words[i]);
    float2 const s = unpack_two<Element>(sines.words[i]);
    Chunk& own = i < 2 ? first : second;
    int const word = 2 * i % 4;
    own.words[word] = rotate_pair<Element>(own.words[word], c.x, s.x);
    own.words[word + 1] = rotate_pair<Element>(own.words[word + 1], c.y, s.y);
  }
}

template <class Element>
CUTE_DEVICE void rotate_halves(Chunk& first, Chunk& second, Chunk const& cosines,
                               Chunk const& sines) {
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    float2 const c = unpack_two<Element>(cosines.words[i]);
    float2 const s = unpack_two<Element>(sines.words[i]);
    float2 const a = unpack_two<Element>(first.words[i]);
    float2 const b = unpack_two<Element>(second.words[i]);
    first.words[i] = pack_two<Element>(a.x * c.x - b.x * s.x, a.y * c.y - b.y * s.y);
    second.words[i] = pack_two<Element>(b.x * c.x + a.x * s.x, b.y * c.y + a.y * s.y);
  }
}

// Converts eight 16-bit columns to float32.
template <class Element>
CUTE_DEVICE void unpack_chunk(Chunk const& chunk, float* values) {
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    float2 const two = unpack_two<Element>(chunk.words[i]);
    values[2 * i] = two.x;
    values[2 * i + 1] = two.y;
  }
}

// Converts sixteen e4m3 columns to float32.
CUTE_DEVICE void unpack_e4m3(Chunk const& chunk, float (&values)[16]) {
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    uint32_t low;
    uint32_t high;
    convert_four_e4m3<cutlass::half_t>(chunk.words[i], low, high);
    float2 const first = unpack_two<cutlass::half_t>(low);
    float2 const second = unpack_two<cutlass::half_t>(high);
    values[4 * i] = first.x;
    values[4 * i + 1] = first.y;
    values[4 * i + 2] = second.x;
    values[4 * i + 3] = second.y;
  }
}

CUTE_DEVICE Chunk pack_e4m3(float const (&values)[16]) {
  Chunk chunk;
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    float const* const four = values + 4 * i;
    chunk.words[i] = pack_four_e4m3(four[0], four[1], four[2], four[3]);
  }
  return chunk;
}

// Loads sixteen columns of a table of any dtype. If `table` is nullptr, they are NaN.
CUTE_DEVICE void load_table(Dtype dtype, char const* table, int pair, float (&values)[16]) {
  Chunk first = Chunk::all_nan();
  Chunk second = Chunk::all_nan();
  if (dtype == Dtype::kFloat8E4M3) {
    unpack_e4m3(table == nullptr ? first : Chunk::load(table + pair * kAppendChunkBytes), values);
    return;
  }
  if (table != nullptr) {
    first = Chunk::load(table + 2 * pair * kAppendChunkBytes);
    second = Chunk::load(table + (2 * pair + 1) * kAppendChunkBytes);
  }
  if (dtype == Dtype::kFloat16) {
    unpack_chunk<cutlass::half_t>(first, values);
    unpack_chunk<cutlass::half_t>(second, values + 8);
  } else {
    unpack_chunk<cutlass::bfloat16_t>(first, values);
    unpack_chunk<cutlass::bfloat16_t>(second, values + 8);
  }
}

// Rotates 32 e4m3 columns in float32 and rounds once.
CUTE_DEVICE void rotate_e4m3(Rotary const& rotary, int64_t position, int pair, Chunk& first,
                             Chunk& second) {
  bool const is_inside = position >= 0 && position < rotary.positions;
  float c[16];
  float s[16];
  load_table(rotary.dtype, is_inside ? rotary.cos + position * rotary.cos_stride : nullptr, pair,
             c);
  load_table(rotary.dtype, is_inside ? rotary.sin + position * rotary.sin_stride : nullptr, pair,
             s);
  float x[2][16];
  unpack_e4m3(first, x[0]);
  unpack_e4m3(second, x[1]);
  auto const rotate_at = [&](float& a, float& b, int i) {
    float const rotated = a * c[i] - b * s[i];
    b = b * c[i] + a * s[i];
    a = rotated;
  };
  CUTE_UNROLL
  for (int i = 0; i < 16; ++i) {
    if (rotary.is_interleaved) {
      rotate_at(x[i / 8][2 * i % 16], x[i / 8][2 * i % 16 + 1], i);
    } else {
      rotate_at(x[0][i], x[1][i], i);
    }
  }
  first = pack_e4m3(x[0]);
  second = pack_e4m3(x[1]);
}

// Rotates two chunks. A position outside the tables gives NaN.
template <class Element>
CUTE_DEVICE void rotate(Rotary const& rotary, int64_t position, int pair, Chunk& first,
                        Chunk& second) {
  Chunk cosines = Chunk::all_nan();
  Chunk sines = Chunk::all_nan();
  if (position >= 0 && position < rotary.positions) {
    int const column = pair * kAppendChunkBytes;
    cosines = Chunk::load(rotary.cos + position * rotary.cos_stride + column);
    sines = Chunk::load(rotary.sin + position * rotary.sin_stride + column);
  }
  if (rotary.is_interleaved) {
    rotate_interleaved<Element>(first, second, cosines, sines);
  } else {
    rotate_halves<Element>(first, second, cosines, sines);
  }
}

// The two chunks of a pair in a row (core/append_rows.h).
template <class Element, AppendTensor kTensor>
struct RowChunks {
  static constexpr bool kIsRotated =
      !cute::is_same_v<Element, void> && kTensor != AppendTensor::kValues;

  bool has_second;
  int first_byte;
  int second_byte;
  Chunk first{};
  Chunk second{};

  CUTE_DEVICE RowChunks(AppendRows const& rows, Rotary const& rotary, int pair) {
    ChunkPair const chunks =
        chunks_of_pair(pair, kIsRotated ? rotary.pairs : 0, !rotary.is_interleaved);
    has_second = chunks.second < rows.schedule.chunks;
    first_byte = chunks.first * kAppendChunkBytes;
    second_byte = chunks.second * kAppendChunkBytes;
  }

  CUTE_DEVICE void load(char const* source) {
    first = Chunk::load(source + first_byte);
    second = has_second ? Chunk::load(source + second_byte) : first;
  }

  CUTE_DEVICE void rotate_at(Rotary const& rotary, int64_t position, int pair) {
    if constexpr (kIsRotated) {
      if (pair < rotary.pairs) {
        if constexpr (cute::is_same_v<Element, cutlass::float_e4m3_t>) {
          rotate_e4m3(rotary, position, pair, first, second);
        } else {
          rotate<Element>(rotary, position, pair, first, second);
        }
      }
    }
  }

  CUTE_DEVICE void store(char* target) const {
    first.store(target + first_byte);
    if (has_second) {
      second.store(target + second_byte);
    }
  }

  CUTE_DEVICE void store_quantised(char* target, float scale) const {
    *reinterpret_cast<uint2*>(target + first_byte / 2) = quantised<Element>(first, scale);
    if (has_second) {
      *reinterpret_cast<uint2*>(target + second_byte / 2) = quantised<Element>(second, scale);
    }
  }
};

}  // namespace fa3
