// Scales of more rows than a CTA has, in one pass over x. All CTAs are on the GPU at once; each
// works through tiles of one head, its items. It rotates an item, tells the others its largest
// value, puts the rows aside in shared memory, and goes on; two items later it casts and writes it,
// when the maxima of all items with the same scale have most likely arrived.
//
// A maximum is a word of its own that was 0, and no longer is when it is there: who reads it needs
// no other word, so that nothing has to be ordered.
//
// What bounds it (H200, 2026-11-23, ncu, rotated rows of head dim 128): a warp takes 697
// instructions for an item, in the clusters of quantize.cu 524, among them eight stores and loads
// of 16 bytes for the rows put aside and the next ones; 60 % of the slots issue, and what warps
// wait for most is the barrier of the CTA.
#include "device/barriers.h"
#include "launch/launch.h"
#include "quantize/exchange.h"
#include "quantize/kernel_dim.h"
#include "quantize/next_rows.h"
#include "quantize/residency.h"
#include "quantize/rotated_row.h"
#include "quantize/stores.h"

namespace fa3 {
namespace {

constexpr int kMostWarps = 9;
constexpr int kDepth = 2;  // items of a CTA that wait in shared memory
constexpr uint32_t kMissing = 0x80000000u;
constexpr uint32_t kEveryLane = 0xffffffffu;

CUTE_DEVICE void publish(uint32_t* word, uint32_t bits) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(bits | kMissing) : "memory");
}

// Less than kMissing if it is there.
CUTE_DEVICE uint32_t look_at(uint32_t const* word) {
  uint32_t seen;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(word) : "memory");
  return seen ^ kMissing;
}

constexpr int kSigns = kMostQuantizedColumns / kSpanColumns;

// An item as all threads see it.
struct Item {
  QuantizeTile tile;
  int64_t source;  // of its first row
  int64_t target;
  float* scale;  // null: another item writes it
  int first;     // of the items that share its scale
  int count;     // of them
  int head;
  uint32_t signs[kSigns];
};

__device__ void describe(QuantizeParams const& p, int number, Item& item) {
  QuantizeShape const& s = p.shape;
  auto [place, tile] = find_item(s, p.order, p.cu_seqlens, p.seqused, min_of(number, p.items - 1));
  bool const is_there = number < p.items && place.head < s.heads;
  if (!is_there) {
    tile.used = tile.written = 0;
  }
  int const head = min_of(place.head, s.heads - 1);
  bool const is_writer = is_there && writes_scale(s, tile, head);
  item.tile = tile;
  item.source = source_of(p, tile, head);
  item.target = target_of(s, tile, head);
  item.scale = is_writer ? p.scales + scale_place(s, p.cu_seqlens, tile, head) : nullptr;
  item.first = place.first;
  item.count = tile.used > 0 || is_writer ? place.count : 0;
  item.head = head;
}

CUTE_DEVICE uint32_t const* word_of(QuantizeParams const& p, Item const& item, int index) {
  return p.maxima + min_of(item.first + index, p.items - 1);
}

// The first of the words that are a thread's to look at: it does something else meanwhile.
CUTE_DEVICE uint32_t first_look(QuantizeParams const& p, Item const& item) {
  int const index = int(threadIdx.x);
  return index < item.count ? look_at(word_of(p, item, index)) : 0;
}

// The largest of the words of a thread. kWaits: until all are there. WHY not all of them early:
// that is too early (head dim 256: 64 us in place of 56).
template <bool kWaits>
CUTE_DEVICE uint32_t look_at_all(QuantizeParams const& p, Item const& item, uint32_t first) {
  auto final_word = [&](uint32_t word, int index) {
    while (kWaits && word >= kMissing) {
      word = look_at(word_of(p, item, index));
    }
    return word;
  };
  int const step = int(blockDim.x);
  int index = int(threadIdx.x);
  uint32_t largest = final_word(first, index);
  for (index += step; index < item.count; index += step) {
    largest = max(largest, final_word(look_at(word_of(p, item, index)), index));
  }
  return largest;
}

// Of all threads of a CTA. INVARIANT: a barrier separates the use of a row from its next use.
struct Found {
  uint2 of_warps[2][kMostWarps];

