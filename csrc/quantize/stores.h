// How a thread writes the rows that it has cast.
#pragma once

#include "quantize/rows.h"

namespace fa3 {

// write(): of one head after the other. target: of the thread's first column. is_first, is_last: of
// the heads that the CTA has of the tile, in turn; nothing waits after the last. Rows that do not
// count are 0 already.
template <class Place>
class RowWriter;

CUTE_DEVICE uint4 span_of(CastRow const& row, int span) {
  uint32_t const* const fours = row.fours + span * (kSpanColumns / 4);
  return make_uint4(fours[0], fours[1], fours[2], fours[3]);
}

template <>
class RowWriter<ThreadPlace> {
  ThreadPlace const& place_;
  bool is_aligned_;

  // The first 0, 8 or 16 columns.
  static CUTE_DEVICE void write_span(uint8_t* target, uint4 values, int columns) {
    if (columns > 0) {
      reinterpret_cast<uint2*>(target)[0] = make_uint2(values.x, values.y);
    }
    if (columns == kSpanColumns) {
      reinterpret_cast<uint2*>(target)[1] = make_uint2(values.z, values.w);
    }
  }

 public:
  // is_aligned: rows are multiples of 16 columns.
  CUTE_DEVICE RowWriter(ThreadPlace const& place, bool is_aligned)
      : place_(place), is_aligned_(is_aligned) {}

  CUTE_DEVICE void write(CastRow const& row, uint8_t* target, QuantizeTile const& tile, bool = true,
                         bool = true) const {
    if (place_.row >= tile.written) {
      return;
    }
    uint4 const first = span_of(row, 0);
    uint4 const second = span_of(row, 1);
    uint8_t* const second_target = target + place_.distance;
    if (is_aligned_) {
      *reinterpret_cast<uint4*>(target) = first;
      if (place_.has_second()) {
        *reinterpret_cast<uint4*>(second_target) = second;
      }
    } else {
      write_span(target, first, place_.first_columns);
      write_span(second_target, second, place_.second_columns);
    }
  }
};

// LaneOrder::kRows, head dim 80, as SpanStores says; the lane of 16 columns has them twice. WHY not
// like the others: to write a sector in two parts takes long (16k tokens, blocks of 64 39 us for
// 35, of 384 39 for 36; H200, 2026-11-23).
class RowWriterInSectors {
  static constexpr int kHeadDim = 80;
  ThreadPlace const& place_;
  int second_;  // columns from the first span to the second
  bool waits_ = false;
  uint4 waiting_;

 public:
  explicit CUTE_DEVICE RowWriterInSectors(ThreadPlace const& place)
      : place_(place), second_(place.has_second() ? place.distance : 0) {}

  CUTE_DEVICE void write(CastRow const& row, uint8_t* target, QuantizeTile const& tile, bool,
                         bool is_last) {
    if (place_.row >= tile.written) {
      return;
    }
    uint4 const first = span_of(row, 0);
    uint4 const second = span_of(row, 1);
    auto const stores =
        span_stores(reinterpret_cast<uint64_t>(target) - place_.column, place_.column, is_last);
    if (waits_ || stores.first == 0) {
      store(waits_ ? target - kHeadDim : target, waits_ ? waiting_ : first);
    }
    if (stores.first == 1 || stores.second == 1) {
      bool const is_first = stores.first == 1;
      store(is_first ? target : target + second_, is_first ? first : second);
    }
    if (stores.second == 2) {
      store(target + second_, second);
    }
    waits_ = stores.second == 3;
    waiting_ = second;
  }

 private:
  static CUTE_DEVICE void store(uint8_t* target, uint4 values) {
    *reinterpret_cast<uint4*>(target) = values;
  }
};

// Where the rows of a head are no multiple of 32 bytes, neighbouring heads share a sector of L2. To
// write it in two parts takes long (head dim 80, 16k tokens: 40 us for 34; 104: 42 for 34; H200,
// 2026-11-23), so that what a row has of its last sector waits for the next head.
template <>
class RowWriter<ChunkPlace> {
  ChunkPlace const& place_;
  int64_t step_;  // bytes
  int head_dim_;
  bool waits_;
  uint2* waiting_;  // of the thread, in shared memory

 public:
  static constexpr int kThreadBytes = kChunkRows * int(sizeof(uint2));

  // memory: kThreadBytes a thread where sectors are shared.
  CUTE_DEVICE RowWriter(ChunkPlace const& place, QuantizeShape const& s, char* memory)
      : place_(place),
        step_(place.row_step * (int64_t(s.heads) * s.head_dim)),
        head_dim_(s.head_dim),
        waits_(false),
        waiting_(reinterpret_cast<uint2*>(memory) + threadIdx.x) {}

  CUTE_DEVICE void write(CastRow const& row, uint8_t* target, QuantizeTile const& tile,
                         bool is_first, bool is_last) {
    if (!shares_sectors(head_dim_, place_.row_step)) {
      return write_rows(row, target, tile);
    }
    auto const [completes, waits] = sector_part(reinterpret_cast<uint64_t>(target) - place_.column,
                                                place_.column, head_dim_, is_first, is_last);
    if (!completes && !waits) {
      write_rows(row, target, tile);
    }
    if (completes || waits_) {
      write_shared_sector(row, completes ? target : target - head_dim_, tile, completes);
    }
    waits_ = waits;
    if (waits) {
      CUTE_UNROLL
      for (int i = 0; i < kChunkRows; ++i) {
        waiting_[i * blockDim.x] = chunk(row, i);
      }
    }
  }

 private:
  static CUTE_DEVICE uint2 chunk(CastRow const& row, int i) {
    return make_uint2(row.fours[2 * i], row.fours[2 * i + 1]);
  }

  CUTE_DEVICE bool exists(int i, QuantizeTile const& tile) const {
    return place_.row + i * place_.row_step < tile.written;
  }

  CUTE_DEVICE void write_rows(CastRow const& row, uint8_t* target, QuantizeTile const& tile) const {
    CUTE_UNROLL
    for (int i = 0; i < kChunkRows; ++i) {
      if (exists(i, tile)) {
        *reinterpret_cast<uint2*>(target + i * step_) = chunk(row, i);
      }
    }
  }

  // The lanes that complete it and those with what waited for that, in one instruction.
  CUTE_DEVICE void write_shared_sector(CastRow const& row, uint8_t* target,
                                       QuantizeTile const& tile, bool completes) const {
    CUTE_UNROLL
    for (int i = 0; i < kChunkRows; ++i) {
      uint2 const values = completes ? chunk(row, i) : waiting_[i * blockDim.x];
      if (exists(i, tile)) {
        *reinterpret_cast<uint2*>(target + i * step_) = values;
      }
    }
  }
};

}  // namespace fa3
