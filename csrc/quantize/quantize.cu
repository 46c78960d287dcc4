// A CTA has a tile of rows, of one head after the other: it loads, rotates, finds the largest
// value, casts and writes. The next head is on its way while one is worked on.
#include "quantize/quantize.h"

#include <bit>

#include "device/barriers.h"
#include "device/launch.h"
#include "quantize/chunk.h"

namespace fa3 {
namespace {

constexpr int kMostThreads = 512;
constexpr int kMostWarps = kMostThreads / 32;
constexpr int kMostCtaHeads = 4;
constexpr int kFewRows = 1;  // of a thread; many where a block has too many rows for that
constexpr int kManyRows = 2;
constexpr uint32_t kInfinity = 0x7f800000u;
constexpr float kSmallestMaximum = 0x1p-64f;

// What a launch does: everything in one pass over x, or the first or second of two.
enum class Pass { kOnly, kMaxima, kCast };

// The largest of what the threads of a CTA have; bits of floats that are not negative are ordered
// as the floats are.
struct Maximum {
  uint32_t of_warps[2][kMostWarps];
  // INVARIANT: a barrier separates the use of a row of of_warps from its next use: they take turns.
  CUTE_DEVICE uint32_t of_all(uint32_t bits, int turn) {
    int const lane = int(threadIdx.x) % 32;
    uint32_t const of_warp = __reduce_max_sync(0xffffffffu, bits);
    if (lane == 0) {
      of_warps[turn][threadIdx.x / 32] = of_warp;
    }
    __syncthreads();
    bool const is_one = lane < int(blockDim.x) / 32;
    return __reduce_max_sync(0xffffffffu, is_one ? of_warps[turn][lane] : 0);
  }
};

// kDim: columns of a row, where the compiler is to know; else 0.
template <int kDim, int kRows>
CUTE_DEVICE ThreadPlace place_of_thread(QuantizeShape const& s) {
  int const head_dim = kDim > 0 ? kDim : s.head_dim;
  ThreadPlace place = thread_place(int(threadIdx.x), head_dim, s.tile, kRows);
  bool const is_one_piece = kDim > 0 && std::has_single_bit(unsigned(kDim));
  // The lanes of a warp have the same width: the compiler is to know that too.
  place.width = is_one_piece ? kDim : __shfl_sync(0xffffffffu, place.width, 0);
  place.row_step = rows_of_warp(place.width);
  __builtin_assume(kDim == 0 || place.width >= (kDim & -kDim));
  return place;
}

// How many of first_tile(0 .. batch) are not behind `tile`, less one: the last entry that does not
// begin behind it. Each step asks 32 of them. Whole warps call it; nonsense gives any entry.
__device__ int entry_of_tile(QuantizeParams const& p, int tile) {
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

__device__ QuantizeTile tile_of_cta(QuantizeParams const& p, int tile) {
  return p.shape.is_packed
             ? packed_tile(p.shape, p.cu_seqlens, p.seqused, tile, entry_of_tile(p, tile))
             : dense_tile(p.shape, tile);
}

// Where a thread reads and writes: its first row and span, of one head after the other.
template <class Element>
struct Cursor {
  Element const* source;
  int64_t source_step;  // to the next row of the thread
  uint8_t* target;
  int64_t target_step;

  CUTE_DEVICE Cursor(QuantizeParams const& p, ThreadPlace const& place, QuantizeTile const& tile,
                     int head) {
    QuantizeShape const& s = p.shape;
    int64_t const entry = s.is_packed ? 0 : tile.entry;
    int64_t const row = tile.begin + place.row;
    source = static_cast<Element const*>(p.x.data) + entry * p.x.batch_stride +
             row * p.x.row_stride + head * p.x.head_stride + place.column;
    source_step = place.row_step * p.x.row_stride;
    target = p.values + ((entry * s.rows + row) * s.heads + head) * s.head_dim + place.column;
    target_step = place.row_step * (int64_t(s.heads) * s.head_dim);
  }
};

// Spans that are not loaded stay 0, but for their signs.
template <class Element, int kRows>
struct RawRows {
  RawSpan<Element> spans[kRows][2];

  CUTE_DEVICE void clear() {
    CUTE_UNROLL
    for (auto& row : spans) {
      row[0].clear();
      row[1].clear();
    }
  }

  CUTE_DEVICE void load(Cursor<Element> const& at, ThreadPlace const& place, int used) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      Element const* const columns = at.source + i * at.source_step;
      bool const is_used = place.row + i * place.row_step < used;
      if (is_used) {
        spans[i][0].load(columns, place.has_full_span());
      }
      if (is_used && place.has_second()) {
        spans[i][1].load(columns + place.width / 2, true);
      }
    }
  }

