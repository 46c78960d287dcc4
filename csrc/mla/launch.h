// Host side of the kernel for a latent cache. The generated unit calls launch_mla.
#pragma once

#include "forward/launch.h"
#include "mla/combine.h"
#include "mla/kernel.h"

namespace fa3 {

// Tensor map of cache columns as (column of a slice, key, slice, page). A box holds keys of one
// page and either one slice or all slices of a column group.
template <class Traits>
CUtensorMap slices_map(TensorMapMaker& maps, FwdProblem const& problem, TensorView const& t,
                       int columns, int columns_of_group, int box_keys) {
  int const slice = 128 / element_bytes(maps.dtype);
  int const slices = box_keys == Traits::kTileN ? columns_of_group / slice : 1;
  return maps.make<4>(t.data, {{slice, 1, slice},
                               {max_of(1, problem.cache.page_size), t.row_stride, box_keys},
                               {columns / slice, slice, slices},
                               {max_of(1, problem.cache.entries), t.batch_stride, 1}});
}

// Estimates how many tiles are split into parts. Results do not depend on the estimate.
inline int64_t shared_tiles(FwdParams const& p) {
  CacheSchedule const& cache = p.schedule.cache;
  int64_t const tiles =
      int64_t(p.schedule.m_tiles) * p.problem.batch * (p.problem.heads_q / p.schedule.pack);
  return !p.problem.is_packed && tiles < cache.slots / 2 ? tiles : cache.slots / 2;
}

// Launches on the current device and the given stream (a cudaStream_t).
template <class Config>
void launch_mla(FwdParams const& p, void* stream) {
  using Traits = MlaTraits<Config>;
  constexpr int kBytes = Config::k.shared_bytes();
  static_assert(sizeof(MlaStorage<Traits>) <= kBytes,
                "latent_shared_memory() must cover the storage");
  LaunchShape const shape{Config::k.name, p.schedule.grid, Config::k.threads(), kBytes};
  static std::atomic<uint64_t> devices_ready{0};
  bind_thread(shape.variant, shape.grid, kBytes);
  allow_shared_memory(mla_kernel<Config>, shape, devices_ready);
  TensorMapMaker maps{p.problem.dtype};
  typename Traits::Params params;
  set_cache_params<Traits>(params, p);
  params.q = query_map<5>(maps, p, p.q, MapColumns{p.problem.head_dim, Traits::kSlice});
  if (p.schedule.cache.lanes > 1) {
    params.hint = kUsualInL2;  // tiles of other heads read the same keys at the same time
  }
  int const box_keys = max_of(1, params.box_keys);
  params.k = slices_map<Traits>(maps, p.problem, p.k, Traits::kHeadDim, Traits::kHeadDim, box_keys);
  TensorMapMaker value_maps{Config::k.dtype_kv()};
  params.v = slices_map<Traits>(value_maps, p.problem, p.v, Traits::kHeadDimV,
                                Traits::kOutputColumns, box_keys);
  maps.error = maps.error == cudaSuccess ? value_maps.error : maps.error;
  params.key_scale = p.v_scale;
  params.rows = CacheRows::of(params);
  params.qv = query_map<5>(maps, p, p.qv, MapColumns{p.problem.head_dim_v, Traits::kSlice});
  using Work = FwdWork<Traits>;
  static_assert(sizeof(SharedTile<Work>) <= kSharedTileBytes &&
                sizeof(CombineCounters) <= 2 * sizeof(int));
  params.shared_tiles = static_cast<SharedTile<Work>*>(p.cache.shared_tiles);
  params.combine = reinterpret_cast<CombineCounters*>(p.cache.arrived);
  using Combination = PartCombination<Traits>;
  params.blocks = FastDiv(max_of(1, params.part_rows / kWarpRows));
  int64_t const fours = shared_tiles(p) * params.blocks.divisor * Combination::Parts::kFours;
  params.fours_of_cta = Combination::fours_of_cta(fours, p.schedule.grid);
  params.ctas_of_block = FastDiv(Combination::Parts::kFours / params.fours_of_cta);
  check_launch(maps.error, shape.variant, shape.grid, kBytes);
  launch_early(mla_kernel<Config>, shape, params, stream);
  if (params.slots > 1) {
    int const ctas = Combination::kCtasPerSm * p.schedule.grid;
    int64_t const needed = fours / params.fours_of_cta;
    LaunchShape const combining{Config::k.name, needed < ctas ? int(needed) : ctas,
                                Combination::kThreads, 0};
    launch_early(mla_combine_kernel<Config>, combining, params, stream);
  }
}

}  // namespace fa3
