// The forward kernel: who does what, and nothing else.
//
//   warpgroup 0   warp 0: goes through the tiles, loads Q, K, V
//                 warps 1 to 3: each stores O of one consumer warpgroup
//                 FP8: warp 1 reads scales and stores O of two warpgroups, 2 and 3 turn V round
//   warpgroup 1.. consumers: 64 rows of the tile each
#pragma once

#include "forward/load.h"
#include "forward/mma.h"
#include "forward/scale_warp.h"
#include "forward/transpose.h"

namespace fa3 {

template <class Traits>
CUTE_DEVICE void run_producer_warpgroup(FwdStorage<Traits>& shared, FwdDeviceParams const& p) {
  int const warp = cutlass::canonical_warp_idx_sync();
  if constexpr (Traits::kFp8) {
    if (warp == 1) {
      run_scale_warp<Traits>(shared, p);
      return;
    }
    if (warp >= 2) {
      ValueTransposer<Traits>(shared, warp - 2, lane_of_warp()).run();
      return;
    }
  }
  if (!cute::elect_one_sync()) {
    return;
  }
  if (warp == 0) {
    FwdProducer<Traits>(shared, p).run();
  } else if (warp <= Traits::kWarpgroups) {
    if constexpr (!Traits::kFp8) {
      store_outputs<Traits>(shared, p, warp - 1);
    }
  }
}

template <class Config>
__global__ void __launch_bounds__(fwd_threads<Config>(), Config::kCtasPerSm)
    forward_kernel(FwdDeviceParams const __grid_constant__ p) {
  using Traits = FwdTraits<Config>;
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<FwdStorage<Traits>*>(shared_bytes);

  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&p.q));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&p.k));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&p.v));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&p.o));
    shared.init_barriers();
  }
  __syncthreads();

  int const warpgroup = cutlass::canonical_warp_group_idx();
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<fwd_producer_registers<Config>()>();
    run_producer_warpgroup<Traits>(shared, p);
  } else {
    cutlass::arch::warpgroup_reg_alloc<fwd_consumer_registers<Config>()>();
    int const thread = int(threadIdx.x) % kWarpgroupThreads;
    Turn<Config::kPingPong> const turn{warpgroup - 1};
    FwdConsumer<Traits>(shared, p, warpgroup - 1, thread, turn).run();
  }
}

}  // namespace fa3