  // spread: spread_signs() of the spans of a row of this head.
  CUTE_DEVICE void change_signs(ThreadPlace const& place, uint32_t const* spread) {
    uint32_t const* const first = spread + unsigned(place.column) / kSpanColumns;
    LaneSigns<Element> const signs(first[0], first[unsigned(place.width) / kLaneColumns]);
    CUTE_UNROLL
    for (auto& row : spans) {
      signs.template apply<0>(row[0]);
      signs.template apply<1>(row[1]);
    }
  }
};

// What a value is multiplied by, one rounded product after the other. kIsExact: norm is a power of
// two, so that one product does. Both give 0 where a product would be subnormal.
template <bool kIsExact>
struct Factors {
  float norm;
  float inverse;

  CUTE_DEVICE Factors(float norm_, float inverse_)
      : norm(norm_), inverse(kIsExact ? multiply_exactly(norm_, inverse_) : inverse_) {}

  CUTE_DEVICE float times(float column) const {
    return multiply_exactly(kIsExact ? column : multiply_exactly(column, norm), inverse);
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

template <int kRows>
struct Rows {
  float columns[kRows][kLaneColumns];

  template <class Element>
  CUTE_DEVICE void unpack(RawRows<Element, kRows> const& raw) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      raw.spans[i][0].unpack(columns[i]);
      raw.spans[i][1].unpack(columns[i] + kSpanColumns);
    }
  }

  // The largest absolute value; NaN does not count. Four at a time: each waits for the one before.
  CUTE_DEVICE float largest() const {
    float found[4] = {0.f, 0.f, 0.f, 0.f};
    CUTE_UNROLL
    for (int i = 0; i < kRows * kLaneColumns; ++i) {
      found[i % 4] = fmaxf(found[i % 4], fabsf(columns[i / kLaneColumns][i % kLaneColumns]));
    }
    return fmaxf(fmaxf(found[0], found[1]), fmaxf(found[2], found[3]));
  }

  CUTE_DEVICE void make_infinities_nan() {
    CUTE_UNROLL
    for (int i = 0; i < kRows * kLaneColumns; ++i) {
      float& column = columns[i / kLaneColumns][i % kLaneColumns];
      column = is_infinite(column) ? __uint_as_float(0x7fffffffu) : column;
    }
  }

  // 16 columns, times both factors.
  template <class Multiply>
  CUTE_DEVICE uint4 cast(float const* span, Multiply const& factors) const {
    uint32_t fours[kSpanColumns / 4];
    CUTE_UNROLL
    for (int i = 0; i < kSpanColumns / 4; ++i) {
      float const* const four = span + 4 * i;
      fours[i] = pack_four_e4m3(factors.times(four[0]), factors.times(four[1]),
                                factors.times(four[2]), factors.times(four[3]));
    }
    return make_uint4(fours[0], fours[1], fours[2], fours[3]);
  }

  // Rows of the tile that do not count are 0. is_aligned: rows are multiples of 16 columns.
  template <class Element, class Multiply>
  CUTE_DEVICE void store(Cursor<Element> const& at, ThreadPlace const& place,
                         QuantizeTile const& tile, Multiply const& factors, bool is_aligned) const {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      int const row = place.row + i * place.row_step;
      uint8_t* const target = at.target + i * at.target_step;
      uint4 const zeros = make_uint4(0, 0, 0, 0);
      bool const is_used = row < tile.used;
      uint4 const first = is_used ? cast(columns[i], factors) : zeros;
      uint4 const second = is_used ? cast(columns[i] + kSpanColumns, factors) : zeros;
      if (row < tile.written) {
        store_span(target, first, place.has_full_span(), is_aligned);
      }
      if (row < tile.written && place.has_second()) {
        store_span(target + place.width / 2, second, true, is_aligned);
      }
    }
  }
};

