// A thread processes two 16-byte chunks of a row: it loads them, finds the sequence and the slot of
// its token, rotates, quantises for an e4m3 cache and stores. Rows outside the cache are not
// written.
#include "device/barriers.h"
#include "kvcache/append_pages.h"
#include "launch/launch.h"

namespace fa3 {
namespace {

// -------------------------------------------------------------------------------------- sequences
// Counts the numbers of a sorted list that are not above each lane's number, with one search per
// distinct number in the warp.
CUTE_DEVICE int count_per_lane(int const* list, int size, int number) {
  int count = 0;
  uint32_t waiting = kAllLanes;
  while (waiting != 0) {
    int const common = __shfl_sync(kAllLanes, number, __ffs(waiting) - 1);
    int const found = count_up_to(size, [&](int index) { return __ldg(list + index) <= common; });
    count = number == common ? found : count;
    waiting &= ~__ballot_sync(kAllLanes, number == common);
  }
  return count;
}

struct Token {
  int sequence;   // none if outside of [0, batch)
  int64_t index;  // in the sequence
};

// Whole warps call this.
CUTE_DEVICE Token token_of(AppendRows const& rows, int batch, int token) {
  if (rows.cu == nullptr) {
    return Token{rows.by_entry.div(token), rows.by_entry.mod(token)};
  }
  int const sequence = count_per_lane(rows.cu, batch + 1, token) - 1;
  bool const is_one = sequence >= 0 && sequence < batch;
  return Token{sequence, is_one ? int64_t(token) - __ldg(rows.cu + sequence) : 0};
}

// --------------------------------------------------------------------------------------- locations
struct SlotLocation {
  int page = -1;  // -1: the cache has no such slot
  int row = 0;

  CUTE_DEVICE bool exists() const { return page >= 0; }

