// A thread has two chunks of 16 bytes of a row: it loads them, finds the sequence of its token and
// the slot behind it, rotates, quantises for a cache of e4m3 and stores. Rows outside the cache are
// not written.
#include "device/barriers.h"
#include "device/math.h"
#include "kvcache/append.h"
#include "launch/launch.h"

namespace fa3 {
namespace {

constexpr uint32_t kAllLanes = 0xffffffffu;

enum class AppendTensor { kKeys, kValues, kQueries };

struct Chunk {
  uint32_t words[4];

  static CUTE_DEVICE Chunk load(char const* source) {
    uint4 const four = __ldg(reinterpret_cast<uint4 const*>(source));
    return Chunk{four.x, four.y, four.z, four.w};
  }

  static CUTE_DEVICE Chunk of_nan() { return Chunk{~0u, ~0u, ~0u, ~0u}; }

  CUTE_DEVICE void store(char* target) const {
    *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
  }
};

// Its eight elements over the scale, as e4m3.
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

// -------------------------------------------------------------------------------------- sequences
// The whole warp has one number.
CUTE_DEVICE int count_up_to(int const* list, int size, int number) {
  WarpSearch search(size);
  while (search.size > 0) {
    int const index = search.probe(lane_of_warp());
    bool const is_found = index >= 0 && __ldg(list + index) <= number;
    search.narrow(__popc(__ballot_sync(kAllLanes, is_found)));
  }
  return search.begin;
}

// The same for numbers of the lanes: one search for each that differs.
CUTE_DEVICE int count_of_lanes(int const* list, int size, int number) {
  int count = 0;
  uint32_t waiting = kAllLanes;
  while (waiting != 0) {
    int const common = __shfl_sync(kAllLanes, number, __ffs(waiting) - 1);
    int const found = count_up_to(list, size, common);
    count = number == common ? found : count;
    waiting &= ~__ballot_sync(kAllLanes, number == common);
  }
  return count;
}

struct Token {
  int sequence;   // outside of [0, batch): none
  int64_t index;  // in the sequence
};

// Whole warps call it.
CUTE_DEVICE Token token_of(AppendRows const& rows, int batch, int token) {
  if (rows.cu == nullptr) {
    return Token{rows.by_entry.div(token), rows.by_entry.mod(token)};
  }
  int const sequence = count_of_lanes(rows.cu, batch + 1, token) - 1;
  bool const is_one = sequence >= 0 && sequence < batch;
  return Token{sequence, is_one ? int64_t(token) - __ldg(rows.cu + sequence) : 0};
}

// ------------------------------------------------------------------------------------------ places
CUTE_DEVICE char const* source_of(AppendRows const& rows, RowItem const& item) {
  ByteView const& source = rows.source;
  return source.data + rows.by_entry.div(item.token) * source.batch_stride +
         rows.by_entry.mod(item.token) * source.row_stride + item.head * source.head_stride;
}

// Null: the cache has no such slot.
CUTE_DEVICE char* target_of(CacheSlots const& cache, AppendRows const& rows, int sequence,
                            int64_t slot) {
  if (slot < 0 || slot >= cache.capacity) {
    return nullptr;
  }
  int page = sequence;
  if (cache.page_table != nullptr) {
    page =
        __ldg(cache.page_table + sequence * cache.page_table_stride + cache.by_page.div(int(slot)));
  } else if (cache.batch_idx != nullptr) {
    page = __ldg(cache.batch_idx + sequence);
  }
  if (page < 0 || page >= cache.pages) {
    return nullptr;
  }
  return rows.target.data + page * rows.target.batch_stride +
         cache.by_page.mod(int(slot)) * rows.target.row_stride;
}

// ---------------------------------------------------------------------------------------- rotation
// Two columns of a word, as float32.
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

// A position outside the tables gives NaN.
template <class Element>
CUTE_DEVICE void rotate(Rotary const& rotary, int64_t position, int pair, Chunk& first,
                        Chunk& second) {
  Chunk cosines = Chunk::of_nan();
  Chunk sines = Chunk::of_nan();
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

// ---------------------------------------------------------------------------------------- the rows
// Element: void where rows are only copied.
template <class Element, AppendTensor kTensor, bool kQuantises>
CUTE_DEVICE void append_rows(AppendParams const& p, AppendRows const& rows, int cta) {
  constexpr bool kIsRotated = !cute::is_same_v<Element, void> && kTensor != AppendTensor::kValues;
  Rotary const& rotary = p.rotary;
  RowItem const item = rows.schedule.item_of(cta, int(threadIdx.x));
  ChunkPair const pair =
      chunks_of_pair(item.pair, kIsRotated ? rotary.pairs : 0, !rotary.is_interleaved);
  bool const has_second = pair.second < rows.schedule.chunks;
  int const first_byte = pair.first * kAppendChunkBytes;
  int const second_byte = pair.second * kAppendChunkBytes;

  wait_for_earlier_launches();
  allow_later_launches();
  Chunk first{};
  Chunk second{};
  if (item.token >= 0) {
    char const* const source = source_of(rows, item);
    first = Chunk::load(source + first_byte);
    second = has_second ? Chunk::load(source + second_byte) : first;
  }
  Token const token = token_of(rows, p.batch, max_of(item.token, 0));
  bool const has_sequence = token.sequence >= 0 && token.sequence < p.batch;
  if (item.token < 0 || (kTensor != AppendTensor::kQueries && !has_sequence)) {
    return;
  }
  CacheSlots const& cache = p.cache;
  int64_t length = cache.length;
  if (cache.seqlens != nullptr && has_sequence) {
    length = __ldg(cache.seqlens + token.sequence);
  }
  char* target;
  if constexpr (kTensor == AppendTensor::kQueries) {
    target = rows.target.data + item.token * rows.target.row_stride;
  } else {
    // A negative length is nonsense, also where the sum is a slot.
    target = length < 0 ? nullptr : target_of(cache, rows, token.sequence, length + token.index);
  }
  if (target == nullptr) {
    return;
  }
  if constexpr (kIsRotated) {
    if (item.pair < rotary.pairs && has_sequence) {
      int64_t const begin =
          rotary.seqlens != nullptr ? __ldg(rotary.seqlens + token.sequence) : length;
      bool const is_shared = kTensor == AppendTensor::kQueries && !rotary.is_per_query;
      rotate<Element>(rotary, begin + (is_shared ? 0 : token.index), item.pair, first, second);
    }
  }
  target += item.head * rows.target.head_stride;
  if constexpr (kQuantises && kTensor != AppendTensor::kQueries) {
    ScaleView const& view = rows.scale;
    float const scale =
        view.data == nullptr
            ? 1.f
            : __ldg(view.data + token.sequence * view.batch_stride + item.head * view.head_stride);
    *reinterpret_cast<uint2*>(target + first_byte / 2) = quantised<Element>(first, scale);
    if (has_second) {
      *reinterpret_cast<uint2*>(target + second_byte / 2) = quantised<Element>(second, scale);
    }
    return;
  }
  first.store(target + first_byte);
  if (has_second) {
    second.store(target + second_byte);
  }
}

template <class Element, bool kQuantises>
__global__ void __launch_bounds__(kAppendThreads)
    append_kernel(AppendParams const __grid_constant__ p) {
  int const cta = int(blockIdx.x);
  int const v_begin = int(p.k.schedule.ctas);
  int const q_begin = v_begin + int(p.v.schedule.ctas);
  if (cta < v_begin) {
    append_rows<Element, AppendTensor::kKeys, kQuantises>(p, p.k, cta);
  } else if (cta < q_begin) {
    append_rows<Element, AppendTensor::kValues, kQuantises>(p, p.v, cta - v_begin);
  } else {
    append_rows<Element, AppendTensor::kQueries, kQuantises>(p, p.q, cta - q_begin);
  }
}

}  // namespace

void launch_append(AppendParams const& params, void* stream) {
  LaunchShape const shape{"append_cache", int(params.ctas()), kAppendThreads, 0};
  bind_thread(shape.variant, shape.grid, 0);
  bool const is_half = params.dtype == Dtype::kFloat16;
  auto* const kernel = params.quantises ? is_half ? append_kernel<cutlass::half_t, true>
                                                  : append_kernel<cutlass::bfloat16_t, true>
                       : params.rotary.cos == nullptr ? append_kernel<void, false>
                       : is_half                      ? append_kernel<cutlass::half_t, false>
                                                      : append_kernel<cutlass::bfloat16_t, false>;
  launch_early(kernel, shape, params, stream);
}

}  // namespace fa3