  // x: of the item, y: of those with the scale of another.
  CUTE_DEVICE uint2 of_all(uint2 one, int turn) {
    int const lane = int(threadIdx.x) % 32;
    one.x = __reduce_max_sync(kEveryLane, one.x);
    one.y = __reduce_max_sync(kEveryLane, one.y);
    if (lane == 0) {
      of_warps[turn][threadIdx.x / 32] = one;
    }
    __syncthreads();
    one = lane < int(blockDim.x) / 32 ? of_warps[turn][lane] : make_uint2(0, 0);
    one.x = __reduce_max_sync(kEveryLane, one.x);
    one.y = __reduce_max_sync(kEveryLane, one.y);
    return one;
  }
};

// The items of a CTA, by their number in it.
struct Items {
  static constexpr int kRing = 32;
  static constexpr int kBatch = kRing / 2;  // that are described at once, a lane each

  Item ring[kRing];
  Item none;
  Found early;
  Found late;

  CUTE_DEVICE Item const& at(int count) const { return ring[count % kRing]; }

  // The one that gets its scale when this one has its maximum.
  CUTE_DEVICE Item const& before(int count) const {
    return count < kDepth ? none : at(count - kDepth);
  }

  CUTE_DEVICE void start(QuantizeParams const& p) {
    describe_from(p, 0, kRing);
    if (threadIdx.x == 0) {
      none.tile = QuantizeTile{0, 0, 0, 0, 0};
      none.source = none.target = 0;
      none.scale = nullptr;
      none.first = none.count = 0;
    }
    __syncthreads();
  }

  CUTE_DEVICE void start_signs(QuantizeParams const& p) {
    make_signs(p, 0, kRing);
    __syncthreads();
  }

  // At the end of a turn: the items of the half that is finished make place for later ones.
  CUTE_DEVICE void go_on(QuantizeParams const& p, int count) {
    int const turn = count % kBatch;
    if (count >= kBatch && turn == kDepth) {
      describe_from(p, count - kDepth + kBatch, kBatch);
    }
    if (count >= kBatch && turn == kDepth + 1) {
      make_signs(p, count - kDepth - 1 + kBatch, kBatch);
    }
  }

 private:
  __device__ void describe_from(QuantizeParams const& p, int first, int count) {
    if (int(threadIdx.x) < count) {
      int const own = first + int(threadIdx.x);
      describe(p, int(blockIdx.x) + own * int(gridDim.x), ring[own % kRing]);
    }
  }

  __device__ void make_signs(QuantizeParams const& p, int first, int count) {
#pragma unroll 1
    for (int i = int(threadIdx.x); p.is_rotated && i < count * kSigns; i += int(blockDim.x)) {
      Item& item = ring[(first + i / kSigns) % kRing];
      int const kv_head = p.shape.by_group.div(item.head);
      item.signs[i % kSigns] =
          spread_signs(sign_bits(p.mixed_seed, kv_head, i % kSigns * kSpanColumns));
    }
  }
};

// The rows of items that wait for their scale, each thread its own.
template <class Row>
class Stash {
  static constexpr int kFours = Row::kWords / 4;
  uint4* own_;

 public:
  static constexpr int kThreadBytes = kDepth * (Row::kWords + 1) * int(sizeof(uint32_t));

  explicit CUTE_DEVICE Stash(uint4* memory) : own_(memory + threadIdx.x) {}

  // Puts a row into a slot, and gives what was there.
  CUTE_DEVICE Row exchange(int slot, Row const& row) const {
    Row old;
    CUTE_UNROLL
    for (int i = 0; i < kFours; ++i) {
      uint4& four = own_[(slot * kFours + i) * int(blockDim.x)];
      old.words[4 * i] = four.x;
      old.words[4 * i + 1] = four.y;
      old.words[4 * i + 2] = four.z;
      old.words[4 * i + 3] = four.w;
      four = make_uint4(row.words[4 * i], row.words[4 * i + 1], row.words[4 * i + 2],
                        row.words[4 * i + 3]);
    }
    float* const units =
        reinterpret_cast<float*>(own_ - threadIdx.x + kDepth * kFours * blockDim.x);
    float& unit = units[slot * blockDim.x + threadIdx.x];
    old.set_unit(unit);
    unit = row.unit();
    return old;
  }
};

