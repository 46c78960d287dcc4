// Bindings of the line of work on a cache and of its plan, for the tests' module.
#pragma once

#include <string>
#include <tuple>
#include <vector>

#include "core/cache_keys.h"
#include "checks/checks.h"
#include "plan/plan_cache.h"
#include "core_bindings.h"

namespace fa3::host {

using MaybeInts = std::optional<std::vector<int>>;

// CacheLengths with what they point to.
struct OwnedLengths {
  MaybeInts cu_q, cu_k, used_q, used_k, held, leftpad, new_starts, entry_of;
  CacheLengths sizes;

  CacheLengths view() const {
    auto const data = [](MaybeInts const& ints) { return ints ? ints->data() : nullptr; };
    CacheLengths lengths = sizes;
    lengths.packed = {data(cu_q), data(cu_k), data(used_q), data(used_k)};
    lengths.held = data(held);
    lengths.leftpad = data(leftpad);
    lengths.new_starts = data(new_starts);
    lengths.entry_of = data(entry_of);
    return lengths;
  }
};

// The members of SharedCall after the first; most 0: the launch shares nothing.
using SharedTuple = std::tuple<int, int, int, int, int, float>;
// (batch, packed heads of a line, queries of a tile, CTAs of a line, lines, weight_log2,
// tile_units, shared, (early_ctas, late_units))
using LineTuple = std::tuple<int, int, int, int, int, int, int, SharedTuple, std::tuple<int, int>>;
// The members of TileOfLine.
using TileTuple = std::tuple<int, int, int, int>;
// (kind, count)
using SplitsTuple = std::tuple<int, int>;
// The tile (sequence, m, head), its K tiles [begin, end), the members of KeyPart before the slots,
// and the slots of the first part and of this one.
using CachePart = std::tuple<std::tuple<int, int, int>, std::tuple<int, int>,
                             std::tuple<int, int, int, int>, std::tuple<int, int>>;

inline KeySplits splits_of(SplitsTuple const& tuple) {
  KeySplits splits;
  splits.kind = SplitKind(std::get<0>(tuple));
  splits.count = std::get<1>(tuple);
  return splits;
}

// A walk on the host.
template <LineKind kKind>
using HostWalk = CacheWalk<IntervalMask, CacheLengths const&, kKind>;

template <class Walk>
CachePart part_tuple(Walk const& walk) {
  KeyPart const& part = walk.part;
  return {{walk.b, walk.m, walk.head},
          {walk.keys.begin, walk.keys.end},
          {part.begin, part.end, part.index, part.parts},
          {part.first_slot, part.slot_of(part.index)}};
}

// Gives the units of the line.
template <class Walk>
int take_stretch(Walk& walk, int cta) {
  CacheLine const& line = walk.line;
  int const total = walk.units_of(0, line.batch);
  walk.take_stretch(total, cta, float(walk.others) * float(line.heads * int(line.lanes.divisor)));
  return total;
}

// The parts of a CTA, as forward/cache/cache_batch.h finds them: the walk begins at the last
// sequence before which there are no more units than before the CTA's stretch, or at the first one.
template <class Walk>
std::vector<CachePart> parts_of_cta(Walk walk, int cta, bool starts_late) {
  std::vector<CachePart> parts;
  take_stretch(walk, cta);
  if (!walk.valid()) {
    return parts;
  }
  int start = 0;
  while (starts_late && walk.units_of(0, start + 1) <= walk.unit) {
    ++start;
  }
  walk.begin_at(start, walk.units_of(0, start));
  while (walk.next()) {
    parts.push_back(part_tuple(walk));
  }
  return parts;
}

inline CacheLine line_of(LineTuple const& tuple, SplitsTuple const& splits) {
  auto const [batch, heads, positions, ctas, lanes, weight_log2, tile_units, shared, early] = tuple;
  CacheLine line(batch, heads, lanes, positions, ctas);
  line.weight_log2 = weight_log2;
  line.tile_units = tile_units;
  std::tie(line.early_ctas, line.late_units) = early;
  auto const [fewest, most_queries, other_positions, other_weight, other_units, cost] = shared;
  line.shared = SharedCall{most_queries > 0, fewest,      most_queries, FastDiv(other_positions),
                           other_weight,     other_units, cost};
  line.splits = splits_of(splits);
  return line;
}

// most: KeySplits::most, or 0. Gives the units of a line, those of a stretch, and the parts of
// each CTA.
template <LineKind kKind>
pybind11::tuple cache_parts(OwnedLengths const& owned, LineTuple const& tuple,
                            SplitsTuple const& splits, IntervalMask const& mask, int tile_n,
                            bool starts_late, int64_t most) {
  CacheLengths const lengths = owned.view();
  CacheLine line = line_of(tuple, splits);
  line.splits.most = most > 0 ? most : line.splits.most;
  HostWalk<kKind> walk(line, lengths, mask, tile_n);
  std::vector<std::vector<CachePart>> parts;
  int const ctas = int(line.ctas.divisor) * int(line.lanes.divisor);
  for (int cta = 0; cta < ctas; ++cta) {
    parts.push_back(parts_of_cta(walk, cta, starts_late));
  }
  int const total = take_stretch(walk, 0);
  return pybind11::make_tuple(total, walk.splits.per_cta, parts);
}

inline std::vector<int> sequence_members(OwnedLengths const& lengths, int b) {
  CacheSequence const s = cache_sequence(lengths.view(), b);
  return {s.q_begin, s.len.q, s.len.k, s.first_slot, s.first_row, s.entry};
}

inline OwnedLengths make_lengths(pybind11::kwargs given) {
  OwnedLengths lengths;
  auto const read = [&](char const* name, auto& field) {
    using Field = std::remove_reference_t<decltype(field)>;
    field = given.contains(name) ? given[name].template cast<Field>() : field;
  };
  read("cu_q", lengths.cu_q);
  read("cu_k", lengths.cu_k);
  read("used_q", lengths.used_q);
  read("used_k", lengths.used_k);
  read("held", lengths.held);
  read("leftpad", lengths.leftpad);
  read("new_starts", lengths.new_starts);
  read("entry_of", lengths.entry_of);
  read("held_by_all", lengths.sizes.held_by_all);
  read("held_step", lengths.sizes.held_step);
  read("appended", lengths.sizes.appended);
  read("first_slot", lengths.sizes.first_slot);
  read("capacity", lengths.sizes.capacity);
  read("seqlen_q", lengths.sizes.seqlen_q);
  read("total_q", lengths.sizes.total_q);
  return lengths;
}

inline TensorMeta described_by(std::vector<int64_t> const& sizes, char const* dtype_name,
                               Dtype dtype) {
  TensorMeta meta = described({}, dtype_name, dtype);
  meta.rank = int(sizes.size());
  int64_t stride = 1;
  for (int i = meta.rank - 1; i >= 0; --i) {
    meta.size[i] = sizes[i];
    meta.stride[i] = stride;
    stride *= std::max<int64_t>(1, sizes[i]);
  }
  return meta;
}

// A call of attend_cache. shapes: of q, k, v and the tensors of integers that are given. numbers:
// other arguments by their names.
inline AttentionCall cache_call(Dtype dtype, pybind11::dict shapes, pybind11::dict numbers) {
  static constexpr char const* kNames[] = {"float16", "bfloat16", "float8_e4m3fn"};
  AttentionCall call;
  call.visit([&](char const* name, auto& field) {
    using Field = std::remove_reference_t<decltype(field)>;
    using Sizes = std::vector<int64_t>;
    if constexpr (std::is_same_v<Field, TensorMeta>) {
      field = described_by(shapes[name].template cast<Sizes>(), kNames[int(dtype)], dtype);
    } else if constexpr (std::is_same_v<Field, std::optional<TensorMeta>>) {
      if (shapes.contains(name)) {
        bool const is_like_q = std::string(name) == "qv";
        field = described_by(shapes[name].template cast<Sizes>(),
                             is_like_q ? kNames[int(dtype)] : "int32",
                             is_like_q ? dtype : Dtype::kOther);
      }
    } else {
      field = numbers.contains(name) ? numbers[name].template cast<Field>() : field;
    }
  });
  call.on_cache = true;
  call.device = DeviceLimits{};
  return call;
}

inline pybind11::dict facts_of_cache(FwdProblem const& problem) {
  FwdPlan const plan = plan_cache(problem);
  FwdSchedule const& schedule = plan.schedule;
  CacheProblem const& cache = problem.cache;
  pybind11::dict facts;
  facts["name"] = kFwdVariants[plan.variant].name;
  facts["capacity"] = cache.capacity;
  facts["heads"] = std::tuple(problem.heads_q, problem.heads_k);
  facts["pack"] = schedule.pack;
  facts["m_tiles"] = schedule.m_tiles;
  facts["grid"] = schedule.grid;
  facts["splits"] = std::tuple(int(schedule.cache.splits.kind), schedule.cache.splits.count);
  facts["lanes"] = schedule.cache.lanes;
  facts["weight_log2"] = schedule.cache.weight_log2;
  facts["tile_units"] = schedule.cache.tile_units;
  facts["most_units"] = schedule.cache.splits.most;
  facts["slots"] = schedule.cache.slots;
  facts["rows"] = schedule.cache.rows;
  facts["is_second"] = cache.is_second;
  facts["shared"] = SharedTuple(cache.fewest_queries, cache.most_queries, cache.other_positions,
                                cache.other_weight_log2, cache.other_tile_units, cache.other_cost);
  return facts;
}

// The launches of a call of attend_cache; dtype: 0 fp16, 1 bf16, 2 e4m3.
inline pybind11::list plan_of_cache(int dtype, pybind11::dict shapes, pybind11::dict numbers) {
  AttentionCall call = cache_call(Dtype(dtype), shapes, numbers);
  call.on_cache = true;
  std::string const error = check_cache(call);
  if (!error.empty()) {
    throw std::invalid_argument(error);
  }
  pybind11::list launches;
  for (FwdProblem const& problem : launches_of_cache(problem_of(call))) {
    launches.append(facts_of_cache(problem));
  }
  return launches;
}

inline void bind_cache(pybind11::module_& m) {
  pybind11::class_<OwnedLengths>(m, "CacheLengths").def(pybind11::init(&make_lengths));
  m.def("cache_sequence", &sequence_members);
  m.def("cache_parts", &cache_parts<LineKind::kSharedCall>);
  m.def("cache_parts_of_whole_tiles", &cache_parts<LineKind::kWholeTiles>);
  m.def("boxed_keys", &boxed_keys);
  m.def(
      "units",
      [](SplitsTuple const& splits, int k_tiles, int weight_log2, int phase) {
        return splits_of(splits).units(k_tiles, weight_log2, phase);
      },
      pybind11::arg("splits"), pybind11::arg("k_tiles"), pybind11::arg("weight_log2") = 0,
      pybind11::arg("phase") = 0);
  m.def("phase_of", [](SplitsTuple const& splits, int first_k_tile) {
    return splits_of(splits).phase_of(first_k_tile);
  });
  m.def("part_tiles", [](SplitsTuple const& splits, int k_tiles) {
    return splits_of(splits).part_tiles(k_tiles);
  });
  m.def("part_at", [](SplitsTuple const& tuple, int per_cta, int unit, int end,
                      TileTuple const& tile, std::tuple<int, int> lane, int total) {
    KeySplits splits = splits_of(tuple);
    splits.per_cta = per_cta;
    auto const [first, k_tiles, weight_log2, phase] = tile;
    TileOfLine const of_line{first, k_tiles, weight_log2, phase};
    KeyPart const part = splits.part_at(
        unit, end, of_line, Lane{std::get<0>(lane), std::get<1>(lane), unit / per_cta}, total);
    return std::tuple(part.begin, part.end, part.index, part.parts, part.first_slot,
                      part.slot_of(part.index), splits.after(part, of_line, unit));
  });
  m.def("plan_cache", &plan_of_cache);
}

}  // namespace fa3::host
