// Where the fp32 accumulator of dQ keeps an element. The accumulator is private to the three
// backward kernels, so a tile lies there as the tensor cores leave it in registers: the main kernel
// adds a block of it by one bulk copy, staged without bank conflicts, or from registers with whole
// lines; the last kernel undoes the order.
//
// A tile is cut into blocks of 64 rows: side by side where the tile has 64 rows, one below the
// other else. A block is (8 columns, thread, 4 values), the values being two columns of a row and
// of the row eight further down.
#pragma once

#include "core/int_math.h"

namespace fa3 {

struct DqLayout {
  int columns;        // of a block
  bool side_by_side;  // the blocks

  static constexpr int kRows = 64;
  static constexpr int kThreads = 128;

  FA3_HD constexpr int block_floats() const { return kRows * columns; }

  // The 16 floats with 8 columns (a chunk) of `row` and of row + 8; row % 16 < 8 in its block.
  FA3_HD constexpr int chunk_pair(int block, int row, int chunk) const {
    int const thread = row / 16 * 32 + row % 8 * 4;
    return block * block_floats() + (chunk * kThreads + thread) * 4;
  }

  // Of `blocks`, those that the CTA of a rank makes of a tile of queries, when two share them out:
  // [first_of(rank), first_of(rank + 1)). Of an odd number the middle one goes from hand to hand,
  // by the tile, so that for one tile it is always the same rank.
  FA3_HD static constexpr int first_of(int rank, int blocks, int m) {
    return rank == 0 ? 0 : rank == 1 ? (blocks + (m & 1)) / 2 : blocks;
  }

  FA3_HD constexpr int first_row(int block) const { return side_by_side ? 0 : block * kRows; }

  FA3_HD constexpr int first_column(int block) const { return side_by_side ? block * columns : 0; }
};

}  // namespace fa3
