// Maps an element of dQ to its index in the fp32 accumulator. The accumulator is private to the
// three backward kernels, so a tile is stored in the order in which the tensor cores leave it in
// registers: the main kernel adds a block of it by one bulk copy, staged without bank conflicts, or
// from registers in whole cache lines. The last kernel restores the order of rows and columns.
//
// A tile is split into blocks of 64 rows: side by side where the tile has 64 rows, otherwise one
// below the other. A block is (8 columns, thread, 4 values), where the values are two columns of a
// row and of the row eight further down.
#pragma once

#include "core/int_math.h"

namespace fa3 {

struct DqLayout {
  int columns;        // in a block
  bool side_by_side;  // the blocks

  static constexpr int kRows = 64;
  static constexpr int kThreads = 128;

  FA3_HD constexpr int block_floats() const { return kRows * columns; }

  // Index of the 16 floats of 8 columns (a chunk) of `row` and of row + 8; row % 16 < 8 in its
  // block.
  FA3_HD constexpr int chunk_pair(int block, int row, int chunk) const {
    int const thread = row / 16 * 32 + row % 8 * 4;
    return block * block_floats() + (chunk * kThreads + thread) * 4;
  }

  // The blocks of a tile of queries that the CTA of a rank computes, where two CTAs share `blocks`
  // blocks: [first_of(rank), first_of(rank + 1)). If their number is odd the ranks alternate on the
  // middle one, by tile, so that one tile always has the same rank.
  FA3_HD static constexpr int first_of(int rank, int blocks, int m) {
    return rank == 0 ? 0 : rank == 1 ? (blocks + (m & 1)) / 2 : blocks;
  }

  FA3_HD constexpr int first_row(int block) const { return side_by_side ? 0 : block * kRows; }

  FA3_HD constexpr int first_column(int block) const { return side_by_side ? block * columns : 0; }
};

}  // namespace fa3
