// The Python module tests/_host: what the kernels compute with, exposed to brute-force tests on a
// machine without a GPU. pybind11, built in place, not part of the wheel. Functions keep their C++
// names; a struct becomes a tuple.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>

#include "core/block_range.h"
#include "core/dq_layout.h"
#include "core/query_range.h"
#include "core/row_packing.h"
#include "core/softmax_math.h"
#include "core/tile_order.h"
#include "dispatch/device_info.h"
#include "dispatch/plan_backward.h"
#include "dispatch/registry.h"
#include "dispatch/tma_rules.h"
#include "host/backward_work.h"
#include "host/layouts.h"

namespace py = pybind11;

namespace fa3::host {
namespace {

using Coord = std::tuple<int, int, int>;

// The tiles of each CTA, in its order of work: the loop of the kernel's roles.
std::vector<std::vector<Coord>> walk_tiles(bool causal, int m_tiles, int heads, int batch,
                                           int section_pairs, int ctas) {
  TileOrder const order(causal, m_tiles, heads, batch, section_pairs);
  std::vector<std::vector<Coord>> work(ctas);
  for (int cta = 0; cta < ctas; ++cta) {
    for (TileWalk walk(order, cta, ctas); walk.valid(); walk.next()) {
      TileCoord const tile = walk.coord();
      work[cta].emplace_back(tile.m, tile.head, tile.batch);
    }
  }
  return work;
}

// The first n of [begin, end) where FastDiv disagrees with the division operator; -1 when there is
// none.
int64_t first_wrong_quotient(int divisor, int64_t begin, int64_t end) {
  FastDiv const fast(divisor);
  for (int64_t n = begin; n < end; ++n) {
    if (fast.div(int(n)) != n / divisor || fast.mod(int(n)) != n % divisor) {
      return n;
    }
  }
  return -1;
}

std::string missing_variant(std::string const& op, int variant, std::vector<bool> const& built) {
  std::array<bool, std::size(kFwdVariants)> flags{};
  std::copy(built.begin(), built.end(), flags.begin());
  return missing_variant_text(op.c_str(), variant, flags);
}

std::string missing_backward(int variant, std::vector<bool> const& built) {
  std::array<bool, std::size(kBwdVariants)> flags{};
  std::copy(built.begin(), built.end(), flags.begin());
  return missing_backward_text(variant, flags);
}

bool can_address(std::array<int64_t, 4> const& sizes, std::array<int64_t, 4> const& strides,
                 int64_t address) {
  TensorMeta meta;
  meta.rank = 4;
  std::copy(sizes.begin(), sizes.end(), meta.size);
  std::copy(strides.begin(), strides.end(), meta.stride);
  meta.address = address;
  return tma_can_address(meta);
}

void bind_core(py::module_& m) {
  m.def("floor_div", &floor_div);
  m.def("ceil_div", &ceil_div);
  m.def("round_up", &round_up);
  m.def("clamp", &clamp);
  m.def("fast_div", [](int n, int divisor) { return FastDiv(divisor).div(n); });
  m.def("first_wrong_quotient", &first_wrong_quotient);
  m.def("largest_pack", &largest_pack);
  m.def("positions_per_warpgroup",
        [](int pack) { return RowPacking{pack}.positions_per_warpgroup(); });
  m.def("positions_per_tile",
        [](int pack, int warpgroups) { return RowPacking{pack}.positions_per_tile(warpgroups); });
  m.def("visible_end", [](int position, int seqlen_q, int seqlen_k, bool causal) {
    return visible_end(position, SeqlenPair{seqlen_q, seqlen_k}, causal);
  });
  m.def("block_range", [](int begin, int end, int seqlen_q, int seqlen_k, int tile_n, bool causal) {
    BlockRange const range =
        block_range(begin, end, SeqlenPair{seqlen_q, seqlen_k}, tile_n, causal);
    return std::tuple(range.free_end, range.end);
  });
  m.def("first_position", [](int key, int seqlen_q, int seqlen_k, bool causal) {
    return first_position(key, SeqlenPair{seqlen_q, seqlen_k}, causal);
  });
  m.def("query_range",
        [](int key_begin, int seqlen_q, int seqlen_k, int tile_m, int tile_n, bool causal) {
          QueryRange const range =
              query_range(key_begin, SeqlenPair{seqlen_q, seqlen_k}, tile_m, tile_n, causal);
          return std::tuple(range.begin, range.free_begin, range.end);
        });
  m.def("last_key_tile",
        [](int m, int seqlen_q, int seqlen_k, int tile_m, int tile_n, bool causal) {
          return last_key_tile(m, SeqlenPair{seqlen_q, seqlen_k}, tile_m, tile_n, causal);
        });
  m.def("walk_tiles", &walk_tiles);
  m.def("finite_max", &finite_max);
  m.def("log_sum_exp", &log_sum_exp);
  m.def("inverse_sum", &inverse_sum);
}

void bind_dispatch(py::module_& m) {
  m.def("missing_variant_text", &missing_variant);
  m.def("missing_backward_text", &missing_backward);
  m.def("find_backward_variant", [](bool is_bf16, bool causal, int64_t head_dim) {
    return find_backward_variant(is_bf16 ? Dtype::kBFloat16 : Dtype::kFloat16, causal, head_dim);
  });
  m.def("driver_problem", &driver_problem);
  m.def("capability_problem", [](int device, int major, int minor) {
    DeviceInfo info;
    info.index = device;
    info.capability_major = major;
    info.capability_minor = minor;
    return capability_problem(info);
  });
  m.def("tma_can_address", &can_address);
}

template <class Config>
py::dict tile_layouts() {
  using Layouts = TileLayouts<Config>;
  py::dict functions;
  functions["shared"] = py::cpp_function([](char operand) {
    Grid grid = Layouts::shared(operand);
    return std::tuple(grid.rows, grid.columns, std::move(grid.values));
  });
  functions["scores"] = py::cpp_function(&Layouts::scores);
  functions["output"] = py::cpp_function(&Layouts::output);
  functions["probabilities_expected"] = py::cpp_function(&Layouts::probabilities_expected);
  functions["probabilities_found"] = py::cpp_function(&Layouts::probabilities_found);
  functions["tile_n"] = Config::kTileN;
  functions["head_dim"] = Config::kHeadDim;
  functions["columns"] = padded_columns(Config::kHeadDim);
  return functions;
}

// A variant for each width in shared memory, and some with filling: the layouts do not depend on
// dtype or mask.
void bind_layouts(py::module_& m) {
  py::dict tiles;
  tiles["FwdTileD48"] = tile_layouts<FwdFp16D48Full>();
  tiles["FwdTileD64"] = tile_layouts<FwdBf16D64Full>();
  tiles["FwdTileD96"] = tile_layouts<FwdBf16D96Full>();
  tiles["FwdTileD128"] = tile_layouts<FwdFp16D128Causal>();
  tiles["FwdTileD176"] = tile_layouts<FwdFp16D176Full>();
  tiles["FwdTileD192"] = tile_layouts<FwdBf16D192Full>();
  tiles["FwdTileD256"] = tile_layouts<FwdBf16D256Full>();
  m.attr("layouts") = tiles;
  m.def("chunk_offset_bytes", &chunk_offset_bytes<kWarpgroupRows>);
  m.def("fragment_row", &fragment_row);
  m.def("fragment_column", &fragment_column);
}

using WorkTuple = std::tuple<int, std::pair<int, int>, int, int, std::tuple<int, int, int>>;
using StepTuple = std::tuple<int, int, bool, int64_t>;

// For each CTA (kv head, its query heads, batch, first key, query range) and its steps (head, tile
// of queries, is it masked, its place in the workspaces).
template <class Tile>
std::vector<std::pair<WorkTuple, std::vector<StepTuple>>> backward_work(
    std::tuple<int, int, int, int, int> sizes, bool causal, bool deterministic,
    BwdSchedule const& schedule) {
  FwdProblem problem;
  std::tie(problem.batch, problem.seqlen_q, problem.seqlen_k, problem.heads_q, problem.heads_k) =
      sizes;
  problem.causal = causal;
  problem.deterministic = deterministic;
  auto const ctas = causal ? work_of_ctas<WorkTraits<Tile, true>>(problem, schedule)
                           : work_of_ctas<WorkTraits<Tile, false>>(problem, schedule);
  std::vector<std::pair<WorkTuple, std::vector<StepTuple>>> result;
  for (CtaWork const& cta : ctas) {
    BwdWork const& work = cta.work;
    QueryRange const& queries = work.queries;
    auto& [_, steps] =
        result.emplace_back(WorkTuple{work.kv_head,
                                      {work.head_begin, work.head_end},
                                      work.batch,
                                      work.key_begin,
                                      {queries.begin, queries.free_begin, queries.end}},
                            std::vector<StepTuple>());
    for (Step const& step : cta.steps) {
      steps.emplace_back(step.head, step.m, step.is_masked, step.tile);
    }
  }
  return result;
}

template <class Tile>
py::dict backward_tile() {
  py::dict tile;
  tile["head_dim"] = Tile::kHeadDim;
  tile["tile_m"] = Tile::kTileM;
  tile["tile_n"] = bwd_tile_n<Tile>();
  tile["cluster_size"] = Tile::kClusterSize;
  tile["consumer_warpgroups"] = Tile::kConsumerWarpgroups;
  tile["other_columns"] = bwd_other_columns<Tile>();
  tile["dq_blocks"] = bwd_dq_blocks<Tile>();
  tile["dq_columns"] = bwd_dq_columns<Tile>();
  tile["dq"] = bwd_dq_layout<Tile>();
  tile["work"] = py::cpp_function([](std::tuple<int, int, int, int, int> sizes, bool causal,
                                     bool deterministic, std::array<int, 4> const& plan) {
    BwdSchedule schedule;
    schedule.m_tiles = plan[0];
    schedule.n_tiles = plan[1];
    schedule.section_pairs = plan[2];
    schedule.grid = plan[3];
    return backward_work<Tile>(sizes, causal, deterministic, schedule);
  });
  return tile;
}

void bind_backward(py::module_& m) {
  py::class_<DqLayout>(m, "DqLayout")
      .def(py::init([](int columns, bool side_by_side) { return DqLayout{columns, side_by_side}; }))
      .def_readonly("columns", &DqLayout::columns)
      .def_readonly("side_by_side", &DqLayout::side_by_side)
      .def("block_floats", &DqLayout::block_floats)
      .def("chunk_pair", &DqLayout::chunk_pair)
      .def_static("first_of", &DqLayout::first_of)
      .def("first_row", &DqLayout::first_row)
      .def("first_column", &DqLayout::first_column);
  py::dict tiles;
  tiles["BwdTileD64"] = backward_tile<BwdTileD64>();
  tiles["BwdTileD96"] = backward_tile<BwdTileD96>();
  tiles["BwdTileD128"] = backward_tile<BwdTileD128>();
  tiles["BwdTileD192"] = backward_tile<BwdTileD192>();
  tiles["BwdTileD256"] = backward_tile<BwdTileD256>();
  m.attr("backward_tiles") = tiles;
}

}  // namespace
}  // namespace fa3::host

PYBIND11_MODULE(_host, m) {
  m.doc() = "Index arithmetic, plans and layouts of flash_attn3, for tests without a GPU.";
  fa3::host::bind_core(m);
  fa3::host::bind_dispatch(m);
  fa3::host::bind_layouts(m);
  fa3::host::bind_backward(m);
}
