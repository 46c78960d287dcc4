// FP8 quantisation: which thread has which columns of a row, the signs of the rotation, which rows
// a tile has and where their scale lies. The arithmetic of flash_attn3/quantize.py, for
// quantize/quantize.cu.
//
// A row is cut into its powers of two, largest first. A thread has two chunks of 8 columns of one
// of them, half its width apart: butterflies of the distances 1, 2, 4 and of half the width stay in
// a thread, those between go from lane to lane. A piece of width 8 has one chunk.
#pragma once

#include "core/packed_tiles.h"

namespace fa3 {

constexpr int kChunkColumns = 8;
constexpr int kLaneColumns = 2 * kChunkColumns;
constexpr int kMostQuantizedColumns = 256;
// In place of the rows of a block; flash_attn3/quantize.py has the same numbers.
constexpr int kScalePerHead = 0;
constexpr int kScalePerTensor = -1;

// ---------------------------------------------------------------------------------------- columns
struct LaneColumns {
  int first;  // column of the first chunk; the other one is width / 2 further
  int width;  // of the piece; 0: this lane has no columns

  FA3_HD constexpr bool has_first() const { return width > 0; }
  FA3_HD constexpr bool has_second() const { return width >= kLaneColumns; }
  FA3_HD constexpr int second() const { return first + width / 2; }
};

// Of the lanes that share a row. head_dim is a multiple of 8.
FA3_HD constexpr LaneColumns lane_columns(int lane, int head_dim) {
  int start = 0;
  for (int width = kMostQuantizedColumns; width >= kChunkColumns; width /= 2) {
    int const lanes = max_of(width / kLaneColumns, 1);
    if ((head_dim & width) != 0 && lane < lanes) {
      return LaneColumns{start + lane * kChunkColumns, width};
    }
    if ((head_dim & width) != 0) {
      lane -= lanes;
      start += width;
    }
  }
  return LaneColumns{0, 0};
}

// A power of two.
constexpr int lanes_of_row(int head_dim) {
  int lanes = 1;
  while (lanes * kLaneColumns < head_dim) {
    lanes *= 2;
  }
  return lanes;
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

// Bit i is set if column `column` + i changes its sign; column: a multiple of 8. mixed_seed:
// mix(seed).
FA3_HD constexpr uint32_t sign_bits(uint32_t mixed_seed, int kv_head, int column) {
  uint32_t const word = mix(mix(mixed_seed + uint32_t(kv_head)) + uint32_t(column / 32));
  return (word >> (column % 32)) & 0xffu;
}

// ------------------------------------------------------------------------------------------ tiles
// A tensor that is quantised, and the rows of a tile. A block consists of whole tiles.
struct QuantizeShape {
  bool is_packed = false;
  int batch = 0;
  int rows = 0;  // of a batch entry; packed: of the tensor
  int heads = 0;
  int head_dim = 0;
  int group = 1;  // heads of a KV head
  int block = 0;  // rows, kScalePerHead or kScalePerTensor
  int tile = 0;
  // Divisors, set_tile():
  FastDiv by_tile;
  FastDiv by_entry_tiles;
  FastDiv by_group;

  void set_tile(int rows_of_tile) {
    tile = rows_of_tile;
    by_tile = FastDiv(tile);
    by_entry_tiles = FastDiv(max_of(ceil_div(rows, tile), 1));
    by_group = FastDiv(group);
  }

  // Packed tensors have the tiles of rows before the first sequence and behind the last one too,
  // and in between as many as there can be: nobody knows the lengths at the launch.
  constexpr int64_t tiles() const {
    return is_packed ? int64_t(rows / tile) + batch + 2 : int64_t(batch) * ceil_div(rows, tile);
  }

  FA3_HD constexpr int64_t places(int block_rows) const { return rows / block_rows + batch; }
};

// Entries -1 and batch have the rows before the first sequence and behind the last one.
struct QuantizeTile {
  int entry;
  int index;    // in the entry
  int begin;    // row of the tensor, dense: of the entry
  int used;     // rows that count; those behind them are written as 0
  int written;  // all rows
};

FA3_HD QuantizeTile dense_tile(QuantizeShape const& s, int tile) {
  int const entry = s.by_entry_tiles.div(tile);
  int const index = s.by_entry_tiles.mod(tile);
  int const begin = index * s.tile;
  int const rows = min_of(s.tile, s.rows - begin);
  return QuantizeTile{entry, index, begin, rows, rows};
}

// The number of the first tile of an entry, from 0 on; that of entry -1 is 0.
FA3_HD int first_tile(QuantizeShape const& s, int const* cu, int entry) {
  return entry < 0 ? 0 : s.by_tile.div(clamp(cu[entry], 0, s.rows)) + entry + 1;
}

// A tile by its number and the last entry that does not begin behind it.
FA3_HD QuantizeTile packed_tile(QuantizeShape const& s, int const* cu, int const* seqused, int tile,
                                int entry) {
  int const index = tile - first_tile(s, cu, entry);
  bool const is_sequence = entry >= 0 && entry < s.batch;
  int const from = entry < 0 ? 0 : clamp(cu[entry], 0, s.rows);
  int const to = entry < s.batch ? clamp(cu[entry + 1], from, s.rows) : s.rows;
  int const used = is_sequence ? packed_rows(cu, seqused, entry, s.rows).length : 0;
  int64_t const skipped = int64_t(index) * s.tile;
  if (index < 0 || skipped > to - from) {
    return QuantizeTile{entry, index, 0, 0, 0};
  }
  int const before = int(skipped);
  return QuantizeTile{entry, index, from + before, clamp(used - before, 0, s.tile),
                      min_of(to - from - before, s.tile)};
}

// ----------------------------------------------------------------------------------------- scales
// Where the scale of a tile and head lies, for tiles with rows that count.
FA3_HD int64_t scale_place(QuantizeShape const& s, int const* cu, QuantizeTile const& tile,
                           int head) {
  if (s.block == kScalePerTensor) {
    return 0;
  }
  if (s.block == kScalePerHead) {
    return int64_t(tile.entry) * (s.heads / s.group) + s.by_group.div(head);
  }
  int64_t const in_entry = int64_t(tile.index) * s.tile / s.block;
  if (!s.is_packed) {
    return (int64_t(tile.entry) * s.heads + head) * ceil_div(s.rows, s.block) + in_entry;
  }
  return head * s.places(s.block) + clamp(cu[tile.entry], 0, s.rows) / s.block + tile.entry +
         in_entry;
}

// Whether this tile and head stand for all that share their scale: they write it.
FA3_HD constexpr bool writes_scale(QuantizeShape const& s, QuantizeTile const& tile, int head) {
  if (s.block == kScalePerTensor) {
    return tile.index == 0 && head == 0 && tile.entry == (s.is_packed ? -1 : 0);
  }
  if (s.block == kScalePerHead) {
    return tile.index == 0 && head % s.group == 0 && tile.entry >= 0 && tile.entry < s.batch;
  }
  return tile.used > 0 && int64_t(tile.index) * s.tile % s.block == 0;
}

}  // namespace fa3
