// FP8 quantisation: which thread has which rows and columns of a tile, the signs of the rotation,
// which rows a tile has and where their scale lies. The arithmetic of flash_attn3/quantize.py, for
// quantize/quantize.cu.
//
// A row that is rotated is cut into its powers of two, largest first. A lane has two spans of 16
// columns of a piece, half the width apart: butterflies of the distances 1 to 8 and of half the
// width stay in a thread, those between go from lane to lane. A piece of width 16 is one span, one
// of width 8 half of one.
#pragma once

#include "core/packed_tiles.h"

namespace fa3 {

constexpr int kChunkColumns = 8;
constexpr int kSpanColumns = 2 * kChunkColumns;
constexpr int kLaneColumns = 2 * kSpanColumns;
constexpr int kRowLanes = 3;   // of a row, LaneOrder::kRows
constexpr int kChunkRows = 4;  // of a thread, LaneOrder::kChunks
constexpr int kMostQuantizedColumns = 256;
// In place of the rows of a block; flash_attn3/quantize.py has the same numbers.
constexpr int kScalePerHead = 0;
constexpr int kScalePerTensor = -1;

// ---------------------------------------------------------------------------------------- columns
// kPieces: a warp has pieces of one width, of as many rows as it takes to give all of its lanes
// columns; rows that are not rotated may be cut so as well. kRows: the lanes of a row stand next to
// each other, for rows of three lanes: two with a piece of 64 columns, one with what is left.
// kChunks, not rotated: ChunkPlace.
enum class LaneOrder { kPieces, kRows, kChunks };

// Lanes that share a piece.
FA3_HD constexpr int lanes_of_piece(int width) { return max_of(width / kLaneColumns, 1); }

FA3_HD constexpr int rows_of_warp(int width) { return 32 / lanes_of_piece(width); }

// Of a tile, for all of its pieces of a width.
FA3_HD constexpr int warps_of_piece(int width, int tile) {
  return ceil_div(tile * lanes_of_piece(width), 32);
}

// head_dim is a multiple of 8.
constexpr int warps_of_tile(LaneOrder order, int head_dim, int tile) {
  if (order == LaneOrder::kRows) {
    return ceil_div(tile * kRowLanes, 32);
  }
  if (order == LaneOrder::kChunks) {
    return ceil_div(ceil_div(tile, kChunkRows) * (head_dim / kChunkColumns), 32);
  }
  int warps = 0;
  for (int width = kChunkColumns; width <= kMostQuantizedColumns; width *= 2) {
    warps += (head_dim & width) != 0 ? warps_of_piece(width, tile) : 0;
  }
  return warps;
}

// The columns of a thread and its row of a tile, which may be behind the last one.
struct ThreadPlace {
  int column;    // the first of the first span
  int distance;  // to the second span
  int width;     // of the piece
  int row;
  int first_columns;   // of the first span: 8 or 16
  int second_columns;  // of the second: 0 or 16

  // end: behind the last column of the piece.
  static FA3_HD constexpr ThreadPlace of(int column, int distance, int end, int width, int row) {
    return ThreadPlace{column,
                       distance,
                       width,
                       row,
                       clamp(end - column, 0, kSpanColumns),
                       clamp(end - column - distance, 0, kSpanColumns)};
  }