  CUTE_DEVICE char* target(AppendRows const& rows) const {
    return rows.target.data + page * rows.target.batch_stride + row * rows.target.row_stride;
  }
};

// Finds the slot of a new token. length: tokens of its sequence before the append.
CUTE_DEVICE SlotLocation locate(CacheSlots const& cache, int64_t length, Token const& token) {
  int const sequence = token.sequence;
  int64_t const slot = length + token.index;
  // A negative length is invalid even if the sum is a valid slot.
  if (length < 0 || slot < 0 || slot >= cache.capacity) {
    return {};
  }
  int page = sequence;
  if (cache.page_table != nullptr) {
    page =
        __ldg(cache.page_table + sequence * cache.page_table_stride + cache.by_page.div(int(slot)));
  } else if (cache.batch_idx != nullptr) {
    page = __ldg(cache.batch_idx + sequence);
  }
  return page < cache.pages ? SlotLocation{page, cache.by_page.mod(int(slot))} : SlotLocation{};
}

CUTE_DEVICE int64_t length_of(CacheSlots const& cache, int sequence) {
  return cache.seqlens != nullptr ? __ldg(cache.seqlens + sequence) : cache.length;
}

// ---------------------------------------------------------------------------------------- the rows
// Element: void if rows are only copied.
template <class Element, AppendTensor kTensor, bool kQuantises>
CUTE_DEVICE void append_rows(AppendParams const& p, AppendRows const& rows, int cta) {
  using Chunks = RowChunks<Element, kTensor>;
  Rotary const& rotary = p.rotary;
  RowItem const item = rows.schedule.item_of(cta, int(threadIdx.x));
  Chunks chunks(rows, rotary, item.pair);

  wait_for_earlier_launches();
  allow_later_launches();
  if (item.token >= 0) {
    chunks.load(source_of(rows, item));
  }
  Token const token = token_of(rows, p.batch, max_of(item.token, 0));
  bool const has_sequence = token.sequence >= 0 && token.sequence < p.batch;
  if (item.token < 0 || (kTensor != AppendTensor::kQueries && !has_sequence)) {
    return;
  }
  CacheSlots const& cache = p.cache;
  int64_t const length = has_sequence ? length_of(cache, token.sequence) : cache.length;
  char* target;
  if constexpr (kTensor == AppendTensor::kQueries) {
    target = rows.target.data + item.token * rows.target.row_stride;
  } else {
    SlotLocation const location = locate(cache, length, token);
    if (!location.exists()) {
      return;
    }
    target = location.target(rows);
  }
  if (Chunks::kIsRotated && has_sequence) {
    int64_t const begin =
        rotary.seqlens != nullptr ? __ldg(rotary.seqlens + token.sequence) : length;
    bool const is_shared = kTensor == AppendTensor::kQueries && !rotary.is_per_query;
    chunks.rotate_at(rotary, begin + (is_shared ? 0 : token.index), item.pair);
  }
  target += item.head * rows.target.head_stride;
  if constexpr (kQuantises && kTensor != AppendTensor::kQueries) {
    ScaleView const& view = rows.scale;
    chunks.store_quantised(target, view.data == nullptr
                                       ? 1.f
                                       : __ldg(view.data + token.sequence * view.batch_stride +
                                               item.head * view.head_stride));
  } else {
    chunks.store(target);
  }
}

// Each warp appends a row of latents. The columns that share a scale belong to a group of lanes.
template <class Element>
CUTE_DEVICE void append_latents(AppendParams const& p, AppendRows const& rows, int cta) {
  wait_for_earlier_launches();
  allow_later_launches();
  int const row = cta * kAppendWarps + int(threadIdx.x) / 32;
  if (row >= rows.schedule.tokens) {
    return;
  }
  Token const token = token_of(rows, p.batch, row);
  if (token.sequence < 0 || token.sequence >= p.batch) {
    return;
  }
  SlotLocation const location = locate(p.cache, length_of(p.cache, token.sequence), token);
  if (!location.exists()) {
    return;
  }
  int const lane = lane_of_warp();
  RowChunks<Element, AppendTensor::kValues> chunks(rows, p.rotary, lane);
  chunks.load(source_of(rows, {row, 0, lane}));
  ScaleView const& view = rows.scale;
  int const lanes = view.block_stride == 0 ? 32 : 8;
  float largest = fmaxf(largest_of<Element>(chunks.first), largest_of<Element>(chunks.second));
  for (int distance = 1; distance < lanes; distance *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, distance));
  }
  float const scale = scale_of_largest(largest, kLargestOfNewKey);
  chunks.store_quantised(location.target(rows), scale);
  if (lane % lanes == 0) {
    rows.set_scales[location.page * view.batch_stride + location.row * view.head_stride +
                    lane / lanes * view.block_stride] = scale;
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

// Appends with scales by page: CTAs take units of pages instead of rows of k and v.
template <class Element>
__global__ void __launch_bounds__(kAppendThreads)
    append_pages_kernel(AppendParams const __grid_constant__ p) {
  int const cta = int(blockIdx.x);
  int const v_begin = int(p.pages.ctas);
  if (cta < v_begin) {
    append_page<Element, AppendTensor::kKeys>(p, p.k, cta);
  } else if (cta < 2 * v_begin) {
    append_page<Element, AppendTensor::kValues>(p, p.v, cta - v_begin);
  } else {
    append_rows<Element, AppendTensor::kQueries, false>(p, p.q, cta - 2 * v_begin);
  }
}

// Appends rows of k unchanged and rows of v with scales by key.
template <class Element>
__global__ void __launch_bounds__(kAppendThreads)
    append_latents_kernel(AppendParams const __grid_constant__ p) {
  int const cta = int(blockIdx.x);
  int const v_begin = int(p.k.schedule.ctas);
  int const q_begin = v_begin + int(p.latent_ctas());
  if (cta < v_begin) {
    append_rows<Element, AppendTensor::kKeys, false>(p, p.k, cta);
  } else if (cta < q_begin) {
    append_latents<Element>(p, p.v, cta - v_begin);
  } else {
    append_rows<Element, AppendTensor::kQueries, false>(p, p.q, cta - q_begin);
  }
}

// e4m3 rows are never quantised.
auto* kernel_of_e4m3(AppendParams const& p) {
  return p.rotary.cos == nullptr ? append_kernel<void, false>
                                 : append_kernel<cutlass::float_e4m3_t, false>;
}

template <class Element>
auto* kernel_of(AppendParams const& p) {
  switch (p.quantising) {
    case Quantising::kByHead:
      return append_kernel<Element, true>;
    case Quantising::kByPage:
      return append_pages_kernel<Element>;
    case Quantising::kLatents:
      return append_latents_kernel<Element>;
    default:
      return p.rotary.cos == nullptr ? append_kernel<void, false> : append_kernel<Element, false>;
  }
}

}  // namespace

void launch_append(AppendParams const& params, void* stream) {
  LaunchShape const shape{"append", int(params.ctas()), kAppendThreads, 0};
  bind_thread(shape.variant, shape.grid, 0);
  auto* const kernel = params.dtype == Dtype::kFloat8E4M3 ? kernel_of_e4m3(params)
                       : params.dtype == Dtype::kFloat16  ? kernel_of<cutlass::half_t>(params)
                                                          : kernel_of<cutlass::bfloat16_t>(params);
  launch_early(kernel, shape, params, stream);
}

}  // namespace fa3
