// Attention on a latent cache (absorbed MLA). Keys have 64 rotary and 512 latent columns; the
// latent columns are also the values. Roles of the warpgroups:
//
//   0      producer: loads Q and keys into rings (producer.h)
//   1      scores: computes S, the softmax and P (scores.h)
//   2, 3   output: each computes half of the columns of O (output.h)
#pragma once

#include "mla/output.h"
#include "mla/producer.h"
#include "mla/scores.h"

namespace fa3 {

template <class Config>
__global__ void __launch_bounds__(Config::k.threads(), 1)
    mla_kernel(typename MlaTraits<Config>::Params const __grid_constant__ p) {
  using Traits = MlaTraits<Config>;
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<MlaStorage<Traits>*>(shared_bytes);

  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&p.q));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&p.qv));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&p.k));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&p.v));
    shared.init_barriers(MlaLoader<Traits>::arrivals(p));
  }
  __syncthreads();

  int const warpgroup = cutlass::canonical_warp_group_idx();
  int const thread = int(threadIdx.x) % kWarpgroupThreads;
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Config::k.producer_registers()>();
    run_mla_producer<Traits>(shared, p, cutlass::canonical_warp_idx_sync());
  } else if (warpgroup == 1) {
    cutlass::arch::warpgroup_reg_alloc<Config::k.consumer_registers()>();
    ScoreWarpgroup<Traits>(shared, p, thread).run();
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::k.output_registers()>();
    OutputWarpgroup<Traits>(shared, p, warpgroup - 2, thread).run();
  }
}

}  // namespace fa3
