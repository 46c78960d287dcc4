// Host side of the backward: tensor maps, device parameters, the three launches. The generated
// units call launch_backward.
#pragma once

#include "backward/kernel.h"
#include "backward/postprocess.h"
#include "device/launch.h"
#include "device/tensor_map.h"

namespace fa3 {

// A tensor as (column, row, head, batch): a box is `rows` rows of one head.
inline CUtensorMap rows_map(TensorMapMaker& maps, FwdProblem const& problem, TensorView const& t,
                            int seqlen, int heads, int rows) {
  return maps.make<4>(t.data, {{problem.head_dim, 1, kSliceColumns},
                               {seqlen, t.row_stride, rows},
                               {heads, t.head_stride, 1},
                               {problem.batch, t.batch_stride, 1}});
}

template <class Config>
BwdDeviceParams main_params(TensorMapMaker& maps, BwdParams const& p) {
  FwdProblem const& problem = p.problem;
  auto const of_queries = [&](TensorView const& t) {
    return rows_map(maps, problem, t, problem.seqlen_q, problem.heads_q, Config::kTileM);
  };
  auto const of_keys = [&](TensorView const& t, int rows) {
    return rows_map(maps, problem, t, problem.seqlen_k, problem.heads_k, rows);
  };
  constexpr int kWarpRows = 16;
  BwdDeviceParams d;
  d.q = of_queries(p.q);
  d.dout = of_queries(p.dout);
  d.k = of_keys(p.k, bwd_tile_n<Config>());
  d.v = of_keys(p.v, bwd_tile_n<Config>());
  d.dk = of_keys(p.dk, kWarpRows);
  d.dv = of_keys(p.dv, kWarpRows);
  d.lse_log2 = p.lse_log2;
  d.delta = p.delta;
  d.dq_sum = p.dq_sum;
  d.dq_flags = p.dq_flags;
  d.ticket = p.ticket;
  d.seqlen = SeqlenPair{problem.seqlen_q, problem.seqlen_k};
  d.m_tiles = p.schedule.m_tiles;
  d.heads_q = problem.heads_q;
  d.group = problem.heads_q / problem.heads_k;
  d.softmax_scale = p.softmax_scale;
  d.scale_log2 = p.softmax_scale * kLog2E;
  d.order = key_tile_order(problem, p.schedule);
  return d;
}

inline BwdRowParams row_params(BwdParams const& p) {
  BwdRowParams r;
  r.o = p.o;
  r.dout = p.dout;
  r.dq = p.dq;
  r.lse = p.lse;
  r.dlse = p.dlse;
  r.lse_log2 = p.lse_log2;
  r.delta = p.delta;
  r.dq_sum = p.dq_sum;
  r.dq_flags = p.dq_flags;
  r.ticket = p.ticket;
  r.seqlen_q = p.problem.seqlen_q;
  r.head_dim = p.problem.head_dim;
  r.heads_q = p.problem.heads_q;
  r.softmax_scale = p.softmax_scale;
  r.m_tiles = FastDiv(p.schedule.m_tiles);
  r.heads = FastDiv(p.problem.heads_q);
  return r;
}

// Launches on the current device and the given stream (a cudaStream_t).
template <class Config>
void launch_backward(BwdParams const& p, void* stream) {
  constexpr int kBytes = bwd_shared_bytes<Config>();
  using Storage = BwdStorage<BwdTraits<Config>>;
  static_assert(sizeof(Storage) <= kBytes, "bwd_shared_bytes must cover the storage");
  static_assert(offsetof(Storage, exchange) % 1024 == 0, "swizzled tiles begin at 1024 bytes");
  FwdProblem const& problem = p.problem;
  LaunchShape const rows{Config::kName, p.schedule.m_tiles * problem.heads_q * problem.batch,
                         kRowThreads, 0};
  LaunchShape const main{Config::kName, p.schedule.grid, bwd_threads<Config>(), kBytes};
  static std::atomic<uint64_t> devices_ready{0};
  bind_thread(main.variant, main.grid, kBytes);
  allow_shared_memory(backward_kernel<Config>, main, devices_ready);
  TensorMapMaker maps{problem.dtype};
  BwdDeviceParams const params = main_params<Config>(maps, p);
  check_launch(maps.error, main.variant, main.grid, kBytes);
  BwdRowParams const row = row_params(p);
  launch_early(backward_preprocess_kernel<Config>, rows, row, stream);
  launch_early(backward_kernel<Config>, main, params, stream);
  launch_early(backward_postprocess_kernel<Config>, rows, row, stream);
}

}  // namespace fa3
