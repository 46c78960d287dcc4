// Host side of the forward kernel: tensor maps, device parameters, launch. The generated units call
// launch_forward.
#pragma once

#include <utility>

#include "launch/launch.h"
#include "launch/tensor_map.h"
#include "forward/kernel.h"

namespace fa3 {

// Columns of a tensor, and of one box of its map.
struct MapColumns {
  int all;
  int of_box;
};

// Q or O as (column, head, position, batch, end): a box is the rows of one warpgroup.
template <int kRank>
CUtensorMap query_map(TensorMapMaker& maps, FwdParams const& p, TensorView const& t,
                      MapColumns columns) {
  int const pack = p.schedule.pack;
  FwdProblem const& problem = p.problem;
  RowDims const dims = problem.is_packed
                           ? RowDims::packed(t, problem.total_q, element_bytes(maps.dtype))
                           : RowDims::dense(t, problem.seqlen_q, problem.batch);
  return maps.make<kRank>(t.data,
                          {{columns.all, 1, columns.of_box},
                           {problem.heads_q, t.head_stride, pack},
                           {dims.rows, dims.row_stride, RowPacking{pack}.positions_per_warpgroup()},
                           {dims.batches, dims.batch_stride, 1},
                           {dims.ends, dims.row_stride, 1}});
}

// K or V as (column, key, KV head, batch, end): a box is one K tile. A map must have at least one
// row: without keys it has one that no query sees.
template <int kRank>
CUtensorMap key_map(TensorMapMaker& maps, FwdProblem const& problem, TensorView const& t,
                    MapColumns columns, int tile_n) {
  RowDims const dims = problem.is_packed
                           ? RowDims::packed(t, problem.total_k, element_bytes(maps.dtype))
                           : RowDims::dense(t, max_of(1, problem.seqlen_k), problem.batch);
  return maps.make<kRank>(t.data, {{columns.all, 1, columns.of_box},
                                   {dims.rows, dims.row_stride, tile_n},
                                   {problem.heads_k, t.head_stride, 1},
                                   {dims.batches, dims.batch_stride, 1},
                                   {dims.ends, dims.row_stride, 1}});
}

// What does not depend on the form of the batch.
template <class Traits>
void set_common(FwdDeviceParams& d, FwdParams const& p) {
  constexpr FwdConfig k = Traits::k;
  FwdProblem const& problem = p.problem;
  int const pack = p.schedule.pack;
  int const positions = RowPacking{pack}.positions_per_warpgroup();
  if (Traits::kHasScales || Traits::kIsCache) {
    d.out = OutputView{static_cast<uint16_t*>(p.o.data), p.o.batch_stride, p.o.row_stride,
                       p.o.head_stride, problem.head_dim_v};
    d.q_scale = p.q_scale;
    d.k_scale = p.k_scale;
    d.v_scale = p.v_scale;
    d.q_scale.head_in_pack_stride = p.q_scale.by_kv_head ? 0 : p.q_scale.head_stride;
    d.scale_batches = max_of(1, problem.batch);
    d.out_is_half = p.out_dtype == Dtype::kFloat16;
  }
  d.lse = p.lse;
  d.max_logits = p.max_logits;
  d.sinks = p.sinks;
  d.seqlen = problem.is_packed ? SeqlenPair{problem.total_q, problem.total_k}
                               : SeqlenPair{problem.seqlen_q, problem.seqlen_k};
  d.lse_heads = p.lse_heads;
  d.softmax_scale = p.softcap > 0.f ? p.softcap : p.softmax_scale;
  d.scale_log2 = d.softmax_scale * kLog2E;
  d.softcap_scale = p.softcap > 0.f ? p.softmax_scale / p.softcap : 0.f;
  d.zero = 0;
  bool const is_causal = problem.mask.right == 0 && problem.split_size == 0;
  d.lazy_rescale_log2 = p.max_logits == nullptr ? k.lazy_log2(is_causal) : 0.f;
  d.q_slice_bytes = pack * positions * Traits::kSlice * element_bytes(k.dtype_q);
  d.positions_per_warpgroup = positions;
  d.lead = p.schedule.lead;
  d.least_lead = p.schedule.least_lead;
  d.pack = FastDiv(pack);
  d.groups_per_kv_head = FastDiv(problem.heads_q / problem.heads_k / pack);
  d.mask = problem.mask;
}

template <class Config>
void set_params(FwdDeviceParams& d, TensorMapMaker& maps, FwdParams const& p) {
  using Traits = FwdTraits<Config>;
  constexpr int kRank = kMapRank<typename Traits::Location>;
  FwdProblem const& problem = p.problem;
  int const pack = p.schedule.pack;
  MapColumns const columns{problem.head_dim, Traits::kSlice};
  MapColumns const columns_v{problem.head_dim_v, Traits::kSlice};
  d.q = query_map<kRank>(maps, p, p.q, columns);
  d.k = key_map<kRank>(maps, problem, p.k, columns, Traits::kTileN);
  d.v = key_map<kRank>(maps, problem, p.v, columns_v, Traits::kValueKeys);
  if (Traits::kHasScales) {
    TensorMapMaker output_maps{p.out_dtype};
    d.o = query_map<kRank>(output_maps, p, p.o, MapColumns{problem.head_dim_v, kSliceColumns});
    maps.error = maps.error == cudaSuccess ? output_maps.error : maps.error;
  } else {
    d.o = query_map<kRank>(maps, p, p.o, columns_v);
  }
  set_common<Traits>(d, p);
  int const heads = problem.heads_q / pack;
  if (problem.is_packed) {
    d.tickets = TicketOrder{FastDiv(heads), FastDiv(p.schedule.section_heads)};
    d.tables = PackedTables::in(p.workspace, p.schedule.tiles / heads);
  } else {
    d.order = TileOrder(p.schedule.longest_first, p.schedule.m_tiles, heads, problem.batch,
                        p.schedule.section_pairs, p.schedule.least_last_pairs);
    d.tiles = p.schedule.tiles;
    d.ticket_counter = p.ticket_counter;
  }
}

template <class Config>
void set_params(ListDeviceParams& d, TensorMapMaker& maps, FwdParams const& p) {
  set_params<Config>(static_cast<FwdDeviceParams&>(d), maps, p);
  d.listed = p.mask;
}

template <class Config>
void set_params(FoldDeviceParams& d, TensorMapMaker& maps, FwdParams const& p) {
  set_params<Config>(static_cast<FwdDeviceParams&>(d), maps, p);
  d.part_tiles = p.schedule.part_tiles;
  d.totals = reinterpret_cast<float4*>(p.totals);
}

// K or V of a cache as (column, key, KV head, page): a box has keys of one page.
template <class Traits>
CUtensorMap cache_map(TensorMapMaker& maps, FwdProblem const& problem, TensorView const& t,
                      int columns, int box_keys) {
  return maps.make<4>(t.data, {{columns, 1, Traits::kRawSlice},
                               {max_of(1, problem.cache.page_size), t.row_stride, box_keys},
                               {problem.heads_k, t.head_stride, 1},
                               {max_of(1, problem.cache.entries), t.batch_stride, 1}});
}

inline TensorView in_bytes(TensorView view, Dtype dtype) {
  int const bytes = element_bytes(dtype);
  return TensorView{view.data, view.batch_stride * bytes, view.row_stride * bytes,
                    view.head_stride * bytes};
}

inline CacheLengths cache_lengths(FwdParams const& p) {
  CacheLengths lengths;
  lengths.packed = p.lengths;
  lengths.held = p.cache.held;
  lengths.leftpad = p.cache.leftpad;
  lengths.new_starts = p.cache.new_starts;
  lengths.entry_of = p.cache.entry_of;
  lengths.held_by_all = p.cache.held_by_all;
  lengths.held_step = p.cache.held_step;
  lengths.appended = p.cache.appended;
  lengths.first_slot = p.cache.first_slot;
  lengths.capacity = p.problem.cache.capacity;
  lengths.seqlen_q = p.problem.seqlen_q;
  lengths.total_q = p.problem.total_q;
  return lengths;
}

// All but the maps.
template <class Traits>
void set_cache_params(CacheDeviceParams& d, FwdParams const& p) {
  FwdProblem const& problem = p.problem;
  CacheSchedule const& schedule = p.schedule.cache;
  bool const has_table = p.cache.page_table != nullptr;
  int const box =
      has_table ? boxed_keys(problem.cache.page_size, Traits::kValueKeys) : Traits::kValueKeys;
  set_common<Traits>(d, p);
  constexpr Dtype kDtypeK = Traits::k.dtype_k();
  constexpr Dtype kDtypeV = Traits::k.dtype_kv();
  d.lengths = cache_lengths(p);
  int const positions = Traits::kWarpgroups * d.positions_per_warpgroup;
  d.line =
      CacheLine(problem.batch, problem.heads_q / p.schedule.pack / schedule.lanes, schedule.lanes,
                positions, p.schedule.grid / Traits::k.column_ctas() / schedule.lanes);
  d.line.weight_log2 = schedule.weight_log2;
  d.line.tile_units = schedule.tile_units;
  d.line.splits = schedule.splits;
  if (problem.cache.is_second && problem.cache.earlier_ctas > 0) {
    int const free = p.schedule.grid - problem.cache.earlier_ctas;
    d.line.early_ctas = max_of(0, free / schedule.lanes);
    d.line.late_units = schedule.splits.units(problem.cache.earlier_k_tiles);
  }
  d.line.shared =
      SharedCall{problem.cache.most_queries > 0,  problem.cache.fewest_queries,
                 problem.cache.most_queries,      FastDiv(problem.cache.other_positions),
                 problem.cache.other_weight_log2, problem.cache.other_tile_units,
                 problem.cache.other_cost};
  d.page_table = p.cache.page_table;
  d.table_stride = p.cache.table_stride;
  d.entries = problem.cache.entries;
  d.page_size = FastDiv(max_of(1, problem.cache.page_size));
  d.is_chosen = problem.cache.is_chosen;
  d.box_keys = box;
  if (p.scales_by_page) {
    d.k_page_scale = std::exchange(d.k_scale, ScaleView{});
    d.v_page_scale = std::exchange(d.v_scale, ScaleView{});
  }
  d.keys_of_scale = FastDiv(max_of(box, 1));
  d.k_rows = in_bytes(p.k, kDtypeK);
  d.v_rows = in_bytes(p.v, kDtypeV);
  d.row_bytes_k = problem.head_dim * element_bytes(kDtypeK);
  d.row_bytes_v = problem.head_dim_v * element_bytes(kDtypeV);
  // TRAP: lines that one launch keeps slow down the next one: shared and own keys of 64 sequences
  // 124 us, read once 106 us (H100, 2026-11-26). Tiles of a shared prefix read the same keys at the
  // same time.
  bool const is_read_once = problem.seqlen_q <= positions || problem.cache.keys_of_all > 0;
  d.hint = is_read_once ? kReadOnce : kKeepInL2;
  d.tree = reinterpret_cast<uint4 const*>(p.cache.tree);
  d.tree_stride = int(p.cache.tree_stride);
  d.parts = p.cache.parts;
  int64_t const slots = schedule.slots * Traits::k.column_ctas();
  d.part_lses = p.cache.parts + slots * schedule.rows * Traits::kHeadDimV;
  d.group_lses = d.part_lses + slots * schedule.rows;
  d.arrived = p.cache.arrived;
  d.slots = int(slots);
  d.part_rows = schedule.rows;
  d.folds = !Traits::kHasScales && !Traits::kKind.is_latent && problem.split_size > 0;
}

template <class Config>
void set_params(CacheDeviceParams& d, TensorMapMaker& maps, FwdParams const& p) {
  using Traits = FwdTraits<Config>;
  FwdProblem const& problem = p.problem;
  set_cache_params<Traits>(d, p);
  d.q = query_map<5>(maps, p, p.q, MapColumns{problem.head_dim, Traits::kSlice});
  TensorMapMaker key_maps{Config::k.dtype_kv()};
  int const box_keys = max_of(d.box_keys, 1);
  d.k = cache_map<Traits>(key_maps, problem, p.k, problem.head_dim, box_keys);
  d.v = cache_map<Traits>(key_maps, problem, p.v, problem.head_dim_v, box_keys);
  maps.error = maps.error == cudaSuccess ? key_maps.error : maps.error;
}

// Launches on the current device and the given stream (a cudaStream_t).
template <class Config>
void launch_forward(FwdParams const& p, void* stream) {
  constexpr int kBytes = Config::k.shared_bytes();
  static_assert(sizeof(FwdStorage<FwdTraits<Config>>) <= kBytes,
                "FwdConfig::shared_memory() must cover the storage");
  LaunchShape const shape{Config::k.name, p.schedule.grid, Config::k.threads(), kBytes,
                          Config::k.column_ctas()};
  static std::atomic<uint64_t> devices_ready{0};
  bind_thread(shape.variant, shape.grid, kBytes);
  allow_shared_memory(forward_kernel<Config>, shape, devices_ready);
  TensorMapMaker maps{p.problem.dtype};
  typename FwdTraits<Config>::Params params;
  set_params<Config>(params, maps, p);
  check_launch(maps.error, shape.variant, shape.grid, kBytes);
  launch_early(forward_kernel<Config>, shape, params, stream);
}

}  // namespace fa3
