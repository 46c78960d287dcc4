// The forward kernel: who does what, and nothing else.
//
//   warpgroup 0   warp 0: loads Q, K, V      warps 1 to 3: each stores O of one consumer warpgroup
//   warpgroup 1.. consumers: 64 rows of the tile each
#pragma once

#include "forward/epilogue.h"
#include "forward/load.h"

namespace fa3 {

template <class Traits>
CUTE_DEVICE void run_producer_warpgroup(FwdStorage<Traits>& shared, FwdDeviceParams const& p) {
  int const warp = cutlass::canonical_warp_idx_sync();
  if (!cute::elect_one_sync()) {
    return;
  }
  if (warp == 0) {
    FwdProducer<Traits>(shared, p).run();
  } else if (warp <= Traits::kWarpgroups) {
    store_outputs<Traits>(shared, p, warp - 1);
  }
}

template <class Traits>
CUTE_DEVICE void run_consumer_warpgroup(FwdStorage<Traits>& shared, FwdDeviceParams const& p,
                                        int warpgroup) {
  int const thread = int(threadIdx.x) % kWarpgroupThreads;
  FwdConsumer<Traits> consumer(shared, p, warpgroup, thread);
  consumer.turn.begin();
  for (TileWalk walk = walk_tiles(p); walk.valid(); walk.next()) {
    FwdWork const work = resolve_tile<Traits>(p, walk.coord());
    OnlineSoftmax<typename Traits::Config> softmax(p.scale_log2);
    auto tOrO = cute::partition_fragment_C(typename Traits::MmaO{},
                                           cute::Shape<cute::_64, typename Traits::HeadDimV>{});
    consumer.run(work, tOrO, softmax);
    softmax.finish(tOrO);
    stage_output(shared, consumer.q_ring, warpgroup, thread, tOrO);
    store_lse<Traits>(p, work, warpgroup, thread, softmax);
    consumer.q_ring.advance();
  }
  consumer.turn.end();
}

template <class Config>
__global__ void __launch_bounds__(fwd_threads<Config>(), 1)
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
    run_consumer_warpgroup<Traits>(shared, p, warpgroup - 1);
  }
}

}  // namespace fa3
