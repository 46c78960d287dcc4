// The heads of a tile, which a CTA works on one after the other: their signs, the rows of a thread
// and where their scales go.
#pragma once

#include "quantize/next_rows.h"
#include "quantize/rotated_row.h"
#include "quantize/stores.h"

namespace fa3 {

constexpr int kMostCtaHeads = 16;  // with the same tile, one after the other

// Of the heads of a CTA, in the order of the columns, and as many zeros: for rows that do not
// count. A barrier follows. step: from one head to the next.
struct HeadSigns {
  static constexpr int kSpans = kMostQuantizedColumns / kSpanColumns;
  uint32_t of_spans[kMostCtaHeads][2 * kSpans];

  CUTE_DEVICE void compute(QuantizeParams const& p, int begin, int heads, int step) {
#pragma unroll 1
    for (int i = int(threadIdx.x); i < heads * kSpans; i += int(blockDim.x)) {
      int const kv_head = p.shape.by_group.div(begin + i / kSpans * step);
      of_spans[i / kSpans][kSpans + i % kSpans] = 0;
      of_spans[i / kSpans][i % kSpans] =
          spread_signs(sign_bits(p.mixed_seed, kv_head, i % kSpans * kSpanColumns));
    }
  }

  // Of a lane, the first one's place among those of a head.
  static CUTE_DEVICE int first(ThreadPlace const& place, QuantizeTile const& tile) {
    return place.column / kSpanColumns + (place.row < tile.used ? 0 : kSpans);
  }

  static CUTE_DEVICE int first(ChunkPlace const&, QuantizeTile const&) { return 0; }  // none
};

CUTE_DEVICE char* dynamic_memory() {
  extern __shared__ __align__(128) char memory[];
  return memory;
}

// When a row is loaded: when it is needed; in registers, while the head before is worked on; the
// same in shared memory: there a warp loads whole rows, not 16 bytes of 32 of them (head dim 64 1
// to 2 % faster, 128 and 256 3 to 4 % slower; H200, 2026-11-23).
enum class Loads { kNow, kAhead, kShared };

// The rows of a thread, of one head after the other.
template <class Element, Loads kLoads, class Place>
class RowsOfHeads {
  Cursor<Element>& cursor_;
  Place const& place_;
  int64_t row_stride_;
  int used_;
  int first_sign_;
  RawRow<Element> ahead_;

 public:
  CUTE_DEVICE RowsOfHeads(QuantizeParams const& p, Cursor<Element>& cursor, Place const& place,
                          QuantizeTile const& tile, int)
      : cursor_(cursor),
        place_(place),
        row_stride_(p.x.row_stride),
        used_(tile.used),
        first_sign_(HeadSigns::first(place, tile)) {
    if constexpr (kLoads == Loads::kAhead) {
      ahead_.clear();
      ahead_.load(cursor_.source, place_, used_, row_stride_);
    }
  }

  // Of the next head. Rows that do not count are 0. signs: of the head, if it is rotated.
  template <class AnyRow, class Rotation>
  CUTE_DEVICE void take(AnyRow& row, uint32_t const* signs, Rotation const& rotation,
                        int64_t head_stride, bool is_last) {
    if constexpr (kLoads == Loads::kNow) {
      ahead_.clear();
      ahead_.load(cursor_.source, place_, used_, row_stride_);
    }
    cursor_.source += head_stride;
    row.take(ahead_, place_, signs + first_sign_, rotation);
    if constexpr (kLoads == Loads::kAhead) {
      ahead_.load(cursor_.source, place_, is_last ? 0 : used_, row_stride_);
    }
  }
};

template <class Element>
class RowsOfHeads<Element, Loads::kShared, ThreadPlace> {
  NextRows<Element> next_;
  ThreadPlace const& place_;
  Element const* first_;
  int64_t row_stride_;
  int used_;
  int first_sign_;

 public:
  CUTE_DEVICE RowsOfHeads(QuantizeParams const& p, Cursor<Element>&, ThreadPlace const& place,
                          QuantizeTile const& tile, int head)
      : next_(p, place, dynamic_memory()),
        place_(place),
        first_(next_.at(source_of(p, tile, head))),
        row_stride_(p.x.row_stride),
        used_(tile.used),
        first_sign_(HeadSigns::first(place, tile)) {
    next_.clear(used_);
    next_.load(first_, used_, row_stride_);
  }

  template <class AnyRow, class Rotation>
  CUTE_DEVICE void take(AnyRow& row, uint32_t const* signs, Rotation const& rotation,
                        int64_t head_stride, bool is_last) {
    RawRow<Element> raw;
    next_.read(raw, place_);
    first_ += head_stride;
    next_.load(first_, is_last ? 0 : used_, row_stride_);
    row.take(raw, place_, signs + first_sign_, rotation);
  }
};

// Where the scales of a tile that is a block go, of one head after the other. WHY not scale_place()
// for each head: its divisions take one warp longer than all the rest takes each. They are the
// first thread's alone.
struct BlockScales {
  float* next;  // null: nothing to write
  int step;

  CUTE_DEVICE void begin(QuantizeParams const& p, QuantizeTile const& tile, int tile_number,
                         int head, int head_step, int rank) {
    if (threadIdx.x != 0) {
      return;
    }
    QuantizeShape const& s = p.shape;
    step = s.is_packed ? s.by_tile.div(s.rows) + s.batch : int(s.by_entry_tiles.divisor);
    bool const is_place = !s.is_packed || (tile_number > 0 && tile_number <= step);
    int64_t const row = s.is_packed ? head : int64_t(tile.entry) * s.heads + head;
    int const place = s.is_packed ? tile_number - 1 : tile.index;
    next = rank == 0 && is_place ? p.scales + row * step + place : nullptr;
    step *= head_step;
  }

  CUTE_DEVICE void write(float scale) {
    if (threadIdx.x == 0 && next != nullptr) {
      *next = scale;
      next += step;
    }
  }

  CUTE_DEVICE void write_ones(int heads) {
    for (; heads > 0; --heads) {
      write(1.f);
    }
  }
};

}  // namespace fa3
