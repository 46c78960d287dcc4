// Host side of the forward kernel: tensor maps, device parameters, launch. The generated units call
// launch_forward.
#pragma once

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

template <class Config>
FwdDeviceParams device_params(TensorMapMaker& maps, FwdParams const& p) {
  FwdProblem const& problem = p.problem;
  int const pack = p.schedule.pack;
  int const positions = RowPacking{pack}.positions_per_warpgroup();
  using Traits = FwdTraits<Config>;
  constexpr int kRank = kMapRank<typename Traits::Location>;
  MapColumns const columns{problem.head_dim, Traits::kSlice};
  MapColumns const columns_v{problem.head_dim_v, Traits::kSlice};
  FwdDeviceParams d;
  d.q = query_map<kRank>(maps, p, p.q, columns);
  d.k = key_map<kRank>(maps, problem, p.k, columns, Traits::kTileN);
  d.v = key_map<kRank>(maps, problem, p.v, columns_v, Traits::kValueKeys);
  if (Traits::kHasScales) {
    TensorMapMaker output_maps{p.out_dtype};
    d.o = query_map<kRank>(output_maps, p, p.o, MapColumns{problem.head_dim_v, kSliceColumns});
    maps.error = maps.error == cudaSuccess ? output_maps.error : maps.error;
    d.out = OutputView{static_cast<uint16_t*>(p.o.data), p.o.batch_stride, p.o.row_stride,
                       p.o.head_stride, problem.head_dim_v};
    d.q_scale = p.q_scale;
    d.k_scale = p.k_scale;
    d.v_scale = p.v_scale;
    d.q_scale.head_in_pack_stride = p.q_scale.by_kv_head ? 0 : p.q_scale.head_stride;
    d.scale_batches = max_of(1, problem.batch);
    d.out_is_half = p.out_dtype == Dtype::kFloat16;
  } else {
    d.o = query_map<kRank>(maps, p, p.o, columns_v);
  }
  d.lse = p.lse;
  d.max_logits = p.max_logits;
  d.sinks = p.sinks;
  d.seqlen = problem.is_packed ? SeqlenPair{problem.total_q, problem.total_k}
                               : SeqlenPair{problem.seqlen_q, problem.seqlen_k};
  d.heads_q = problem.heads_q;
  d.softmax_scale = p.softcap > 0.f ? p.softcap : p.softmax_scale;
  d.scale_log2 = d.softmax_scale * kLog2E;
  d.softcap_scale = p.softcap > 0.f ? p.softmax_scale / p.softcap : 0.f;
  d.zero = 0;
  d.lazy_rescale_log2 = p.max_logits == nullptr ? Config::k.lazy_rescale_log2 : 0.f;
  d.q_slice_bytes = pack * positions * Traits::kSlice * element_bytes(Config::k.dtype_q);
  d.positions_per_warpgroup = positions;
  d.lead = p.schedule.lead;
  d.least_lead = p.schedule.least_lead;
  d.pack = FastDiv(pack);
  d.groups_per_kv_head = FastDiv(problem.heads_q / problem.heads_k / pack);
  d.mask = problem.mask;
  int const heads = problem.heads_q / pack;
  if (problem.is_packed) {
    d.tickets = TicketOrder{FastDiv(heads), FastDiv(p.schedule.section_heads)};
    d.tables = PackedTables::in(p.workspace, p.schedule.tiles / heads);
  } else {
    d.order = TileOrder(p.schedule.longest_first, p.schedule.m_tiles, heads, problem.batch,
                        p.schedule.section_pairs);
  }
  return d;
}

// Launches on the current device and the given stream (a cudaStream_t).
template <class Config>
void launch_forward(FwdParams const& p, void* stream) {
  constexpr int kBytes = Config::k.shared_bytes();
  static_assert(sizeof(FwdStorage<FwdTraits<Config>>) <= kBytes,
                "FwdConfig::shared_bytes() must cover the storage");
  LaunchShape const shape{Config::k.name, p.schedule.grid, Config::k.threads(), kBytes};
  static std::atomic<uint64_t> devices_ready{0};
  bind_thread(shape.variant, shape.grid, kBytes);
  allow_shared_memory(forward_kernel<Config>, shape, devices_ready);
  TensorMapMaker maps{p.problem.dtype};
  FwdDeviceParams const params = device_params<Config>(maps, p);
  check_launch(maps.error, shape.variant, shape.grid, kBytes);
  launch_early(forward_kernel<Config>, shape, params, stream);
}

}  // namespace fa3
