// Loads of x that are under way while the rows before are worked on, in shared memory.
#pragma once

#include "quantize/rows.h"

namespace fa3 {

// Rows of x on their way to shared memory, one of each thread: every warp loads and reads its own.
// They lie there as in memory, in chunks of 16 bytes, but for bit 0 of the number of a chunk: that
// keeps lanes off each other's banks.
template <class Element>
class NextRows {
  static constexpr int kChunk = 16 / int(sizeof(Element));  // columns
  static constexpr int kLoads = kLaneColumns / kChunk;      // of a lane
  Element const* source;
  int row;    // of the tile
  int loads;  // fewer than kLoads for narrow pieces
  int width_shift;
  uint32_t target;
  uint32_t spans[2];

 public:
  static constexpr int kWarpBytes = 32 * kLaneColumns * int(sizeof(Element));

  // memory: kWarpBytes for each warp, at a multiple of 64 bytes.
  CUTE_DEVICE NextRows(QuantizeParams const& p, ThreadPlace const& place, char* memory) {
    int const lane = int(threadIdx.x) % 32;
    int const lanes = lanes_of_piece(place.width);
    int const row_chunks = place.width / kChunk;
    int const first_row = place.row - lane / lanes;
    int const piece = place.column - lane % lanes * kSpanColumns;
    row = first_row + lane * kChunk / place.width;
    loads = min_of(kLoads, ceil_div(rows_of_warp(place.width) * row_chunks, 32));
    width_shift = __ffs(place.width) - 1;
    source = static_cast<Element const*>(p.x.data) + row * p.x.row_stride + piece +
             lane * kChunk % place.width;
    auto const own = uint32_t(__cvta_generic_to_shared(memory)) + threadIdx.x / 32 * kWarpBytes;
    int const chunk = lane / lanes * row_chunks + lane % lanes * (kSpanColumns / kChunk);
    target = own + place_of(lane);
    spans[0] = own + place_of(chunk);
    spans[1] = own + place_of(chunk + row_chunks / 2);
  }

  // What this lane loads first; offset: of the first column of the tile's first row.
  CUTE_DEVICE Element const* at(int64_t offset) const { return source + offset; }

  // first: at() of the tile. used: rows of the tile that count; the others are left out.
  CUTE_DEVICE void load(Element const* first, int used, int64_t row_stride) const {
    constexpr int kLoadColumns = 32 * kChunk;
    // Whole rows a load: of 16-bit elements every width divides its columns.
    constexpr bool kIsWhole = kLoadColumns % kMostQuantizedColumns == 0;
    Element const* from = first;
    CUTE_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      int const columns = i * kLoadColumns;  // of the loads before
      int const rows = columns >> width_shift;
      if (!kIsWhole) {
        from = first + rows * row_stride + (columns - (rows << width_shift));
      }
      if (i < loads && row + rows < used) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target + 512 * i), "l"(from)
                     : "memory");
      }
      from += (kLoadColumns >> width_shift) * row_stride;
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // What load() leaves out of tiles with as many rows that count becomes 0, and stays so.
  CUTE_DEVICE void clear(int used) const {
    CUTE_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      if (i < loads && row + (i * 32 * kChunk >> width_shift) >= used) {
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(target + 512 * i), "r"(0)
                     : "memory");
      }
    }
  }

  // Waits for the load. The next one may follow at once.
  CUTE_DEVICE void read(RawRow<Element>& raw, ThreadPlace const& place) const {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncwarp();
    raw.clear();
    CUTE_UNROLL
    for (int i = 0; i < RawRow<Element>::kWords / 8; ++i) {
      if (i < RawRow<Element>::kWords / 16 || place.first_columns == kSpanColumns) {
        read_four(raw.words + 4 * i, spans[0] ^ (16 * i));
      }
      if (place.has_second()) {
        read_four(raw.words + RawRow<Element>::kWords / 2 + 4 * i, spans[1] ^ (16 * i));
      }
    }
    __syncwarp();
  }

 private:
  static CUTE_DEVICE uint32_t place_of(int chunk) {
    return 16 * uint32_t(chunk ^ (((chunk >> 3) ^ (chunk >> 4)) & 1));
  }

  static CUTE_DEVICE void read_four(uint32_t* words, uint32_t address) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
  }
};

}  // namespace fa3
