// Bindings of masks, ranges of tiles and the problems that calls become, for the tests' module.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#include "core/append_rows.h"
#include "core/block_range.h"
#include "core/packed_tiles.h"
#include "core/tree_mask.h"
#include "core/visible_pairs.h"
#include "checks/checks.h"
#include "plan/problem_of_call.h"
#include "plan/variants.h"

namespace fa3::host {

inline std::tuple<int, int> as_tuple(Interval interval) { return {interval.begin, interval.end}; }

template <class Mask>
pybind11::class_<Mask> bind_mask(pybind11::module_& m, char const* name) {
  return pybind11::class_<Mask>(m, name)
      .def("keys", [](Mask const& mask, int position, int seqlen_q,
                      int seqlen_k) { return as_tuple(mask.keys(position, {seqlen_q, seqlen_k})); })
      .def("queries",
           [](Mask const& mask, int key, int seqlen_q, int seqlen_k) {
             return as_tuple(mask.queries(key, {seqlen_q, seqlen_k}));
           })
      .def("block_range",
           [](Mask const& mask, int begin, int end, int seqlen_q, int seqlen_k, int tile_n) {
             BlockRange const range = block_range(begin, end, {seqlen_q, seqlen_k}, tile_n, mask);
             return std::tuple(range.begin, range.free_begin, range.free_end, range.end);
           });
}

using RangeTuple = std::tuple<int, int, int, int>;  // as block_range() gives it

inline std::tuple<int, int> skipped_of_tuples(RangeTuple const& all, RangeTuple const& own,
                                              int most) {
  auto const range = [](RangeTuple const& t) { return std::make_from_tuple<BlockRange>(t); };
  SkippedTiles const skipped = skipped_tiles(range(all), range(own), most);
  return {skipped.first, skipped.last};
}

// The K tiles that a warpgroup visits which skips some of the range, and all K tiles of the range.
inline std::tuple<std::vector<int>, std::vector<int>> visits_of_tuple(
    RangeTuple const& all, std::tuple<int, int> const& skipped) {
  auto const tiles_of = [](BlockRange const& keys) {
    std::vector<int> tiles;
    for (int n = keys.first(); n >= keys.last(); keys.advance(n)) {
      tiles.push_back(keys.tile(n));
    }
    return tiles;
  };
  auto const tiles = std::make_from_tuple<SkippedTiles>(skipped);
  auto own = std::make_from_tuple<BlockRange>(all);
  own.narrow(tiles);
  return {tiles_of(own), tiles_of(own.visits_with(tiles))};
}

// None: no limit; a chunk of 0: no chunks.
inline IntervalMask make_interval_mask(std::optional<int> left, std::optional<int> right,
                                       int chunk) {
  IntervalMask mask;
  mask.left = left.value_or(IntervalMask::kNoLimit);
  mask.right = right.value_or(IntervalMask::kNoLimit);
  if (chunk > 0) {
    mask.is_chunked = true;
    mask.chunk = FastDiv(chunk);
  }
  return mask;
}

inline void bind_masks(pybind11::module_& m) {
  bind_mask<FullMask>(m, "FullMask").def(pybind11::init<>());
  bind_mask<CausalMask>(m, "CausalMask").def(pybind11::init<>());
  bind_mask<IntervalMask>(m, "IntervalMask").def(pybind11::init(&make_interval_mask));
  m.attr("no_limit") = IntervalMask::kNoLimit;
  m.def("skipped_tiles", &skipped_of_tuples);
  m.def("visits", &visits_of_tuple);
  m.def("most_skipped_tiles", &most_skipped_tiles);
  m.def("count_visible", [](int seqlen_q, int seqlen_k, IntervalMask const& mask) {
    return count_visible({seqlen_q, seqlen_k}, mask);
  });
}

// (token, head, pair) of each thread of some CTAs; a token of -1: none.
inline std::vector<std::tuple<int, int, int>> append_items(RowSchedule const& schedule,
                                                           int first_cta, int end_cta) {
  std::vector<std::tuple<int, int, int>> items;
  for (int cta = first_cta; cta < end_cta; ++cta) {
    for (int thread = 0; thread < kAppendThreads; ++thread) {
      RowItem const item = schedule.item_of(cta, thread);
      items.emplace_back(item.token, item.head, item.pair);
    }
  }
  return items;
}

// What a warp finds, and how often it looks.
inline std::tuple<int, int> count_up_to(std::vector<int> const& list, int number) {
  WarpSearch search(int(list.size()));
  int rounds = 0;
  for (; search.size > 0; ++rounds) {
    int found = 0;
    for (int lane = 0; lane < 32; ++lane) {
      int const index = search.probe(lane);
      found += index >= 0 && list.at(index) <= number;
    }
    search.narrow(found);
  }
  return {search.begin, rounds};
}

// (unit, page, first slot, end) of the slots from `length` on of a sequence, which has some units.
inline std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t>> page_spans(
    PageSchedule const& schedule, int length, int64_t first_unit, int64_t end_unit) {
  std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t>> spans;
  for (int64_t unit = first_unit; unit < end_unit; ++unit) {
    PageSpan const span = page_span(schedule.by_page, length, unit - first_unit);
    spans.emplace_back(unit, span.number, span.first, span.end);
  }
  return spans;
}

inline void bind_append(pybind11::module_& m) {
  pybind11::class_<PageSchedule>(m, "PageSchedule")
      .def(pybind11::init<int, int, int, int, int>())
      .def_readonly("ctas", &PageSchedule::ctas)
      .def("first_unit", &PageSchedule::first_unit)
      .def("spans", &page_spans);
  m.attr("append_warps") = kAppendWarps;
  pybind11::class_<RowSchedule>(m, "RowSchedule")
      .def(pybind11::init<int, int, int>())
      .def_readonly("ctas", &RowSchedule::ctas)
      .def("items", &append_items);
  m.attr("append_threads") = kAppendThreads;
  m.def("count_up_to", &count_up_to);
  m.def("chunks_of_pair", [](int pair, int rotary_pairs, bool is_in_halves) {
    ChunkPair const chunks = chunks_of_pair(pair, rotary_pairs, is_in_halves);
    return std::tuple(chunks.first, chunks.second);
  });
}

// A contiguous bfloat16 tensor, or of another dtype of PyTorch.
inline TensorMeta described(std::initializer_list<int64_t> sizes,
                            char const* dtype_name = "bfloat16", Dtype dtype = Dtype::kBFloat16) {
  TensorMeta meta;
  meta.dtype = dtype;
  meta.dtype_name = dtype_name;
  meta.device = DeviceType::kCuda;
  meta.device_name = "cuda";
  meta.rank = int(sizes.size());
  std::copy(sizes.begin(), sizes.end(), meta.size);
  int64_t stride = 1;
  for (int i = meta.rank - 1; i >= 0; --i) {
    meta.stride[i] = stride;
    stride *= std::max<int64_t>(1, meta.size[i]);
  }
  return meta;
}

// The mask of the problem that a call becomes, as (kind, mask, longest queries, longest keys).
// numbers: arguments by their names. packed: batch sequences in tensors of these rows, of which
// seqlen_q and seqlen_k are said to be the longest.
inline pybind11::tuple problem_of_call(int seqlen_q, int seqlen_k, pybind11::dict numbers,
                                       std::optional<std::tuple<int, int, int>> packed) {
  AttentionCall call;
  call.visit([&](char const* name, auto& field) {
    using Field = std::remove_reference_t<decltype(field)>;
    if constexpr (std::is_arithmetic_v<Field>) {
      field = numbers.contains(name) ? numbers[name].template cast<Field>() : field;
    }
  });
  call.q = described({1, seqlen_q, 1, 64});
  call.k = call.v = described({1, seqlen_k, 1, 64});
  if (packed) {
    auto const [batch, total_q, total_k] = *packed;
    call.q = described({total_q, 1, 64});
    call.k = call.v = described({total_k, 1, 64});
    call.lengths.cu_seqlens_q = described({batch + 1}, "int32", Dtype::kOther);
    call.lengths.cu_seqlens_k = call.lengths.cu_seqlens_q;
    call.lengths.max_seqlen_q = seqlen_q;
    call.lengths.max_seqlen_k = seqlen_k;
  }
  std::string const error = check_call(call);
  if (!error.empty()) {
    throw std::invalid_argument(error);
  }
  FwdProblem const problem = problem_of(call);
  return pybind11::make_tuple(kBuiltKinds[kind_index(problem.kind)].name, problem.mask,
                              problem.seqlen_q, problem.seqlen_k);
}

// Names of the variants among which the planner chooses. kind: an index of kBuiltKinds.
inline std::vector<std::string> candidate_names(bool is_bf16, int kind, int head_dim,
                                                int head_dim_v) {
  FwdProblem problem;
  problem.dtype = is_bf16 ? Dtype::kBFloat16 : Dtype::kFloat16;
  problem.kind = kBuiltKinds[kind].kind;
  problem.head_dim = head_dim;
  problem.head_dim_v = head_dim_v;
  FwdCandidates const candidates = fwd_candidates(problem);
  std::vector<std::string> names;
  for (int i = 0; i < candidates.count; ++i) {
    names.emplace_back(kFwdVariants[candidates.variant[i]].name);
  }
  return names;
}

inline void bind_problems(pybind11::module_& m) {
  m.def("problem_of_call", &problem_of_call);
  m.def("candidate_names", &candidate_names);
  m.def("tree_bits_from", [](uint64_t low, uint64_t high, int first) {
    TreeBits const bits = TreeBits{low, high}.from(first);
    return std::pair(bits.low, bits.high);
  });
  m.def("value_columns", &value_columns);
  m.def("value_launches", &value_launches);
  m.def("largest_divisor_below", &largest_divisor_below);
  m.def("most_tiles", &most_tiles);
  m.def("packed_workspace_ints",
        [](int64_t tiles, int64_t batch) { return PackedTables::workspace_ints(tiles, batch); });
}

}  // namespace fa3::host
