// Appends with scales by page. A warp appends the new rows of one head in one page. If they begin
// the page, the warp first sets its scale from the largest element.
#pragma once

#include <cfloat>

#include "device/barriers.h"
#include "kvcache/rows.h"

namespace fa3 {

// The new rows of a sequence in one page.
struct PageRows {
  int count = 0;
  int sequence = 0;
  int page = 0;        // page id
  int slot = 0;        // slot of the first row in the page
  int token = 0;       // index of the first row in the tensor of new rows
  int64_t index = 0;   // index of the first row among the sequence's new rows
  int64_t length = 0;  // keys of the sequence before the append
};

// Finds the rows of a unit. Whole warps call this, each with one unit.
CUTE_DEVICE PageRows rows_of_unit(AppendParams const& p, int64_t unit) {
  PageSchedule const& pages = p.pages;
  CacheSlots const& cache = p.cache;
  int const* const cu = p.k.cu;
  auto const first_unit = [&](int b) {
    return pages.first_unit(b, cu == nullptr ? 0 : __ldg(cu + b));
  };
  PageRows rows;
  rows.sequence = count_up_to(p.batch + 1, [&](int b) { return first_unit(b) <= unit; }) - 1;
  if (rows.sequence < 0 || rows.sequence >= p.batch) {
    return rows;
  }
  int begin = rows.sequence * pages.new_tokens;
  int end = begin + pages.new_tokens;
  if (cu != nullptr) {
    begin = clamp(__ldg(cu + rows.sequence), 0, pages.total);
    end = clamp(__ldg(cu + rows.sequence + 1), begin, pages.total);
  }
  rows.length = cache.seqlens != nullptr ? __ldg(cache.seqlens + rows.sequence) : cache.length;
  if (rows.length < 0 || rows.length >= cache.capacity) {
    return rows;
  }
  PageSpan const span =
      page_span(cache.by_page, int(rows.length), unit - first_unit(rows.sequence));
  int64_t const first = span.first;
  int64_t const last = min(span.end, min(rows.length + end - begin, int64_t(cache.capacity)));
  if (first >= last) {
    return rows;
  }
  rows.page = __ldg(cache.page_table + rows.sequence * cache.page_table_stride + span.number);
  rows.slot = cache.by_page.mod(int(first));
  rows.index = first - rows.length;
  rows.token = begin + int(rows.index);
  rows.count = rows.page < 0 || rows.page >= cache.pages ? 0 : int(last - first);
  return rows;
}

// The smallest power of two, at least kLeastSetScale, that divides `largest` to at most `most`.
CUTE_DEVICE float scale_of_largest(float largest, float most) {
  float const least = fmaxf(__fdiv_rn(fminf(largest, FLT_MAX), most), kLeastSetScale);
  return __uint_as_float((__float_as_uint(least) + 0x7fffffu) & 0x7f800000u);
}

// The largest magnitude in a chunk. NaN does not count.
template <class Element>
CUTE_DEVICE float largest_of(Chunk const& chunk) {
  float largest = 0.f;
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    float2 const two = unpack_two<Element>(chunk.words[i]);
    largest = fmaxf(largest, fmaxf(fabsf(two.x), fabsf(two.y)));
  }
  return largest;
}

// Calls use(row, chunks) for all rotated chunks of the rows, which are distributed over the lanes.
template <class Element, AppendTensor kTensor, class Use>
CUTE_DEVICE void for_chunks(AppendParams const& p, AppendRows const& rows, PageRows const& own,
                            int head, Use const& use) {
  FastDiv const& by_row = rows.schedule.by_row_threads;
  int64_t const begin =
      p.rotary.seqlens != nullptr ? __ldg(p.rotary.seqlens + own.sequence) : own.length;
  int const count = own.count * int(by_row.divisor);
#pragma unroll 2
  for (int i = lane_of_warp(); i < count; i += 32) {
    int const row = by_row.div(i);
    int const pair = by_row.mod(i);
    RowChunks<Element, kTensor> chunks(rows, p.rotary, pair);
    chunks.load(source_of(rows, {own.token + row, head, pair}));
    chunks.rotate_at(p.rotary, begin + own.index + row, pair);
    use(row, chunks);
  }
}

template <class Element, AppendTensor kTensor>
CUTE_DEVICE void append_page(AppendParams const& p, AppendRows const& rows, int cta) {
  wait_for_earlier_launches();
  allow_later_launches();
  int const warp = cta * kAppendWarps + int(threadIdx.x) / 32;
  int const head = p.pages.by_heads.mod(warp);
  PageRows const own = rows_of_unit(p, p.pages.by_heads.div(warp));
  if (own.count == 0) {
    return;
  }
  // WHY the read bypasses L1: scales of other pages in the same line change during this launch.
  float* const page_scale =
      rows.set_scales + own.page * rows.scale.batch_stride + head * rows.scale.head_stride;
  float scale;
  if (own.slot == 0) {
    float largest = 0.f;
    for_chunks<Element, kTensor>(p, rows, own, head, [&](int, auto const& chunks) {
      largest = fmaxf(largest,
                      fmaxf(largest_of<Element>(chunks.first), largest_of<Element>(chunks.second)));
    });
    scale = scale_of_largest(max_over_lanes(largest), kLargestOfNewPage);
    if (is_first_lane()) {
      *page_scale = scale;
    }
  } else {
    scale = __ldcg(page_scale);
  }
  char* const target = rows.target.data + own.page * rows.target.batch_stride +
                       own.slot * rows.target.row_stride + head * rows.target.head_stride;
  for_chunks<Element, kTensor>(p, rows, own, head, [&](int row, auto const& chunks) {
    chunks.store_quantised(target + row * rows.target.row_stride, scale);
  });
}

}  // namespace fa3