// As many CTAs as have room in shared memory; of the others the narrow pieces would spill.
template <class Element, int kDim>
constexpr int registers_of_thread() {
  return sizeof(Element) == 4 ? 112 : kDim == 80 || kDim == 96 ? 72 : 64;
}

// Loads, rotates and publishes an item; its rows stay in registers.
// Returns the largest of the words of `older`, kMissing or more if one was not there.
template <class Element, class Row, class Rotation>
CUTE_DEVICE uint32_t work_out(QuantizeParams const& p, Items& items, int count,
                              NextRows<Element> const& next_rows, ThreadPlace const& place,
                              Rotation const& rotation, Row& row) {
  Item const& item = items.at(count);
  Item const& older = items.before(count);
  uint32_t const first = first_look(p, older);
  RawRow<Element> raw;
  next_rows.read(raw, place);
  Item const& next = items.at(count + 1);
  next_rows.load(next_rows.at(next.source), next.tile.used, p.x.row_stride);
  row.take(raw, place, item.signs + place.column / kSpanColumns, rotation);
  row.rotate(rotation);
  uint2 found;
  while (true) {
    uint32_t const own =
        place.row < item.tile.used ? __float_as_uint(row.largest(rotation.norm)) : 0;
    found = make_uint2(own, look_at_all<false>(p, older, first));
    found = items.early.of_all(found, count % 2);
    if (!Row::kMayBeInfinite || found.x != kInfinity) {
      break;
    }
    __syncthreads();
    row.make_infinities_nan();
  }
  if (threadIdx.x == 0) {
    publish(p.maxima + int(blockIdx.x) + count * int(gridDim.x), found.x);
  }
  return found.y;
}

// INVARIANT: a CTA waits for the scale of an item only when it has published the kDepth items after
// it. So the wait ends: of all items that CTAs wait to finish take the first one, i. Every CTA has
// published all of its items before i + (kDepth + 1) * grid, and all CTAs are resident; the items
// that share a scale with i end no later (fits_exchange).
template <class Element, int kDim>
__global__ void __maxnreg__((registers_of_thread<Element, kDim>()))
    exchange_kernel(QuantizeParams const __grid_constant__ p) {
  using Row = RowOf<Element, kDim>;
  extern __shared__ __align__(128) char memory[];
  __shared__ Items items;
  QuantizeShape const& s = p.shape;
  items.start(p);
  ThreadPlace const place = place_of_thread<LaneOrder::kPieces, kDim>(s, s.tile);
  RotationOf<LaneOrder::kPieces, kDim, false> const rotation(place);
  RowWriter<ThreadPlace> const writer(place, kDim > 0 || s.head_dim % kSpanColumns == 0);
  Stash<Row> const stash(reinterpret_cast<uint4*>(memory));
  NextRows<Element> const next_rows(p, place, memory + Stash<Row>::kThreadBytes * int(blockDim.x));
  next_rows.load(next_rows.at(items.at(0).source), items.at(0).tile.used, p.x.row_stride);
  items.start_signs(p);
  uint8_t* const values = p.values + Cursor<Element>::target_in_tile(s, place);

  int const total = ceil_div(p.items - int(blockIdx.x), int(gridDim.x));
#pragma unroll 1
  for (int count = 0; count < total + kDepth; ++count) {
    Row row;
    Item const& older = items.before(count);
    uint32_t bits = kMissing;
    if (count < total) {
      bits = work_out(p, items, count, next_rows, place, rotation, row);
    }
    if (bits >= kMissing) {
      bits = look_at_all<true>(p, older, first_look(p, older));
      bits = items.late.of_all(make_uint2(0, bits), count % 2).y;
    }
    float const scale = scale_of(bits);
    if (older.scale != nullptr && threadIdx.x == 0) {
      *older.scale = scale;
    }
    Row const old = stash.exchange(count % kDepth, row);
    CastRow cast = old.cast(factor_of(rotation.norm, scale));
    if (place.row >= older.tile.used) {
      cast.clear();
    }
    writer.write(cast, values + older.target, older.tile);
    items.go_on(p, count);
  }
  allow_later_launches();
}