CUTE_DEVICE float scale_of(uint32_t maximum_bits) {
  return divide_by_448(fmaxf(__uint_as_float(maximum_bits), kSmallestMaximum));
}

// Where the scales of a tile that is a block go, of one head after the other. WHY not scale_place()
// for each head: its divisions take one warp longer than all the rest takes each.
struct BlockScales {
  float* next;  // null: nothing to write
  int step;

  CUTE_DEVICE BlockScales(QuantizeParams const& p, QuantizeTile const& tile, int tile_number,
                          int head) {
    QuantizeShape const& s = p.shape;
    step = s.is_packed ? s.by_tile.div(s.rows) + s.batch : int(s.by_entry_tiles.divisor);
    bool const is_place = !s.is_packed || (tile_number > 0 && tile_number <= step);
    int64_t const row = s.is_packed ? head : int64_t(tile.entry) * s.heads + head;
    int const place = s.is_packed ? tile_number - 1 : tile.index;
    next = threadIdx.x == 0 && is_place ? p.scales + row * step + place : nullptr;
  }

  CUTE_DEVICE void write(float scale) {
    if (next != nullptr) {
      *next = scale;
      next += step;
    }
  }
};

// What a first pass leaves for the second. A maximum of 0 is there already.
__device__ void add_maximum(QuantizeParams const& p, QuantizeTile const& tile, int head,
                            uint32_t bits) {
  if (threadIdx.x == 0 && bits > 0) {
    atomicMax(p.maxima + scale_place(p.shape, p.cu_seqlens, tile, head), bits);
  }
}

// The scale of this tile and head, in a second pass.
__device__ float scale_of_maxima(QuantizeParams const& p, QuantizeTile const& tile, int head) {
  QuantizeShape const& s = p.shape;
  bool const is_writer = writes_scale(s, tile, head);
  if (tile.used == 0 && !is_writer) {
    return 1.f;
  }
  int64_t const place = scale_place(s, p.cu_seqlens, tile, head);
  float const scale = scale_of(__ldg(p.maxima + place));
  if (is_writer && threadIdx.x == 0) {
    p.scales[place] = scale;
  }
  return scale;
}

// Of the heads of a CTA, in the order of the columns. A barrier follows.
struct HeadSigns {
  static constexpr int kSpans = kMostQuantizedColumns / kSpanColumns;
  uint32_t of_spans[kMostCtaHeads][kSpans];

  CUTE_DEVICE void compute(QuantizeParams const& p, int begin, int end) {
#pragma unroll 1
    for (int i = int(threadIdx.x); i < (end - begin) * kSpans; i += int(blockDim.x)) {
      int const kv_head = p.shape.by_group.div(begin + i / kSpans);
      of_spans[i / kSpans][i % kSpans] =
          spread_signs(sign_bits(p.mixed_seed, kv_head, i % kSpans * kSpanColumns));
    }
  }
};

// Whether the next head is loaded while one is worked on. More would not fit into the registers.
template <class Element, int kRows, Pass kPass>
constexpr bool kLoadsAhead = sizeof(Element) == 2 && kRows == kFewRows && kPass == Pass::kOnly;

// As few as there are without spills: other warps work while one waits for its loads.
template <class Element, int kDim, int kRows, Pass kPass>
constexpr int registers_of_thread() {
  bool const is_large = kDim == 0 && kLoadsAhead<Element, kRows, kPass>;
  return kRows == kManyRows ? 128 : is_large ? 96 : kPass == Pass::kCast ? 88 : 80;
}

