// Host side of the backward: tensor maps, device parameters, the launches. The generated units call
// launch_backward. For packed sequences the tables have been launched before (schedule/prepare.h).
#pragma once

#include "backward/kernel.h"
#include "backward/postprocess.h"
#include "backward/sinks.h"
#include "launch/launch.h"
#include "launch/tensor_map.h"

namespace fa3 {

// A tensor of `seqlen` rows for each batch entry, or in all where packed. It may have fewer columns
// than the variant.
struct RowsShape {
  int seqlen;
  int heads;
  int columns;
};

// The map of a tensor as (column, row, head, batch); in variants that serve packed sequences also
// the end. A box is `rows` rows of one head.
template <class Config>
CUtensorMap rows_map(TensorMapMaker& maps, FwdProblem const& problem, TensorView const& t,
                     RowsShape const& shape, int rows, int slice = kSliceColumns) {
  RowDims const dims = problem.is_packed ? RowDims::packed(t, shape.seqlen)
                                         : RowDims::dense(t, shape.seqlen, problem.batch);
  constexpr int kRank = kMapRank<typename BwdTraits<Config>::Location>;
  return maps.make<kRank>(t.data, {{shape.columns, 1, slice},
                                   {dims.rows, dims.row_stride, rows},
                                   {shape.heads, t.head_stride, 1},
                                   {dims.batches, dims.batch_stride, 1},
                                   {dims.ends, dims.row_stride, 1}});
}

// Rows of the tensors: for packed sequences those of all sequences together.
inline SeqlenPair tensor_rows(FwdProblem const& problem) {
  return problem.is_packed ? SeqlenPair{problem.total_q, problem.total_k}
                           : SeqlenPair{problem.seqlen_q, problem.seqlen_k};
}

inline PackedTables tables_of(BwdParams const& p) {
  return PackedTables::in(p.tables, p.schedule.n_tiles, p.schedule.m_tiles);
}

template <class Config>
BwdDeviceParams main_params(TensorMapMaker& maps, BwdParams const& p) {
  FwdProblem const& problem = p.problem;
  BwdDeviceParams d;
  d.seqlen = tensor_rows(problem);
  int const columns = problem.head_dim;
  int const columns_v = problem.head_dim_v;
  auto const of_queries = [&](TensorView const& t, int width) {
    return rows_map<Config>(maps, problem, t, {d.seqlen.q, problem.heads_q, width},
                            Config::k.tile_m);
  };
  auto const of_keys = [&](TensorView const& t, int width, int rows) {
    return rows_map<Config>(maps, problem, t, {d.seqlen.k, problem.heads_k, width}, rows);
  };
  d.q = of_queries(p.q, columns);
  d.dout = of_queries(p.dout, columns_v);
  d.k = rows_map<Config>(maps, problem, p.k, {d.seqlen.k, problem.heads_k, columns},
                         Config::k.cta_keys(), Config::k.key_slice());
  d.v = of_keys(p.v, columns_v, Config::k.cta_keys());
  d.dk = of_keys(p.dk, columns, Config::k.store_rows());
  d.dv = of_keys(p.dv, columns_v, Config::k.store_rows());
  d.lse_log2 = p.lse_log2;
  d.delta = p.delta;
  d.dq_sum = p.dq_sum;
  d.dq_flags = p.dq_flags;
  d.ticket = p.ticket;
  d.works = p.schedule.works;
  d.m_tiles = p.schedule.m_tiles;
  d.heads_q = problem.heads_q;
  d.group = problem.heads_q / problem.heads_k;
  d.is_deterministic = problem.deterministic;
  d.dq_is_zeroed = p.schedule.dq_is_zeroed;
  d.softmax_scale = p.softmax_scale;
  d.scale_log2 = (p.softcap > 0.f ? p.softcap : p.softmax_scale) * kLog2E;
  d.softcap_scale = p.softcap > 0.f ? p.softmax_scale / p.softcap : 0.f;
  d.mask = problem.mask;
  if (problem.is_packed) {  // only general variants
    d.tickets = TicketOrder{FastDiv(problem.heads_k), FastDiv(p.schedule.section_heads)};
    d.tables = tables_of(p);
  } else {
    d.order = key_tile_order(problem, p.schedule);
  }
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
  r.dq_is_zeroed = p.schedule.dq_is_zeroed;
  r.row_tiles = p.problem.is_packed ? tables_of(p).row_tiles : nullptr;
  r.seqlen_q = tensor_rows(p.problem).q;
  r.head_dim = p.problem.head_dim;
  r.head_dim_v = p.problem.head_dim_v;
  r.heads_q = p.problem.heads_q;
  r.softmax_scale = p.softmax_scale;
  r.m_tiles = FastDiv(p.schedule.m_tiles);
  r.heads = FastDiv(p.problem.heads_q);
  return r;
}

inline void set_lists(BwdDeviceParams&, BwdParams const&) {}
inline void set_lists(ListedBwdParams& d, BwdParams const& p) { d.listed = p.mask; }

template <class Config>
void launch_main(BwdParams const& p, void* stream) {
  constexpr int kBytes = Config::k.shared_bytes();
  using Storage = BwdStorage<BwdTraits<Config>>;
  static_assert(sizeof(Storage) <= kBytes, "BwdConfig::shared_memory() must cover the storage");
  LaunchShape const shape{Config::k.name, p.schedule.grid, Config::k.threads(), kBytes};
  static std::atomic<uint64_t> devices_ready{0};
  allow_shared_memory(backward_kernel<Config>, shape, devices_ready);
  TensorMapMaker maps{p.problem.dtype};
  typename BwdTraits<Config>::Params params;
  static_cast<BwdDeviceParams&>(params) = main_params<Config>(maps, p);
  set_lists(params, p);
  check_launch(maps.error, shape.variant, shape.grid, kBytes);
  launch_early(backward_kernel<Config>, shape, params, stream);
}

// Launches on the current device and the given stream (a cudaStream_t). Without keys the grid of
// the main kernel is 0: dQ is zero, but sinks still have gradients.
template <class Config>
void launch_backward(BwdParams const& p, void* stream) {
  LaunchShape const rows{Config::k.name, int(p.schedule.rows / Config::k.tile_m), kRowThreads, 0};
  bind_thread(rows.variant, rows.grid, 0);
  BwdRowParams const row = row_params(p);
  launch_early(backward_preprocess_kernel<Config>, rows, row, stream);
  if (p.sinks != nullptr) {
    launch_sinks(p, stream);
  }
  if (p.schedule.grid > 0) {
    launch_main<Config>(p, stream);
  }
  launch_early(backward_postprocess_kernel<Config>, rows, row, stream);
}

}  // namespace fa3
