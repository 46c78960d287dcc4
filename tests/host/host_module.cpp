// The Python module tests.host._host: what the kernels compute with, exposed to brute-force tests
// on a machine without a GPU. pybind11, built in place, not part of the wheel. Functions keep their
// C++ names; a struct becomes a tuple.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <tuple>

#include "forward/fp8/compact_ring.h"
#include "config/dq_layout.h"
#include "backward/query_range.h"
#include "core/row_packing.h"
#include "core/softmax_math.h"
#include "core/tile_order.h"
#include "call/device_info.h"
#include "plan/plan_backward.h"
#include "plan/registry.h"
#include "call/tma_rules.h"
#include "backward_work.h"
#include "cache_bindings.h"
#include "core_bindings.h"
#include "layouts.h"
#include "prefix_bindings.h"
#include "quantize_layouts.h"

namespace py = pybind11;

namespace fa3::host {
namespace {

using Coord = std::tuple<int, int, int>;

// The stage and phase of each of the first steps.
template <int kStages>
std::vector<std::tuple<int, int>> walk_ring(int steps) {
  std::vector<std::tuple<int, int>> seen;
  for (CompactRing<kStages> ring; int(seen.size()) < steps; ring.advance()) {
    seen.emplace_back(ring.stage(), int(ring.phase()));
  }
  return seen;
}

// All tiles (m, head, batch) in their order.
std::vector<Coord> ordered_tiles(bool causal, int m_tiles, int heads, int batch, int section_pairs,
                                 int least_last_pairs) {
  TileOrder const order(causal, m_tiles, heads, batch, section_pairs, least_last_pairs);
  std::vector<Coord> coords;
  for (int number = 0; number < m_tiles * heads * batch; ++number) {
    TileCoord const tile = order.coord(number);
    coords.emplace_back(tile.m, tile.head, tile.batch);
  }
  return coords;
}

// The tile (m, head, sequence) of every ticket, of sequences with so many tiles of a head.
std::vector<Coord> ticket_tiles(std::vector<int> const& tiles, int heads, int section_heads) {
  TicketOrder const order{FastDiv(heads), FastDiv(section_heads)};
  std::vector<Coord> coords;
  SequenceTiles s{};
  for (int i = 0; i < int(tiles.size()); ++i) {
    s.index = i;
    s.tiles = tiles[i];
    for (int j = 0; j < tiles[i] * heads; ++j) {
      TileCoord const tile = order.coord(s, s.tile_base * heads + j);
      coords.emplace_back(tile.m, tile.head, tile.batch);
    }
    s.tile_base += tiles[i];
  }
  return coords;
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
                 int64_t address, bool is_fp8) {
  TensorMeta meta;
  meta.dtype = is_fp8 ? Dtype::kFloat8E4M3 : Dtype::kBFloat16;
  meta.rank = 4;
  std::copy(sizes.begin(), sizes.end(), meta.size);
  std::copy(strides.begin(), strides.end(), meta.stride);
  meta.address = address;
  return tma_can_address(meta);
}

// An index of kBuiltKinds; then of an interval mask: left, right (-1: no limit), chunk (0: none).
using MaskTuple = std::tuple<int, int, int, int>;

IntervalMask interval_mask(MaskTuple const& tuple) {
  auto const [_, left, right, chunk] = tuple;
  IntervalMask mask;
  mask.left = left < 0 ? IntervalMask::kNoLimit : left;
  mask.right = right < 0 ? IntervalMask::kNoLimit : right;
  mask.is_chunked = chunk > 0;
  mask.chunk = FastDiv(max_of(1, chunk));
  return mask;
}

template <class Function>
auto with_mask(MaskTuple const& tuple, Function function) {
  switch (kBuiltKinds[std::get<0>(tuple)].kind.mask) {
    case MaskKind::kFull:
      return function(FullMask{});
    case MaskKind::kCausal:
      return function(CausalMask{});
    default:
      return function(interval_mask(tuple));
  }
}

void bind_core(py::module_& m) {
  m.def("compact_ring_1", &walk_ring<1>);
  m.def("compact_ring_2", &walk_ring<2>);
  m.def("compact_ring_3", &walk_ring<3>);
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
  m.def("lead_positions", &lead_positions);
  m.def("key_tiles",
        [](int m, int seqlen_q, int seqlen_k, int tile_m, int tile_n, MaskTuple const& tuple) {
          return with_mask(tuple, [&](auto const& mask) {
            BlockRange const range = block_range(m * tile_m, (m + 1) * tile_m,
                                                 SeqlenPair{seqlen_q, seqlen_k}, tile_n, mask);
            return std::pair(range.begin, range.end);
          });
        });
  m.def("queries_of_key", [](int key, int seqlen_q, int seqlen_k, MaskTuple const& tuple) {
    return with_mask(tuple, [&](auto const& mask) {
      Interval const queries = mask.queries(key, SeqlenPair{seqlen_q, seqlen_k});
      return std::pair(queries.begin, queries.end);
    });
  });
  m.def("query_range", [](int key_begin, int seqlen_q, int seqlen_k, int tile_m, int tile_n,
                          MaskTuple const& tuple) {
    return with_mask(tuple, [&](auto const& mask) {
      QueryRange const range =
          query_range(key_begin, SeqlenPair{seqlen_q, seqlen_k}, tile_m, tile_n, mask);
      return std::tuple(range.begin, range.free_begin, range.free_end, range.end);
    });
  });
  m.def("ordered_tiles", &ordered_tiles, py::arg("causal"), py::arg("m_tiles"), py::arg("heads"),
        py::arg("batch"), py::arg("section_pairs"), py::arg("least_last_pairs"));
  m.def("ticket_tiles", &ticket_tiles);
  m.def("most_tiles", &most_tiles);
  m.def("finite_max", &finite_max);
  m.def("log_sum_exp", &log_sum_exp);
  m.def("inverse_sum", &inverse_sum);
  m.def("with_sink", &with_sink);
}

void bind_dispatch(py::module_& m) {
  m.def("missing_variant_text", &missing_variant);
  m.def("missing_backward_text", &missing_backward);
  m.def("find_backward_variant", [](bool is_bf16, int kind, int64_t head_dim, int64_t head_dim_v) {
    return find_backward_variant(is_bf16 ? Dtype::kBFloat16 : Dtype::kFloat16,
                                 kBuiltKinds[kind].kind, head_dim, head_dim_v);
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
  functions["tile_n"] = Config::k.tile_n;
  functions["head_dim"] = Config::k.head_dim;
  functions["head_dim_v"] = Config::k.head_dim_v;
  functions["columns"] = Config::k.columns();
  functions["columns_v"] = Config::k.columns_v();
  return functions;
}

// A variant for each width in shared memory, and some with padding: the layouts do not depend on
// 16-bit dtype or kind.
void bind_layouts(py::module_& m) {
  py::dict tiles;
  tiles["FwdTileD64D48"] = tile_layouts<FwdFp16D48Full>();
  tiles["FwdTileD64"] = tile_layouts<FwdBf16D64Full>();
  tiles["FwdTileD96"] = tile_layouts<FwdBf16D96Full>();
  tiles["FwdTileD128"] = tile_layouts<FwdFp16D128Causal>();
  tiles["FwdTileD192D176"] = tile_layouts<FwdFp16D176Full>();
  tiles["FwdTileD192"] = tile_layouts<FwdBf16D192Full>();
  tiles["FwdTileD256"] = tile_layouts<FwdBf16D256Full>();
  tiles["FwdTileD64x256"] = tile_layouts<FwdBf16D64x256General>();
  tiles["FwdTileD192x128"] = tile_layouts<FwdFp16D192x128General>();
  m.attr("layouts") = tiles;
  m.def("chunk_offset_bytes", &chunk_offset_bytes<kWarpgroupRows>);
  m.def("fragment_row", &fragment_row);
  m.def("fragment_column", &fragment_column);
}

// (batch, seqlen_q, seqlen_k, heads_q, heads_k); the lengths of a packed batch, as PackedLengths,
// with the rows of the tensors; what the GPU offers.
using SizeTuple = std::tuple<int, int, int, int, int>;
using Ints = std::vector<int>;
using LengthsTuple = std::tuple<Ints, Ints, std::optional<Ints>, std::optional<Ints>, int, int>;
using DeviceTuple = std::tuple<int, int64_t>;

using RangeTuple = std::tuple<int, int, int, int>;
using WorkTuple = std::tuple<int, std::pair<int, int>, int, RangeTuple, std::pair<int, int>,
                             std::tuple<int, int, int, int, int>>;
using StepTuple = std::tuple<int, int, bool, int64_t, int>;

int const* data_of(std::optional<Ints> const& ints) { return ints ? ints->data() : nullptr; }

template <class Config>
BwdParams backward_params(SizeTuple const& sizes, MaskTuple const& mask, bool deterministic,
                          std::optional<LengthsTuple> const& lengths, DeviceTuple const& device) {
  BwdParams params;
  FwdProblem& problem = params.problem;
  std::tie(problem.batch, problem.seqlen_q, problem.seqlen_k, problem.heads_q, problem.heads_k) =
      sizes;
  problem.head_dim = Config::k.head_dim;
  problem.head_dim_v = Config::k.head_dim_v;
  problem.set_dense(/*causal=*/std::get<0>(mask) == kind_index(kCausalKernel));
  problem.kind = kBuiltKinds[std::get<0>(mask)].kind;
  if (problem.kind.mask == MaskKind::kInterval) {
    problem.mask = interval_mask(mask);
  }
  problem.deterministic = deterministic;
  problem.device = DeviceLimits{std::get<0>(device), std::get<1>(device)};
  if (lengths) {
    auto const& [cu_q, cu_k, used_q, used_k, total_q, total_k] = *lengths;
    problem.is_packed = true;
    problem.has_unused = used_q || used_k;
    problem.total_q = total_q;
    problem.total_k = total_k;
    params.lengths = PackedLengths{cu_q.data(), cu_k.data(), data_of(used_q), data_of(used_k)};
  }
  params.schedule = plan_backward(problem).schedule;
  return params;
}

py::dict schedule_dict(BwdSchedule const& schedule) {
  py::dict dict;
  dict["tile_m"] = schedule.tile_m;
  dict["tile_n"] = schedule.tile_n;
  dict["m_tiles"] = schedule.m_tiles;
  dict["n_tiles"] = schedule.n_tiles;
  dict["works"] = schedule.works;
  dict["grid"] = schedule.grid;
  dict["in_sections"] = schedule.in_sections;
  dict["section_pairs"] = schedule.section_pairs;
  dict["least_last_pairs"] = schedule.least_last_pairs;
  dict["section_heads"] = schedule.section_heads;
  dict["most_queries"] = schedule.most_queries;
  dict["rows"] = schedule.rows;
  dict["dq_floats"] = schedule.dq_floats;
  dict["flags"] = schedule.flags;
  dict["dq_is_zeroed"] = schedule.dq_is_zeroed;
  dict["table_ints"] = schedule.table_ints;
  return dict;
}

// The work of a CTA (kv head or -1, its query heads, first key, query range, lengths, coordinates)
// and its steps (head, tile of queries, is it masked, its tile in the workspaces, its
// predecessors).
std::pair<WorkTuple, std::vector<StepTuple>> cta_tuple(CtaWork const& cta) {
  BwdWork const& work = cta.work;
  QueryRange const& queries = work.queries;
  std::vector<StepTuple> steps;
  for (Step const& step : cta.steps) {
    steps.emplace_back(step.head, step.m, step.is_masked, step.tile, step.predecessors);
  }
  return {WorkTuple{work.kv_head,
                    {work.head_begin, work.head_end},
                    work.key_begin,
                    {queries.begin, queries.free_begin, queries.free_end, queries.end},
                    {work.len.q, work.len.k},
                    {work.batch, work.q_row, work.q_end, work.k_row, work.k_end}},
          steps};
}

// Lists of an AttentionMask, and the strides of batch, head and list.
using ListsTuple = std::tuple<Ints, int64_t, int64_t, int>;

// The schedule, the rows of every packed tile of queries, and what every CTA does.
template <class Config>
py::tuple work_of_tile(SizeTuple const& sizes, MaskTuple const& mask, bool deterministic,
                       std::optional<LengthsTuple> const& lengths, DeviceTuple const& device,
                       ListsTuple const& lists) {
  BwdParams const params = backward_params<Config>(sizes, mask, deterministic, lengths, device);
  auto const& [ints, batch_stride, head_stride, tile_stride] = lists;
  MaskLists const listed{ints.data(), batch_stride, head_stride, tile_stride};
  BackwardWork const work = backward_work<Config>(params, listed);
  py::list row_tiles;
  for (int i = 0; i < work.tables.row_tile_count; ++i) {
    row_tiles.append(std::pair(work.tables.row_tiles[i].row, work.tables.row_tiles[i].rows));
  }
  py::list ctas;
  for (CtaWork const& cta : work.ctas) {
    ctas.append(cta_tuple(cta));
  }
  return py::make_tuple(schedule_dict(work.schedule), row_tiles, ctas);
}

template <class Config>
py::dict backward_tile() {
  py::dict tile;
  constexpr BwdConfig k = Config::k;
  tile["head_dim"] = k.head_dim;
  tile["head_dim_v"] = k.head_dim_v;
  tile["tile_m"] = k.tile_m;
  tile["tile_n"] = k.cta_keys();
  tile["cluster_size"] = k.cluster_size;
  tile["consumer_warpgroups"] = k.consumer_warpgroups;
  tile["other_columns"] = k.other_columns();
  tile["dq_blocks"] = k.dq_blocks();
  tile["dq_columns"] = k.dq_columns();
  tile["dq"] = k.dq_layout();
  tile["work"] = py::cpp_function(&work_of_tile<Config>, py::arg(), py::arg(), py::arg(), py::arg(),
                                  py::arg(), py::arg("lists") = ListsTuple{});
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
  tiles["BwdTileD64"] = backward_tile<BwdBf16D64Causal>();
  tiles["BwdTileD96"] = backward_tile<BwdBf16D96Causal>();
  tiles["BwdTileD128"] = backward_tile<BwdBf16D128Causal>();
  tiles["BwdTileD192"] = backward_tile<BwdBf16D192Causal>();
  tiles["BwdTileD256"] = backward_tile<BwdBf16D256Causal>();
  tiles["BwdTileD256D512"] = backward_tile<BwdBf16D512Causal>();
  tiles["BwdTileD128NarrowD64x128"] = backward_tile<BwdBf16D64x128Causal>();
  tiles["BwdTileD64x256"] = backward_tile<BwdBf16D64x256Causal>();
  tiles["BwdTileD128NarrowD96x64"] = backward_tile<BwdBf16D96x64Causal>();
  tiles["BwdTileD128NarrowD128x64"] = backward_tile<BwdBf16D128x64Causal>();
  tiles["BwdTileD192x128"] = backward_tile<BwdBf16D192x128Causal>();
  m.attr("backward_tiles") = tiles;
  py::dict listed;
  listed["BwdBf16D64Lists"] = backward_tile<BwdBf16D64Lists>();
  listed["BwdBf16D128Lists"] = backward_tile<BwdBf16D128Lists>();
  listed["BwdBf16D192Lists"] = backward_tile<BwdBf16D192Lists>();
  listed["BwdBf16D256Lists"] = backward_tile<BwdBf16D256Lists>();
  listed["BwdBf16D512Lists"] = backward_tile<BwdBf16D512Lists>();
  m.attr("listed_tiles") = listed;
}

}  // namespace
}  // namespace fa3::host

PYBIND11_MODULE(_host, m) {
  m.doc() = "Index arithmetic, plans and layouts of flash_attn3, for tests without a GPU.";
  fa3::host::bind_core(m);
  fa3::host::bind_masks(m);
  fa3::host::bind_problems(m);
  fa3::host::bind_cache(m);
  fa3::host::bind_prefix(m);
  fa3::host::bind_append(m);
  fa3::host::bind_dispatch(m);
  fa3::host::bind_layouts(m);
  fa3::host::bind_backward(m);
  fa3::host::bind_quantize(m);
}
