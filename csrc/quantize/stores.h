// How a thread writes the rows that it has cast.
#pragma once

#include "quantize/rows.h"

namespace fa3 {

// write(): of one head after the other. target: of the thread's first column. is_first, is_last: of
// the heads that the CTA has of the tile, in turn; nothing waits after the last.
template <class Place>
class RowWriter;

// A row of the tile that does not count is written as 0.
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
    bool const counts = place_.row < tile.used;
    uint4 const zeros = make_uint4(0, 0, 0, 0);
    auto const& fours = row.fours;
    uint4 const first = counts ? make_uint4(fours[0], fours[1], fours[2], fours[3]) : zeros;
    uint4 const second = counts ? make_uint4(fours[4], fours[5], fours[6], fours[7]) : zeros;
    if (place_.row >= tile.written) {
      return;
    }
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

// Chunks of rows that do not count are 0 already.
//
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
