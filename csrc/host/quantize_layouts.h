// Bindings of core/quantize_tiles.h for the tests' module.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <tuple>
#include <vector>

#include "core/quantize_tiles.h"

namespace fa3::host {

// What a CTA works out of a tile: its entry, first row, rows that count and all rows; for each head
// the place of its scale, and whether it writes that. No places where no row counts.
struct QuantizedTile {
  std::tuple<int, int, int, int> rows;
  std::vector<std::tuple<int64_t, bool>> scales;
};

inline QuantizedTile quantized_tile(QuantizeShape const& shape, int const* cu,
                                    QuantizeTile const& tile) {
  QuantizedTile result{{tile.entry, tile.begin, tile.used, tile.written}, {}};
  for (int head = 0; head < shape.heads; ++head) {
    bool const writes = writes_scale(shape, tile, head);
    bool const has_place = tile.used > 0 || writes;
    result.scales.emplace_back(has_place ? scale_place(shape, cu, tile, head) : -1, writes);
  }
  return result;
}

// sizes: (batch, rows, heads, group, block, tile).
inline QuantizeShape quantize_shape(std::tuple<int, int, int, int, int, int> sizes,
                                    bool is_packed) {
  QuantizeShape shape;
  int tile_rows = 0;
  std::tie(shape.batch, shape.rows, shape.heads, shape.group, shape.block, tile_rows) = sizes;
  shape.is_packed = is_packed;
  shape.set_tile(tile_rows);
  return shape;
}

// Lists: of packed tensors.
inline std::vector<QuantizedTile> quantized_tiles(std::tuple<int, int, int, int, int, int> sizes,
                                                  std::optional<std::vector<int>> cu_seqlens,
                                                  std::optional<std::vector<int>> seqused) {
  QuantizeShape const shape = quantize_shape(sizes, cu_seqlens.has_value());
  int const* const cu = cu_seqlens ? cu_seqlens->data() : nullptr;
  int const* const used = seqused ? seqused->data() : nullptr;
  std::vector<QuantizedTile> tiles;
  for (int number = 0; number < int(shape.tiles()); ++number) {
    int entry = -1;
    while (shape.is_packed && entry < shape.batch && first_tile(shape, cu, entry + 1) <= number) {
      ++entry;
    }
    tiles.push_back(quantized_tile(
        shape, cu,
        shape.is_packed ? packed_tile(shape, cu, used, number, entry) : dense_tile(shape, number)));
  }
  return tiles;
}

// The teams of clusters: (CTAs, most rows) of each size, and what each CTA has of each bundle, and
// behind the last one: (size, number of its tile or -1, rank in the team, the team's first CTA).
struct TeamTiles {
  std::vector<std::tuple<int, int>> sizes;
  std::vector<std::vector<std::tuple<int, int, int, int>>> bundles;
};

// cluster: (CTAs, rows of a CTA, sizes of teams).
inline TeamTiles team_tiles(std::tuple<int, int, int, int, int, int> sizes,
                            std::vector<int> const& cu_seqlens, std::tuple<int, int, int> cluster) {
  QuantizeShape const shape = quantize_shape(sizes, true);
  int const* const cu = cu_seqlens.data();
  auto const [ctas, cta_rows, size_count] = cluster;
  TeamTiles result;
  TeamSize team_sizes[kTeamSizes];
  std::vector<int> numbers[kTeamSizes];
  int counts[kTeamSizes];
  for (int size = 0; size < kTeamSizes; ++size) {
    team_sizes[size] = size < size_count ? TeamSize(ctas, cta_rows, size) : TeamSize();
    result.sizes.emplace_back(team_sizes[size].ctas, team_sizes[size].most_rows);
  }
  for (int size = 0; size < kTeamSizes; ++size) {
    for (int entry = -1; entry <= shape.batch; ++entry) {
      auto const [begin, end] = tiles_for_teams(team_sizes, tiles_of_entry(shape, cu, entry), size);
      for (int i = begin; i < end; ++i) {
        numbers[size].push_back(first_tile(shape, cu, entry) + i);
      }
    }
    counts[size] = int(numbers[size].size());
  }
  Bundles const bundles = Bundles::of(team_sizes, counts);
  for (int bundle = 0; bundle <= bundles.count(); ++bundle) {
    result.bundles.emplace_back();
    for (int rank = 0; rank < ctas; ++rank) {
      TeamPlace const place = team_place(team_sizes, bundles, bundle, rank);
      int const number = place.tile < 0 ? -1 : numbers[place.size].at(place.tile);
      result.bundles.back().emplace_back(place.size, number, place.rank, place.begin);
    }
  }
  return result;
}

// An item of the kernel that exchanges maxima: its tile, head, and of the items that share its
// scale the first one's number and how many they are.
struct QuantizedItem {
  QuantizedTile tile;
  int head;
  int first;
  int count;
};

struct QuantizedItems {
  std::vector<QuantizedItem> items;
  int64_t span;
};

// Arguments: as of quantized_tiles().
inline QuantizedItems quantized_items(std::tuple<int, int, int, int, int, int> sizes,
                                      std::optional<std::vector<int>> cu_seqlens,
                                      std::optional<std::vector<int>> seqused) {
  QuantizeShape const shape = quantize_shape(sizes, cu_seqlens.has_value());
  int const* const cu = cu_seqlens ? cu_seqlens->data() : nullptr;
  int const* const used = seqused ? seqused->data() : nullptr;
  ItemOrder const order = ItemOrder::of(shape);
  QuantizedItems result{{}, order.span()};
  for (int number = 0; number < int(shape.tiles()) * shape.heads; ++number) {
    auto const [item, tile] = find_item(shape, order, cu, used, number);
    result.items.push_back({quantized_tile(shape, cu, tile), item.head, item.first, item.count});
  }
  return result;
}

inline void bind_quantize(pybind11::module_& m) {
  pybind11::class_<QuantizedTile>(m, "QuantizedTile")
      .def_readonly("rows", &QuantizedTile::rows)
      .def_readonly("scales", &QuantizedTile::scales);
  m.def("quantized_tiles", &quantized_tiles);
  m.def("team_tiles", [](std::tuple<int, int, int, int, int, int> sizes,
                         std::vector<int> const& cu_seqlens, std::tuple<int, int, int> cluster) {
    TeamTiles const found = team_tiles(sizes, cu_seqlens, cluster);
    return std::tuple(found.sizes, found.bundles);
  });
  pybind11::class_<QuantizedItem>(m, "QuantizedItem")
      .def_readonly("tile", &QuantizedItem::tile)
      .def_readonly("head", &QuantizedItem::head)
      .def_readonly("first", &QuantizedItem::first)
      .def_readonly("count", &QuantizedItem::count);
  m.def("quantized_items", [](std::tuple<int, int, int, int, int, int> sizes,
                              std::optional<std::vector<int>> const& cu_seqlens,
                              std::optional<std::vector<int>> const& seqused) {
    QuantizedItems const found = quantized_items(sizes, cu_seqlens, seqused);
    return std::tuple(found.items, found.span);
  });
  // Tiles and parts: (first row, rows that count, all rows).
  m.def("part_of_tile", [](std::tuple<int, int, int> tile, int rank, int rows) {
    auto const [begin, used, written] = tile;
    QuantizeTile const part = part_of(QuantizeTile{0, 0, begin, used, written}, rank, rows);
    return std::tuple(part.begin, part.used, part.written);
  });
  // order: 0 kPieces, 1 kRows, 2 kChunks.
  m.def("warps_of_tile", [](int order, int head_dim, int tile) {
    return warps_of_tile(static_cast<LaneOrder>(order), head_dim, tile);
  });
  m.def("hadamard_norm", &hadamard_norm);
  m.def("sign_bits", [](uint32_t seed, int kv_head, int column) {
    return sign_bits(mix(seed), kv_head, column);
  });
  // (first column, that of the second span or -1, width of the piece, row).
  m.def("thread_place", [](bool in_row, int thread, int head_dim, int tile) {
    ThreadPlace const place =
        in_row ? thread_place_in_row(thread, head_dim) : thread_place(thread, head_dim, tile);
    return std::tuple(place.column, place.has_second() ? place.second() : -1, place.width,
                      place.row);
  });
  m.def("place_in_turn", &place_in_turn);
  m.def("shares_sectors", &shares_sectors);
  // (completes the last sector of the head before, waits for the next head).
  m.def("sector_part", [](uint64_t address, int column, int head_dim, bool is_first, bool is_last) {
    auto const [completes, waits] = sector_part(address, column, head_dim, is_first, is_last);
    return std::tuple(completes, waits);
  });
  // The stores of the first span and of the second.
  m.def("span_stores", [](uint64_t row_address, int column, bool is_last) {
    auto const [first, second] = span_stores(row_address, column, is_last);
    return std::tuple(first, second);
  });
  // (first column, rows).
  m.def("chunk_place", [](int thread, int head_dim, int tile) {
    ChunkPlace const place = chunk_place(thread, head_dim, tile);
    std::vector<int> rows(kChunkRows);
    for (int i = 0; i < kChunkRows; ++i) {
      rows[i] = place.row + i * place.row_step;
    }
    return std::tuple(place.column, rows);
  });
}

}  // namespace fa3::host
