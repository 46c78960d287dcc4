// Bindings of core/quantize_tiles.h for the tests' module.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <tuple>
#include <vector>

#include "core/quantize_tiles.h"

namespace fa3::host {

// What a CTA works out: (entry, first row, rows that count, all rows), head, (index of the scale,
// whether it writes that).
using WorkOfCta = std::tuple<std::tuple<int, int, int, int>, int, std::tuple<int64_t, bool>>;

// sizes: (batch, rows, heads, group, block, tile). Lists: of packed tensors. Gives the work of all
// CTAs and the number of scales.
inline std::tuple<std::vector<WorkOfCta>, int64_t> quantize_work(
    std::tuple<int, int, int, int, int, int> sizes, std::optional<std::vector<int>> cu_seqlens,
    std::optional<std::vector<int>> seqused) {
  QuantizeShape shape;
  int tile_rows = 0;
  std::tie(shape.batch, shape.rows, shape.heads, shape.group, shape.block, tile_rows) = sizes;
  shape.is_packed = cu_seqlens.has_value();
  shape.set_tile(tile_rows);
  int const* const cu = cu_seqlens ? cu_seqlens->data() : nullptr;
  int const* const used = seqused ? seqused->data() : nullptr;
  std::vector<WorkOfCta> found;
  for (int cta = 0; cta < int(shape.tiles()) * shape.heads; ++cta) {
    auto const [tile, head] = work_of_cta(shape, cu, used, cta);
    found.emplace_back(std::tuple(tile.entry, tile.begin, tile.used, tile.written), head,
                       std::tuple(scale_index(shape, tile, head), writes_scale(shape, tile, head)));
  }
  return {found, shape.scales()};
}

inline void bind_quantize(pybind11::module_& m) {
  m.def("quantize_work", &quantize_work);
  m.def("lanes_of_piece", &lanes_of_piece);
  m.def("column_of_lane", &column_of_lane);
  m.def("fragments_of_row", &fragments_of_row);
  m.def("hadamard_norm", &hadamard_norm);
  m.def("sign_bits", [](uint32_t seed, int kv_head, int column) {
    return sign_bits(mix(seed), kv_head, column);
  });
}

}  // namespace fa3::host