  FA3_HD constexpr bool has_second() const { return second_columns > 0; }
  FA3_HD constexpr int second() const { return column + distance; }
};

FA3_HD constexpr ThreadPlace thread_place(int thread, int head_dim, int tile) {
  int warp = thread / 32;
  int start = 0;
  int width = kMostQuantizedColumns;
  for (; width > kChunkColumns; width /= 2) {
    int const warps = (head_dim & width) != 0 ? warps_of_piece(width, tile) : 0;
    if (warp < warps) {
      break;
    }
    warp -= warps;
    start += head_dim & width;
  }
  int const lanes = lanes_of_piece(width);
  return ThreadPlace::of(start + thread % lanes * kSpanColumns, max_of(width / 2, kSpanColumns),
                         start + width, width, warp * rows_of_warp(width) + thread % 32 / lanes);
}

// LaneOrder::kRows: the first two lanes share a piece. Of rows 21, 53, .. they are the last two, as
// those of a piece have to be in a warp.
FA3_HD constexpr ThreadPlace thread_place_in_row(int thread, int head_dim) {
  constexpr int kWidest = 2 * kLaneColumns;
  int const row = thread / kRowLanes;
  int const part = (thread % kRowLanes + (row % 32 == 21 ? 2 : 0)) % kRowLanes;
  return part < 2 ? ThreadPlace::of(part * kSpanColumns, kWidest / 2, kWidest, kWidest, row)
                  : ThreadPlace::of(kWidest, kSpanColumns, head_dim, head_dim - kWidest, row);
}

// LaneOrder::kChunks: 8 columns, of the rows `row`, `row` + `row_step`, .., which may be behind the
// last one. So that the lanes of a warp load and store columns that follow each other.
struct ChunkPlace {
  int column;
  int row;
  int row_step;
};

FA3_HD constexpr ChunkPlace chunk_place(int thread, int head_dim, int tile) {
  int const row_step = ceil_div(tile, kChunkRows);
  int const row = thread / (head_dim / kChunkColumns);
  return ChunkPlace{thread % (head_dim / kChunkColumns) * kChunkColumns,
                    row < row_step ? row : tile, row_step};
}

// Of values that are written: 32 bytes at a multiple of 32, which go to L2 as a whole or in parts.
constexpr int kSectorBytes = 32;

// Whether neighbouring heads share sectors, no thread has a part of those at both ends of a row,
// and the rows of a thread begin at the same place of a sector.
FA3_HD constexpr bool shares_sectors(int head_dim, int row_step) {
  return head_dim % kSectorBytes != 0 && head_dim > kSectorBytes &&
         row_step * kChunkColumns % kSectorBytes == 0;
}

// What a chunk has to do with the sectors that its head shares with the one before and the next.
struct SectorPart {
  bool completes;  // the last one of the head before
  bool waits;      // for the next head
};

// address: of the row's first byte. is_first, is_last: head that the CTA writes.
FA3_HD constexpr SectorPart sector_part(uint64_t address, int column, int head_dim, bool is_first,
                                        bool is_last) {
  int const begin = int(address % kSectorBytes);
  int const at = begin + column;  // counted from the row's first sector
  int const sector_end = (at / kSectorBytes + 1) * kSectorBytes;
  return SectorPart{begin > 0 && at < kSectorBytes && !is_first,
                    sector_end > begin + head_dim && !is_last};
}

// LaneOrder::kRows, head dim 80: a row is two sectors and a half, and its lanes write it in three
// stores, each of whole sectors. The half, which a lane has as its second span, waits for the first
// store of the next head if there is one. The store of each span of a lane:
struct SpanStores {
  int first;   // -1: it has none
  int second;  // 3: of the next head
};

FA3_HD constexpr SpanStores span_stores(uint64_t row_address, int column, bool is_last) {
  bool const is_inside = row_address % kSectorBytes != 0;
  if (column >= 2 * kLaneColumns) {
    return SpanStores{-1, is_inside || is_last ? 2 : 3};
  }
  bool const is_late = is_inside && column > 0;
  return SpanStores{is_late, 1 + is_late};
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

// CTAs take items in turns: the next one of a CTA, from here on. passed: items of theirs before;
// turns: a power of two.
FA3_HD constexpr int place_in_turn(int cta, int passed, int turns) {
  return (cta - passed) & (turns - 1);
}

// The number of the first tile of an entry, from 0 on; that of entry -1 is 0.
FA3_HD int first_tile(QuantizeShape const& s, int const* cu, int entry) {
  return entry < 0 ? 0 : s.by_tile.div(clamp(cu[entry], 0, s.rows)) + entry + 1;
}

// Of the tensor, all rows of an entry.
FA3_HD Interval rows_of_entry(QuantizeShape const& s, int const* cu, int entry) {
  int const begin = entry < 0 ? 0 : clamp(cu[entry], 0, s.rows);
  return Interval{begin, entry < s.batch ? clamp(cu[entry + 1], begin, s.rows) : s.rows};
}

// The tiles with rows of an entry, which have its first numbers: full ones, then the last one.
struct EntryTiles {
  int before_last;
  int last_rows;  // 0: the entry has no rows
};

FA3_HD EntryTiles tiles_of_entry(QuantizeShape const& s, int const* cu, int entry) {
  Interval const rows = rows_of_entry(s, cu, entry);
  int const count = rows.end - rows.begin;
  int const before_last = max_of(s.by_tile.div(count + s.tile - 1) - 1, 0);
  return EntryTiles{before_last, count - before_last * s.tile};
}

// A tile by its number and the last entry that does not begin behind it.
FA3_HD QuantizeTile packed_tile(QuantizeShape const& s, int const* cu, int const* seqused, int tile,
                                int entry) {
  int const index = tile - first_tile(s, cu, entry);
  bool const is_sequence = entry >= 0 && entry < s.batch;
  auto const [from, to] = rows_of_entry(s, cu, entry);
  int const used = is_sequence ? packed_rows(cu, seqused, entry, s.rows).length : 0;
  int64_t const skipped = int64_t(index) * s.tile;
  if (index < 0 || skipped > to - from) {
    return QuantizeTile{entry, index, 0, 0, 0};
  }
  int const before = int(skipped);
  return QuantizeTile{entry, index, from + before, clamp(used - before, 0, s.tile),
                      min_of(to - from - before, s.tile)};
}

// Packed sequences, in clusters: the CTAs of one share a tile, or teams of them one each, so that
// few are without rows where a sequence ends within a tile. Sizes of teams: all CTAs, half of them,
// a quarter, an eighth, each rounded down. Who is in one team is so in every larger size too.
constexpr int kTeamSizes = 4;

struct TeamSize {
  int ctas = 0;       // 0: there are none of this size
  int teams = 1;      // of a cluster
  int most_rows = 0;  // of their tiles
  FastDiv by_ctas;
  FastDiv by_teams;

  TeamSize() = default;

  // cta_rows: of a CTA, at most.
  TeamSize(int cluster_ctas, int cta_rows, int size)
      : ctas(cluster_ctas >> size),
        teams(cluster_ctas / max_of(ctas, 1)),
        most_rows(ctas * cta_rows),
        by_ctas(max_of(ctas, 1)),
        by_teams(teams) {}
};

// The smallest teams for a tile of so many rows: not above those of the first size.
FA3_HD int team_size_for(TeamSize const (&sizes)[kTeamSizes], int rows) {
  int found = 0;
  for (int size = 1; size < kTeamSizes; ++size) {
    found += rows <= sizes[size].most_rows;
  }
  return found;
}

// The tiles of an entry that are for teams of a size, by their place in the entry.
FA3_HD Interval tiles_for_teams(TeamSize const (&sizes)[kTeamSizes], EntryTiles tiles, int size) {
  bool const has_last = tiles.last_rows > 0 && team_size_for(sizes, tiles.last_rows) == size;
  return Interval{size > 0 ? tiles.before_last : 0, tiles.before_last + has_last};
}

// Bundles: the tiles that the teams of a cluster work on at the same time, one each; larger teams
// first.
struct Bundles {
  int tiles[kTeamSizes];  // for teams of a size
  int ends[kTeamSizes];   // behind the last bundle of a size

  static FA3_HD Bundles of(TeamSize const (&sizes)[kTeamSizes], int const (&tiles)[kTeamSizes]) {
    Bundles result{};
    int end = 0;
    for (int size = 0; size < kTeamSizes; ++size) {
      end += sizes[size].by_teams.div(tiles[size] + sizes[size].teams - 1);
      result.tiles[size] = tiles[size];
      result.ends[size] = end;
    }
    return result;
  }

  FA3_HD int count() const { return ends[kTeamSizes - 1]; }
};

// What a CTA has of a bundle.
struct TeamPlace {
  int size;   // of its team
  int tile;   // among the tiles for teams of this size; below 0: none
  int rank;   // in the team
  int begin;  // the rank in the cluster of the team's first
};

// rank: in the cluster. Behind the last bundle there are no tiles.
FA3_HD TeamPlace team_place(TeamSize const (&sizes)[kTeamSizes], Bundles const& bundles, int bundle,
                            int rank) {
  int size = 0;
  for (int larger = 0; larger + 1 < kTeamSizes; ++larger) {
    size += bundle >= bundles.ends[larger];
  }
  int const before = size > 0 ? bundles.ends[size - 1] : 0;
  TeamSize const& own = sizes[size];
  int const team = own.by_ctas.div(rank);
  int const tile = (bundle - before) * own.teams + team;
  int const begin = team * own.ctas;
  bool const has_tile = team < own.teams && tile < bundles.tiles[size];
  return TeamPlace{size, has_tile ? tile : -1, rank - begin, begin};
}

// The rows of one of the CTAs that share a tile: the first has `rows` of them, and so on.
FA3_HD QuantizeTile part_of(QuantizeTile tile, int rank, int rows) {
  int const before = min_of(rank * rows, tile.written);
  tile.begin += before;
  tile.written = clamp(tile.written - before, 0, rows);
  tile.used = clamp(tile.used - before, 0, rows);
  return tile;
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

// ------------------------------------------------------------------------------------------ items
// A tile of one head. Items that share a scale stand next to each other: of an entry, first the
// tiles of the first block, all heads of a scale for each.
struct ItemOrder {
  int scale_heads = 1;  // heads with one scale
  int scale_tiles = 1;  // most tiles of a head with one scale
  bool is_one_scale = false;

  static ItemOrder of(QuantizeShape const& s) {
    if (s.block == kScalePerTensor) {
      return ItemOrder{s.heads, int(s.tiles()), true};
    }
    if (s.block == kScalePerHead) {
      return ItemOrder{s.group, ceil_div(s.rows, s.tile) + s.is_packed, false};
    }
    return ItemOrder{1, s.block / s.tile, false};
  }

  // Most items with one scale.
  int64_t span() const { return int64_t(scale_tiles) * scale_heads; }
};

struct QuantizeItem {
  int tile;   // number
  int head;   // not below shape.heads: nothing to do, which nonsense alone brings about
  int first;  // of the items that share its scale
  int count;  // of them
};

// first: number of the first tile of the item's entry, which has so many tiles. Of nonsense there
// comes a range that is no longer than order.span() and begins no later than the item.
FA3_HD QuantizeItem quantize_item(QuantizeShape const& s, ItemOrder const& order, int first,
                                  int tiles, int item) {
  int const in_entry = item - first * s.heads;
  int const block_tile = in_entry / (order.scale_tiles * s.heads) * order.scale_tiles;
  int const own_tiles = clamp(tiles - block_tile, 1, order.scale_tiles);
  int const in_block = in_entry - block_tile * s.heads;
  int const scale = in_block / (own_tiles * order.scale_heads);
  int const in_scale = in_block - scale * own_tiles * order.scale_heads;
  int const tile = in_scale / order.scale_heads;
  return QuantizeItem{first + block_tile + tile, (scale - tile) * order.scale_heads + in_scale,
                      item - in_scale, own_tiles * order.scale_heads};
}

// The last entry that does not begin behind a tile; nonsense gives any.
FA3_HD int entry_before(QuantizeShape const& s, int const* cu, int tile) {
  int low = -1;
  int high = s.batch;
  while (low < high) {
    int const middle = low + (high - low + 1) / 2;
    bool const is_before = first_tile(s, cu, middle) <= tile;
    low = is_before ? middle : low;
    high = is_before ? high : middle - 1;
  }
  return low;
}

struct ItemTile {
  QuantizeItem item;
  QuantizeTile tile;
};

FA3_HD ItemTile find_item(QuantizeShape const& s, ItemOrder const& order, int const* cu,
                          int const* seqused, int number) {
  int const from = number / s.heads;  // a tile of the same entry
  int const entry = s.is_packed ? entry_before(s, cu, from) : s.by_entry_tiles.div(from);
  int first = 0;
  int end = int(s.tiles());
  if (!order.is_one_scale && !s.is_packed) {
    first = entry * int(s.by_entry_tiles.divisor);
    end = first + int(s.by_entry_tiles.divisor);
  } else if (!order.is_one_scale) {
    first = min_of(first_tile(s, cu, entry), from);
    end = entry < s.batch ? first_tile(s, cu, entry + 1) : end;
  }
  QuantizeItem const item = quantize_item(s, order, first, end - first, number);
  return ItemTile{
      item, s.is_packed ? packed_tile(s, cu, seqused, item.tile, entry) : dense_tile(s, item.tile)};
}

}  // namespace fa3