struct Words {
  uint32_t* begin;
  int64_t count;
};

__global__ void clear_kernel(Words words) {
  wait_for_earlier_launches();
  allow_later_launches();
  int64_t const step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < words.count; i += step) {
    words.begin[i] = 0;
  }
}

// ----------------------------------------------------------------------------------------- launch
constexpr char const* kName = "quantize_fp8";
constexpr int kMostTile = 256;
constexpr int kUsualWarps = 8;

template <class Element, int kDim>
constexpr int kWarpBytes =
    32 * Stash<RowOf<Element, kDim>>::kThreadBytes + NextRows<Element>::kWarpBytes;

template <class Element, int kDim>
LaunchShape launch_shape(QuantizeShape const& s) {
  int const warps = warps_of_tile(LaneOrder::kPieces, s.head_dim, s.tile);
  return LaunchShape{kName, 0, 32 * warps, warps * kWarpBytes<Element, kDim>};
}

// Whether the kernel takes it; launches it, with a stream.
template <class Element, int kDim>
bool run(QuantizeParams const& params, int sm_count, void* const* stream) {
  static std::atomic<uint64_t> devices_ready{0};
  static std::atomic<uint64_t> known_ctas{0};
  auto* const kernel = exchange_kernel<Element, kDim>;
  LaunchShape shape = launch_shape<Element, kDim>(params.shape);
  // Once for all head dims of the kernel.
  allow_shared_memory(kernel, LaunchShape{kName, 0, 0, kMostWarps * kWarpBytes<Element, kDim>},
                      devices_ready);
  shape.grid = min_of(room_for(kernel, shape, 1, known_ctas) * sm_count, params.items);
  if (params.order.span() > int64_t(shape.grid) * (kDepth + 1)) {
    return false;
  }
  if (stream != nullptr) {
    clear_words(params.maxima, params.items, *stream);
    launch_together(kernel, shape, params, *stream);
  }
  return true;
}

template <class Element>
bool run_any(QuantizeParams const& params, int sm_count, void* const* stream) {
  bool takes_it = false;
  run_with_dim(kernel_dim(params), DimsOf<Element>(), [&]<int kDim>(KernelDim<kDim>) {
    takes_it = run<Element, kDim>(params, sm_count, stream);
  });
  return takes_it;
}

bool run_dtype(QuantizeParams const& params, int sm_count, void* const* stream) {
  bind_thread(kName, 1, 0);
  switch (params.dtype) {
    case Dtype::kFloat16:
      return run_any<cutlass::half_t>(params, sm_count, stream);
    case Dtype::kBFloat16:
      return run_any<cutlass::bfloat16_t>(params, sm_count, stream);
    default:
      return run_any<float>(params, sm_count, stream);
  }
}

}  // namespace

void clear_words(uint32_t* words, int64_t count, void* stream) {
  constexpr int kThreads = 512;
  constexpr int64_t kMostCtas = 64;
  int64_t const ctas = count / (8 * kThreads) + 1;
  LaunchShape const shape{kName, int(ctas < kMostCtas ? ctas : kMostCtas), kThreads, 0};
  launch_early(clear_kernel, shape, Words{words, count}, stream);
}

bool fits_exchange(QuantizeParams& params, int sm_count) {
  constexpr int64_t kMostItems = int64_t(1) << 24;
  QuantizeShape& shape = params.shape;
  int tile = 32;
  while (tile < kMostTile &&
         warps_of_tile(LaneOrder::kPieces, shape.head_dim, 2 * tile) <= kUsualWarps &&
         (shape.block <= 0 || shape.block % (2 * tile) == 0)) {
    tile *= 2;
  }
  shape.set_tile(tile);
  int64_t const items = shape.tiles() * shape.heads;
  if (items > kMostItems) {
    return false;
  }
  params.order = ItemOrder::of(shape);
  params.items = int(items);
  return run_dtype(params, sm_count, nullptr);
}

void launch_exchange(QuantizeParams const& params, int sm_count, void* stream) {
  run_dtype(params, sm_count, &stream);
}

}  // namespace fa3