// The bits of the largest finite value of the rows of a CTA, normalised. Normalising keeps the
// order, and what is finite. Infinities are rare, and made NaN when there is one.
template <int kRows>
CUTE_DEVICE uint32_t largest_of_cta(Rows<kRows>& rows, Maximum& maximum, float norm, int& turn) {
  while (true) {
    uint32_t const bits =
        maximum.of_all(__float_as_uint(multiply_exactly(rows.largest(), norm)), turn);
    turn ^= 1;
    if (bits != kInfinity) {
      return bits;
    }
    rows.make_infinities_nan();
  }
}

// kDim: 0 or of one or two pieces.
template <int kDim, int kRows>
CUTE_DEVICE void rotate(Rows<kRows>& rows, int width) {
  constexpr int kWidest = int(std::bit_floor(unsigned(kDim)));
  CUTE_UNROLL
  for (auto& row : rows.columns) {
    if (kDim == kWidest || width == kWidest) {
      rotate_row<kWidest>(row, width);
    } else {
      rotate_row<kDim - kWidest>(row, width);
    }
  }
}

// Whether all rows have one piece, of a power of four.
template <int kDim>
constexpr bool kHasExactNorm =
    std::has_single_bit(unsigned(kDim)) && std::countr_zero(unsigned(kDim)) % 2 == 0;

template <class Element, int kDim, int kRows, Pass kPass>
__global__ void __maxnreg__((registers_of_thread<Element, kDim, kRows, kPass>()))
    quantize_kernel(QuantizeParams const __grid_constant__ p) {
  constexpr bool kIsAhead = kLoadsAhead<Element, kRows, kPass>;
  bool const is_rotated = kDim > 0 || p.is_rotated;
  bool const is_aligned = kDim > 0 || p.shape.head_dim % kSpanColumns == 0;
  __shared__ Maximum maximum;
  __shared__ HeadSigns signs;
  wait_for_earlier_launches();
  QuantizeShape const& s = p.shape;
  int const tile_number = p.by_parts.div(int(blockIdx.x));
  int const begin = p.by_parts.mod(int(blockIdx.x)) * p.cta_heads;
  int const end = min_of(begin + p.cta_heads, s.heads);
  QuantizeTile const tile = tile_of_cta(p, tile_number);
  ThreadPlace const place = place_of_thread<kDim, kRows>(s);
  float const norm = is_rotated ? hadamard_norm(place.width) : 1.f;
  int turn = 0;

  Cursor<Element> cursor(p, place, tile, begin);
  BlockScales block_scales(p, tile, tile_number, begin);
  RawRows<Element, kRows> raw;
  if constexpr (kIsAhead) {
    raw.clear();
    raw.load(cursor, place, tile.used);
  }
  if (is_rotated) {
    signs.compute(p, begin, end);
    __syncthreads();
  }
  for (int head = begin; head < end; ++head) {
    if constexpr (!kIsAhead) {
      raw.clear();
      raw.load(cursor, place, tile.used);
    }
    cursor.source += p.x.head_stride;
    if (is_rotated) {
      raw.change_signs(place, signs.of_spans[head - begin]);
    }
    Rows<kRows> rows;
    rows.unpack(raw);
    if constexpr (kIsAhead) {
      raw.load(cursor, place, head + 1 < end ? tile.used : 0);
    }
    if (is_rotated) {
      rotate<kDim>(rows, place.width);
    }
    float scale = 1.f;
    if constexpr (kPass == Pass::kCast) {
      rows.make_infinities_nan();
      scale = scale_of_maxima(p, tile, head);
    } else {
      uint32_t const bits = largest_of_cta(rows, maximum, norm, turn);
      if constexpr (kPass == Pass::kMaxima) {
        add_maximum(p, tile, head, bits);
        continue;
      }
      scale = scale_of(bits);
      // Between the blocks of packed sequences, scales are 1.
      block_scales.write(tile.used > 0 ? scale : 1.f);
    }
    rows.store(cursor, place, tile, Factors<kHasExactNorm<kDim>>(norm, invert(scale)), is_aligned);
    cursor.target += kDim > 0 ? kDim : s.head_dim;
  }
  allow_later_launches();
}

