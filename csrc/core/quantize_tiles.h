// FP8 quantisation: the rows of a CTA, the location of their scale, the columns of a lane, the
// signs of the rotation. The index arithmetic of flash_attn3/cpu/quantize.py, for
// quantize/quantize.cu.
#pragma once

#include "core/packed_tiles.h"

namespace fa3 {

constexpr int kMostQuantizedColumns = 256;
constexpr int kChunkColumns = 8;  // head_dim is a multiple
constexpr int kSpanColumns = 16;
constexpr int kLaneColumns = 2 * kSpanColumns;
// In place of the rows of a block; flash_attn3/cpu/quantize.py has the same numbers.
constexpr int kScalePerHead = 0;
constexpr int kScalePerTensor = -1;

// ---------------------------------------------------------------------------------------- columns
// A row is split into its powers of two, the widest first: 80 = 64 + 16. A lane has two spans of 16
// columns of such a piece, half its width apart; pieces of 16 and 8 columns are one lane's.
// A fragment is what a lane has of a row.

FA3_HD constexpr int lanes_of_piece(int width) { return max_of(width / kLaneColumns, 1); }

// The column in the piece of column c of a lane.
FA3_HD constexpr int column_of_lane(int width, int lane, int c) {
  int const in_span = lane * kSpanColumns + c % kSpanColumns;
  return c < kSpanColumns ? in_span : in_span + width / 2;
}

FA3_HD constexpr int fragments_of_row(int head_dim) {
  int count = 0;
  for (int width = kChunkColumns; width <= kMostQuantizedColumns; width *= 2) {
    count += (head_dim & width) != 0 ? lanes_of_piece(width) : 0;
  }
  return count;
}

// The float32 next to width ** -0.5; every factor but the last is exact.
FA3_HD constexpr float hadamard_norm(int width) {
  float norm = 1.f;
  for (; width > 1; width /= 4) {
    norm *= width == 2 ? 0.70710678118654752f : 0.5f;
  }
  return norm;
}

// ------------------------------------------------------------------------------------------ signs
FA3_HD constexpr uint32_t mix(uint32_t x) {
  x += 0x9E3779B9u;
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// Bit i is set if column `column` + i changes its sign; column: a multiple of 16. mixed_seed:
// mix(seed).
FA3_HD constexpr uint32_t sign_bits(uint32_t mixed_seed, int kv_head, int column) {
  uint32_t const word = mix(mix(mixed_seed + uint32_t(kv_head)) + uint32_t(column / 32));
  return (word >> (column % 32)) & 0xffffu;
}

// ------------------------------------------------------------------------------------------ tiles
// A tensor that is quantised. A tile, the rows of a CTA, is a block; where a scale covers a head or
// the tensor, it has any number of rows.
struct QuantizeShape {
  bool is_packed = false;
  int batch = 0;
  int rows = 0;  // in a batch entry; packed: in the tensor
  int heads = 0;
  int head_dim = 0;
  int group = 1;  // heads of a KV head
  int block = 0;  // rows, kScalePerHead or kScalePerTensor
  // set_tile():
  int tile = 0;  // rows
  FastDiv by_tile;
  FastDiv by_entry_tiles;
  FastDiv by_heads;
  FastDiv by_group;

  void set_tile(int tile_rows) {
    tile = tile_rows;
    by_tile = FastDiv(tile);
    by_entry_tiles = FastDiv(max_of(ceil_div(rows, tile), 1));
    by_heads = FastDiv(heads);
    by_group = FastDiv(group);
  }

  // Packed: also tiles of the rows before the first sequence and after the last one, and as many
  // as there can be, because the host does not know the lengths.
  constexpr int64_t tiles() const {
    return is_packed ? int64_t(rows / tile) + batch + 2 : int64_t(batch) * ceil_div(rows, tile);
  }

  // Scales of a head, packed.
  FA3_HD constexpr int64_t packed_blocks() const { return rows / block + batch; }

  constexpr int64_t scales() const {
    return block == kScalePerTensor ? 1
           : block == kScalePerHead ? int64_t(batch) * (heads / group)
           : is_packed              ? heads * packed_blocks()
                                    : int64_t(batch) * heads * ceil_div(rows, block);
  }
};

// Entries -1 and batch have the rows before the first sequence and after the
// last one.
struct QuantizeTile {
  int number;
  int entry;
  int index;    // in the entry
  int begin;    // row of the tensor, dense: of the entry
  int used;     // rows that count; the others are written as 0
  int written;  // all rows
};

FA3_HD QuantizeTile dense_tile(QuantizeShape const& s, int number) {
  int const index = s.by_entry_tiles.mod(number);
  int const rows = min_of(s.tile, s.rows - index * s.tile);
  return QuantizeTile{number, s.by_entry_tiles.div(number), index, index * s.tile, rows, rows};
}

// The number of the first tile of an entry; entry -1 begins with 0.
FA3_HD int first_tile(QuantizeShape const& s, int const* cu, int entry) {
  return entry < 0 ? 0 : s.by_tile.div(clamp(cu[entry], 0, s.rows)) + entry + 1;
}

// The last entry that does not begin after a tile. Nonsense in cu gives any entry.
FA3_HD int entry_of_tile(QuantizeShape const& s, int const* cu, int number) {
  int low = -1;
  int high = s.batch;
  while (low < high) {
    int const middle = low + (high - low + 1) / 2;
    bool const is_before = first_tile(s, cu, middle) <= number;
    low = is_before ? middle : low;
    high = is_before ? high : middle - 1;
  }
  return low;
}

FA3_HD QuantizeTile packed_tile(QuantizeShape const& s, int const* cu, int const* seqused,
                                int number) {
  int const entry = entry_of_tile(s, cu, number);
  int const index = number - first_tile(s, cu, entry);
  bool const is_sequence = entry >= 0 && entry < s.batch;
  int const begin = entry < 0 ? 0 : clamp(cu[entry], 0, s.rows);
  int const end = entry < s.batch ? clamp(cu[entry + 1], begin, s.rows) : s.rows;
  int const used = is_sequence ? packed_rows(cu, seqused, entry, s.rows).length : 0;
  int64_t const before = int64_t(index) * s.tile;
  if (index < 0 || before > end - begin) {
    return QuantizeTile{number, entry, index, 0, 0, 0};
  }
  return QuantizeTile{number,
                      entry,
                      index,
                      begin + int(before),
                      clamp(used - int(before), 0, s.tile),
                      min_of(end - begin - int(before), s.tile)};
}

// CTAs that follow each other have the same rows of heads that follow each other in memory.
struct QuantizeWork {
  QuantizeTile tile;
  int head;
};

FA3_HD QuantizeWork work_of_cta(QuantizeShape const& s, int const* cu, int const* seqused,
                                int cta) {
  int const number = s.by_heads.div(cta);
  return QuantizeWork{s.is_packed ? packed_tile(s, cu, seqused, number) : dense_tile(s, number),
                      s.by_heads.mod(cta)};
}

// ----------------------------------------------------------------------------------------- scales
// The index of the scale of a tile and head; -1: the tile has none, and no row that counts. Packed
// blocks: tile n + 1 is block n, so that blocks without rows have a tile too.
FA3_HD int64_t scale_index(QuantizeShape const& s, QuantizeTile const& tile, int head) {
  if (s.block == kScalePerTensor) {
    return 0;
  }
  if (s.block == kScalePerHead) {
    bool const is_sequence = tile.entry >= 0 && tile.entry < s.batch;
    return is_sequence ? int64_t(tile.entry) * (s.heads / s.group) + s.by_group.div(head) : -1;
  }
  if (!s.is_packed) {
    return (int64_t(tile.entry) * s.heads + head) * s.by_entry_tiles.divisor + tile.index;
  }
  bool const is_block = tile.number > 0 && tile.number <= s.packed_blocks();
  return is_block ? head * s.packed_blocks() + tile.number - 1 : -1;
}

// Whether the CTA of a tile and head writes the scale at scale_index(): one of those that share it.
FA3_HD bool writes_scale(QuantizeShape const& s, QuantizeTile const& tile, int head) {
  if (s.block == kScalePerTensor) {
    return tile.number == 0 && head == 0;
  }
  bool const is_first = s.block > 0 || (tile.index == 0 && s.by_group.mod(head) == 0);
  return is_first && scale_index(s, tile, head) >= 0;
}

}  // namespace fa3
