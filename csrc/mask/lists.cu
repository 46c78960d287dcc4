// Small kernels, one after the other: each thread cleans the intervals of a query; each warp finds
// which of 32 blocks of keys the queries of a list see; each warp writes a list of K tiles; for
// gradients, each warp writes a list of tiles of queries from marks that the lists of K tiles
// leave. A warp goes over its list twice, to count the free entries and to place all. Then each
// thread finds how many lists of a head are longer than its own.
//
// INVARIANT: lengths come from the device and may be nonsense; no index leaves its tensor.
#include "mask/lists.h"

#include "device/barriers.h"
#include "launch/launch.h"
#include "mask/tiles.h"

namespace fa3 {
namespace {

constexpr int kWarps = 8;  // per CTA

CUTE_DEVICE int warp_of_grid() { return int(blockIdx.x) * kWarps + int(threadIdx.x) / 32; }

// ------------------------------------------------------------------------------------------ rows
// Empty: {0, 0}.
CUTE_DEVICE Interval read_interval(int const* at, int64_t stride, int keys) {
  Interval const found{clamp(at[0], 0, keys), clamp(at[stride], 0, keys)};
  return found.begin < found.end ? found : Interval{0, 0};
}

__global__ void __launch_bounds__(32 * kWarps)
    mask_rows_kernel(MaskListParams const __grid_constant__ p) {
  wait_for_earlier_launches();
  allow_later_launches();
  int const number = int(blockIdx.x) * 32 * kWarps + int(threadIdx.x);
  if (number >= p.interval_batch * p.queries) {
    return;
  }
  int const row = number % p.queries;
  int const keys = keys_of_row(p, row);
  int const* const at =
      p.intervals + number / p.queries * p.interval_stride[0] + row * p.interval_stride[1];
  Interval one = read_interval(at, p.interval_stride[3], keys);
  Interval other{0, 0};
  if (p.interval_count > 1) {
    other = read_interval(at + p.interval_stride[2], p.interval_stride[3], keys);
  }
  if (other.end > 0 && (one.end == 0 || other.begin < one.begin)) {
    Interval const first = other;
    other = one;
    one = first;
  }
  if (other.end > 0 && other.begin <= one.end) {
    one.end = max_of(one.end, other.end);
    other = Interval{0, 0};
  }
  reinterpret_cast<int4*>(p.rows)[number] = make_int4(one.begin, one.end, other.begin, other.end);
}

// ---------------------------------------------------------------------------------------- blocks
// Each warp looks at 32 blocks of keys for the queries of a list.
__global__ void __launch_bounds__(32 * kWarps)
    seen_blocks_kernel(MaskListParams const __grid_constant__ p) {
  wait_for_earlier_launches();
  allow_later_launches();
  int const warp = warp_of_grid();
  int const list = warp / p.block_words();
  int const batch = list / p.lists();
  if (batch >= p.interval_batch) {
    return;
  }
  ListQueries const queries = queries_of_list(p, batch, list % p.lists());
  int4 const* const rows =
      reinterpret_cast<int4 const*>(p.rows) + int64_t(batch) * p.queries + queries.row;
  int const block = warp % p.block_words() * kWordBits;
  SeenBlocks seen{{0, 0}, {~0u, ~0u}};
  CUTE_UNROLL
  for (int i = 0; i < kListedRows / 32; ++i) {
    int const half = i / 2;
    if (int const row = 32 * i + lane_of_warp(); row < queries.rows) {
      int4 const ends = rows[row];
      Interval const one{ends.x, ends.y};
      Interval const other{ends.z, ends.w};
      seen.some[half] |= met_blocks(one, block) | met_blocks(other, block);
      seen.all[half] &= covered_blocks(one, block) | covered_blocks(other, block);
    }
  }
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) {
    seen.some[half] = __reduce_or_sync(kWholeWarp, seen.some[half]);
    seen.all[half] = __reduce_and_sync(kWholeWarp, seen.all[half]);
  }
  if (is_first_lane()) {
    p.seen[warp] = seen;
  }
}

// ------------------------------------------------------------------------------ lists of K tiles
__global__ void __launch_bounds__(32 * kWarps)
    key_lists_kernel(MaskListParams const __grid_constant__ p) {
  wait_for_earlier_launches();
  allow_later_launches();
  int const warp = warp_of_grid();
  int const of_head = warp / p.lists();
  if (of_head >= p.list_batch() * p.heads) {
    return;
  }
  int const number = warp % p.lists();
  KeyTiles const tiles(p, of_head / p.heads, of_head % p.heads, number);
  MarkWriter marks(p, of_head, number);
  int free = 0;
  for (int first = 0; first < p.tiles(); first += kWordBits) {
    StepWords const step = tiles.step(first);
    free += __popc(step.of_list().free);
    if (marks.at != nullptr) {
      marks.count(step);
    }
  }
  int* const list = p.key_lists + int64_t(warp) * (kListHeader + p.tiles());
  Places places{0, free};
  for (int first = 0; first < p.tiles(); first += kWordBits) {
    StepWords const step = tiles.step(first);
    int const place = places.next(step.of_list());
    if (place >= 0) {
      list[kListHeader + place] = (first + lane_of_warp()) << kListBlockBits | step.own_bits;
    }
    if (marks.at != nullptr) {
      marks.write(step, first / kWordBits);
    }
  }
  if (is_first_lane()) {
    list[0] = max_of(1, places.masked);
    list[1] = free;
    if (places.masked == 0) {
      list[kListHeader] = 0;
    }
  }
}

// ----------------------------------------------------------------------- lists of tiles of queries
__global__ void __launch_bounds__(32 * kWarps)
    query_lists_kernel(MaskListParams const __grid_constant__ p) {
  wait_for_earlier_launches();
  allow_later_launches();
  int const warp = warp_of_grid();
  int const of_head = warp / p.query_list_count();
  if (of_head >= p.list_batch() * p.heads) {
    return;
  }
  ListKeys const keys = keys_of_list(p, warp % p.query_list_count());
  int const word = keys.tile / kWordBits;
  int const bit = keys.tile % kWordBits;
  QueryMarks const* const marks =
      p.marks + (int64_t(of_head) * p.tile_words() + word) * p.lists() * p.tiles_of_list() +
      keys.first;
  int free = 0;
  for (int first = 0; first < keys.count; first += 32) {
    int const tile = first + lane_of_warp();
    free += __popc(ballot(tile < keys.count && (marks[tile].free >> bit & 1) != 0));
  }
  int* const list = p.query_lists + int64_t(warp) * (kListHeader + 2 * p.query_tiles());
  Places places{0, free};
  for (int first = 0; first < keys.count; first += 32) {
    int const tile = first + lane_of_warp();
    QueryMarks const own = tile < keys.count ? marks[tile] : QueryMarks{};
    int const place = places.next(
        Listed{ballot((own.listed >> bit & 1) != 0), ballot((own.free >> bit & 1) != 0)});
    if (place >= 0) {
      int bits = 0;
      CUTE_UNROLL
      for (int i = 0; i < kListBlockBits; ++i) {
        bits |= int(own.shown[i] >> bit & 1) << i;
      }
      int2 const entry =
          make_int2(tile << kListBlockBits | bits, own.later + __popc(own.listed >> bit >> 1));
      *reinterpret_cast<int2*>(list + kListHeader + 2 * place) = entry;
    }
  }
  if (is_first_lane()) {
    list[0] = places.masked;
    list[1] = free;
  }
}

// ------------------------------------------------------------------------------------------ order
struct OrderParams {
  int* lists;  // (heads, count, stride)
  int heads;   // heads with lists, summed over the batch
  int count;
  int stride;
};

// The lists of a head, as many as the threads of a CTA at a time.
template <class Visit>
CUTE_DEVICE void visit_lengths(OrderParams const& p, int const* of_head, Visit const& visit) {
  __shared__ int lengths[32 * kWarps];
  for (int first = 0; first < p.count; first += 32 * kWarps) {
    int const loaded = first + int(threadIdx.x);
    lengths[threadIdx.x] = loaded < p.count ? of_head[int64_t(loaded) * p.stride] : 0;
    __syncthreads();
    for (int i = 0; i < min_of(32 * kWarps, p.count - first); ++i) {
      visit(first + i, lengths[i]);
    }
    __syncthreads();
  }
}

__global__ void __launch_bounds__(32 * kWarps)
    list_order_kernel(OrderParams const __grid_constant__ p) {
  wait_for_earlier_launches();
  allow_later_launches();
  int const ctas = ceil_div(p.count, 32 * kWarps);
  int* const of_head = p.lists + int64_t(int(blockIdx.x) / ctas) * p.count * p.stride;
  int const list = int(blockIdx.x) % ctas * 32 * kWarps + int(threadIdx.x);
  int const length = list < p.count ? of_head[int64_t(list) * p.stride] : 0;
  int64_t total = 0;
  int before = 0;
  visit_lengths(p, of_head, [&](int other, int its) {
    total += its;
    before += its > length || (its == length && other < list);
  });
  int outliers = 0;
  visit_lengths(p, of_head, [&](int, int its) { outliers += int64_t(its) * p.count > 4 * total; });
  if (list < p.count) {
    of_head[int64_t(before) * p.stride + 2] = list;
    of_head[int64_t(list) * p.stride + 3] = outliers;
  }
}

// ----------------------------------------------------------------------------------------- launch
using Kernel = void (*)(MaskListParams);

void launch(Kernel kernel, MaskListParams const& params, int64_t threads, void* stream) {
  if (threads > 0) {
    int const grid = int((threads + 32 * kWarps - 1) / (32 * kWarps));
    launch_early(kernel, LaunchShape{"mask_lists", grid, 32 * kWarps, 0}, params, stream);
  }
}

void launch_order(OrderParams const& params, void* stream) {
  int const grid = params.heads * ceil_div(params.count, 32 * kWarps);
  if (grid > 0) {
    launch_early(list_order_kernel, LaunchShape{"mask_lists", grid, 32 * kWarps, 0}, params,
                 stream);
  }
}

}  // namespace

void launch_mask_lists(MaskListParams const& params, void* stream) {
  bind_thread("mask_lists", 1, 0);
  int64_t const of_heads = int64_t(params.list_batch()) * params.heads;
  if (params.interval_count > 0) {
    int64_t const of_batches = params.interval_batch;
    launch(mask_rows_kernel, params, of_batches * params.queries, stream);
    launch(seen_blocks_kernel, params, 32 * of_batches * params.lists() * params.block_words(),
           stream);
  }
  int const heads = int(of_heads);
  launch(key_lists_kernel, params, 32 * of_heads * params.lists(), stream);
  if (params.tile_queries > 0) {
    launch(query_lists_kernel, params, 32 * of_heads * params.query_list_count(), stream);
    launch_order({params.query_lists, heads, params.query_list_count(),
                  kListHeader + 2 * params.query_tiles()},
                 stream);
  }
  launch_order({params.key_lists, heads, params.lists(), kListHeader + params.tiles()}, stream);
}

}  // namespace fa3