// ----------------------------------------------------------------------------------------- launch
constexpr int kTwoPassTile = 32;

bool fits(QuantizeShape const& shape, int tile, int thread_rows) {
  return warps_of_tile(shape.head_dim, tile, thread_rows) <= kMostWarps;
}

template <class Element, int kDim, int kRows, Pass kPass>
void launch_pass(QuantizeParams const& params, void* stream) {
  QuantizeShape const& s = params.shape;
  int const threads = 32 * warps_of_tile(s.head_dim, s.tile, kRows);
  int const grid = int(s.tiles() * params.by_parts.divisor);
  launch_early(quantize_kernel<Element, kDim, kRows, kPass>,
               LaunchShape{"quantize_fp8", grid, threads, 0}, params, stream);
}

template <class Element>
void launch_passes(QuantizeParams const& params, void* stream) {
  if (!takes_one_pass(params.shape)) {
    launch_pass<Element, 0, kFewRows, Pass::kMaxima>(params, stream);
    launch_pass<Element, 0, kFewRows, Pass::kCast>(params, stream);
    return;
  }
  if (!fits(params.shape, params.shape.tile, kFewRows)) {
    launch_pass<Element, 0, kManyRows, Pass::kOnly>(params, stream);
    return;
  }
  constexpr bool kHasOwn = sizeof(Element) == 2;
  switch (kHasOwn && params.is_rotated ? params.shape.head_dim : 0) {
    case 64:
      return launch_pass<Element, kHasOwn ? 64 : 0, kFewRows, Pass::kOnly>(params, stream);
    case 80:
      return launch_pass<Element, kHasOwn ? 80 : 0, kFewRows, Pass::kOnly>(params, stream);
    case 96:
      return launch_pass<Element, kHasOwn ? 96 : 0, kFewRows, Pass::kOnly>(params, stream);
    case 128:
      return launch_pass<Element, kHasOwn ? 128 : 0, kFewRows, Pass::kOnly>(params, stream);
    case 192:
      return launch_pass<Element, kHasOwn ? 192 : 0, kFewRows, Pass::kOnly>(params, stream);
    case 256:
      return launch_pass<Element, kHasOwn ? 256 : 0, kFewRows, Pass::kOnly>(params, stream);
    default:
      return launch_pass<Element, 0, kFewRows, Pass::kOnly>(params, stream);
  }
}

// As many as leave threads enough to fill the GPU. What heads share, and that the next one is
// loaded while one is worked on, gains up to a fifth (H200, 2026-11-22).
int heads_of_cta(QuantizeParams const& params, int sm_count) {
  constexpr int64_t kThreadsPerSm = 480;
  QuantizeShape const& s = params.shape;
  int64_t const threads_of_head = s.tiles() * 32 * warps_of_tile(s.head_dim, s.tile, kFewRows);
  int heads = kMostCtaHeads;
  while (heads > 1 && threads_of_head * ceil_div(s.heads, heads) < kThreadsPerSm * sm_count) {
    heads /= 2;
  }
  return heads;
}

}  // namespace

bool takes_one_pass(QuantizeShape const& shape) {
  return shape.block > 0 && shape.block <= kMostThreads * kManyRows &&
         fits(shape, shape.block, kManyRows);
}

void launch_quantize(QuantizeParams params, int sm_count, void* stream) {
  QuantizeShape& shape = params.shape;
  shape.set_tile(takes_one_pass(shape) ? shape.block : kTwoPassTile);
  params.cta_heads = heads_of_cta(params, sm_count);
  params.by_parts = FastDiv(ceil_div(shape.heads, params.cta_heads));
  bind_thread("quantize_fp8", 1, 0);
  switch (params.dtype) {
    case Dtype::kFloat16:
      return launch_passes<cutlass::half_t>(params, stream);
    case Dtype::kBFloat16:
      return launch_passes<cutlass::bfloat16_t>(params, stream);
    default:
      return launch_passes<float>(params, stream);
  }
}

}  // namespace fa3
