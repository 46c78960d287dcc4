// A thread has two chunks of 16 bytes of a row: it loads them, finds the sequence of its token and
// the slot behind it, rotates, quantises for a cache of e4m3 and stores. Rows outside the cache are
// not written.
#include "device/barriers.h"
#include "kvcache/append_pages.h"
#include "launch/launch.h"

namespace fa3 {
namespace {

// -------------------------------------------------------------------------------------- sequences
// How many numbers of a sorted list are not above that of a lane: one search for each that differs.
CUTE_DEVICE int count_of_lanes(int const* list, int size, int number) {
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

// ---------------------------------------------------------------------------------------- the rows
// Element: void where rows are only copied.
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

// With scales by page: units of pages instead of rows of k and v.
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

}  // namespace

void launch_append(AppendParams const& params, void* stream) {
  LaunchShape const shape{"append_cache", int(params.ctas()), kAppendThreads, 0};
  bind_thread(shape.variant, shape.grid, 0);
  bool const is_half = params.dtype == Dtype::kFloat16;
  if (params.by_page) {
    launch_early(
        is_half ? append_pages_kernel<cutlass::half_t> : append_pages_kernel<cutlass::bfloat16_t>,
        shape, params, stream);
    return;
  }
  auto* const kernel = params.quantises ? is_half ? append_kernel<cutlass::half_t, true>
                                                  : append_kernel<cutlass::bfloat16_t, true>
                       : params.rotary.cos == nullptr ? append_kernel<void, false>
                       : is_half                      ? append_kernel<cutlass::half_t, false>
                                                      : append_kernel<cutlass::bfloat16_t, false>;
  launch_early(kernel, shape, params, stream);
}

}  // namespace fa3
