// The main kernel of the backward: who does what, and nothing else.
//
//   warpgroup 0   warp 0: loads K and V, then Q, dO, LSE and delta of every step
//                 warps 1 to 3: each adds the dQ of one consumer warpgroup to global memory
//   warpgroup 1.. consumers: 64 keys of the tile each
#pragma once

#include "backward/load.h"
#include "backward/mma.h"

namespace fa3 {

template <class Traits>
CUTE_DEVICE void run_producer_warpgroup(BwdStorage<Traits>& shared, BwdDeviceParams const& p) {
  int const warp = cutlass::canonical_warp_idx_sync();
  if (!cute::elect_one_sync()) {
    return;
  }
  if (warp == 0) {
    BwdProducer<Traits>(shared, p).run();
  } else if (warp <= Traits::kWarpgroups) {
    add_dq<Traits>(shared, p, warp - 1);
  }
}

template <class Config>
__global__ void __launch_bounds__(bwd_threads<Config>(), 1)
    backward_kernel(BwdDeviceParams const __grid_constant__ p) {
  using Traits = BwdTraits<Config>;
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<BwdStorage<Traits>*>(shared_bytes);

  if (threadIdx.x == 0) {
    for (CUtensorMap const* map : {&p.q, &p.dout, &p.k, &p.v, &p.dk, &p.dv}) {
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(map));
    }
    shared.work = work_of_cta<Traits>(p);
    shared.init_barriers();
  }
  __syncthreads();

  int const warpgroup = cutlass::canonical_warp_group_idx();
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<bwd_producer_registers<Config>()>();
    run_producer_warpgroup<Traits>(shared, p);
  } else {
    cutlass::arch::warpgroup_reg_alloc<bwd_consumer_registers<Config>()>();
    int const thread = int(threadIdx.x) % kWarpgroupThreads;
    BwdConsumer<Traits>(shared, p, warpgroup - 1, thread).run();
  }
}

}  // namespace fa3
