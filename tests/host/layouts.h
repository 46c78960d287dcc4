// CuTe's layouts on the CPU, for the tests: where an element of a tile lies in shared memory, and
// which element of a product each register of each thread holds. The types are those of the kernel
// (forward/traits.h), so that what is tested is what runs.
#pragma once

#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "device/fragments.h"
#include "forward/traits.h"
#include "fwd_variants.h"

namespace fa3::host {

// One number per element of a (rows, columns) array, row by row.
struct Grid {
  int rows;
  int columns;
  std::vector<int> values;
};

// Offsets in elements from the start of the buffer. The swizzle permutes address bits, so that it
// is the buffer's alignment that makes offsets meaningful: 1024 bytes.
template <class Layout>
Grid offsets(Layout layout) {
  auto const element_offsets = cute::as_position_independent_swizzle_layout(layout);
  Grid grid{int(cute::size<0>(layout)), int(cute::size<1>(layout)), {}};
  for (int row = 0; row < grid.rows; ++row) {
    for (int column = 0; column < grid.columns; ++column) {
      grid.values.push_back(int(element_offsets(row, column)));
    }
  }
  return grid;
}

using RowColumn = std::array<int, 2>;

// (row, column) for each element of a thread's share of a product, in the order of its registers.
template <class Share>
std::vector<RowColumn> coordinates(Share const& share) {
  std::vector<RowColumn> list;
  for (int i = 0; i < int(cute::size(share)); ++i) {
    auto const coordinate = share(i);
    list.push_back({int(cute::get<0>(coordinate)), int(cute::get<1>(coordinate))});
  }
  return list;
}

template <int kColumns>
auto tile_coordinates() {
  return cute::make_identity_tensor(cute::Shape<cute::_64, cute::Int<kColumns>>{});
}

// What the functions above say for the tile of one variant.
template <class Config>
struct TileLayouts {
  using Traits = FwdTraits<Config>;

  static Grid shared(char operand) {
    switch (operand) {
      case 'q':
        return offsets(typename Traits::SmemLayoutQ{});
      case 'k':
        return offsets(typename Traits::SmemLayoutK{});
      case 'v':
        return offsets(typename Traits::SmemLayoutV{});
      case 'o':
        return offsets(typename Traits::SmemLayoutO{});
    }
    throw std::invalid_argument("operand is one of q, k, v, o");
  }

  // Accumulators: S (64, tile_n) and O (64, head_dim_v).
  static std::vector<RowColumn> scores(int thread) {
    return coordinates(
        typename Traits::MmaS{}.get_slice(thread).partition_C(tile_coordinates<Traits::kTileN>()));
  }

  static std::vector<RowColumn> output(int thread) {
    return coordinates(typename Traits::MmaO{}.get_slice(thread).partition_C(
        tile_coordinates<Traits::kHeadDimV>()));
  }

  // P (64, tile_n), the A operand of PV in registers: what the product expects in each register ...
  static std::vector<RowColumn> probabilities_expected(int thread) {
    return coordinates(
        typename Traits::MmaO{}.get_slice(thread).partition_A(tile_coordinates<Traits::kTileN>()));
  }

  // ... and what is there when the accumulator of S is read through operand_a_layout().
  static std::vector<RowColumn> probabilities_found(int thread) {
    auto share =
        typename Traits::MmaS{}.get_slice(thread).partition_C(tile_coordinates<Traits::kTileN>());
    auto const registers = cute::make_layout(cute::shape(share));
    auto const operand = operand_a_layout(registers);
    std::vector<RowColumn> list;
    for (int i = 0; i < int(cute::size(operand)); ++i) {
      auto const coordinate = share(int(operand(i)));
      list.push_back({int(cute::get<0>(coordinate)), int(cute::get<1>(coordinate))});
    }
    return list;
  }
};

}  // namespace fa3::host
