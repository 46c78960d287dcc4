// Host side of the forward kernel: tensor maps, device parameters, launch. The generated units call
// launch_forward.
#pragma once

#include "device/launch.h"
#include "device/tensor_map.h"
#include "forward/kernel.h"

namespace fa3 {

// Q or O as (column, packed head, position, head group, batch): a box is the rows of one warpgroup.
inline CUtensorMap query_map(TensorMapMaker& maps, FwdParams const& p, TensorView const& t,
                             int columns) {
  int const pack = p.schedule.pack;
  FwdProblem const& problem = p.problem;
  return maps.make<5>(t.data,
                      {{columns, 1, kSliceColumns},
                       {pack, t.head_stride, pack},
                       {problem.seqlen_q, t.row_stride, RowPacking{pack}.positions_per_warpgroup()},
                       {problem.heads_q / pack, t.head_stride * pack, 1},
                       {problem.batch, t.batch_stride, 1}});
}

// K or V as (column, key, KV head, batch): a box is one K tile.
inline CUtensorMap key_map(TensorMapMaker& maps, FwdProblem const& problem, TensorView const& t,
                           int columns, int tile_n) {
  return maps.make<4>(t.data, {{columns, 1, kSliceColumns},
                               {problem.seqlen_k, t.row_stride, tile_n},
                               {problem.heads_k, t.head_stride, 1},
                               {problem.batch, t.batch_stride, 1}});
}

template <class Config>
FwdDeviceParams device_params(TensorMapMaker& maps, FwdParams const& p) {
  FwdProblem const& problem = p.problem;
  int const pack = p.schedule.pack;
  int const positions = RowPacking{pack}.positions_per_warpgroup();
  FwdDeviceParams d;
  d.q = query_map(maps, p, p.q, problem.head_dim);
  d.k = key_map(maps, problem, p.k, problem.head_dim, Config::kTileN);
  d.v = key_map(maps, problem, p.v, problem.head_dim_v, Config::kTileN);
  d.o = query_map(maps, p, p.o, problem.head_dim_v);
  d.lse = p.lse;
  d.seqlen = SeqlenPair{problem.seqlen_q, problem.seqlen_k};
  d.heads_q = problem.heads_q;
  d.softmax_scale = p.softmax_scale;
  d.scale_log2 = p.softmax_scale * kLog2E;
  d.q_slice_bytes = pack * positions * kSliceColumns * 2;
  d.positions_per_warpgroup = positions;
  d.pack = FastDiv(pack);
  d.groups_per_kv_head = FastDiv(problem.heads_q / problem.heads_k / pack);
  d.order = TileOrder(problem.causal, p.schedule.m_tiles, problem.heads_q / pack, problem.batch,
                      p.schedule.section_pairs);
  return d;
}

// Launches on the current device and the given stream (a cudaStream_t).
template <class Config>
void launch_forward(FwdParams const& p, void* stream) {
  constexpr int kBytes = fwd_shared_bytes<Config>();
  static_assert(sizeof(FwdStorage<FwdTraits<Config>>) <= kBytes,
                "fwd_shared_bytes must cover the storage");
  LaunchShape const shape{Config::kName, p.schedule.grid, fwd_threads<Config>(), kBytes};
  static std::atomic<uint64_t> devices_ready{0};
  bind_thread(shape.variant, shape.grid, kBytes);
  allow_shared_memory(forward_kernel<Config>, shape, devices_ready);
  TensorMapMaker maps{p.problem.dtype};
  FwdDeviceParams const params = device_params<Config>(maps, p);
  check_launch(maps.error, shape.variant, shape.grid, kBytes);
  launch_early(forward_kernel<Config>, shape, params, stream);
}

}  // namespace fa3
