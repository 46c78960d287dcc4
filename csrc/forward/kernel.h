// The forward kernel: which warp runs which role.
//
//   warpgroup 0   warp 0: visits the tiles, loads Q, K, V; all warps: gather rows of a cache
//                 warps 1 to 3: store O; or read scales, send results and transpose V (helpers.h)
//   warpgroup 1.. consumers: 64 rows of the tile each
//   the last      on a cache of e4m3 with 16-bit Q: converts K and V (keys_converted.h)
#pragma once

#include "forward/cache/keys_converted.h"
#include "forward/fp8/loop_serial.h"
#include "forward/loop_skewed.h"
#include "forward/producer.h"
#include "forward/cache/producer_cache.h"

namespace fa3 {

template <class Traits>
CUTE_DEVICE void run_producer_warpgroup(FwdStorage<Traits>& shared,
                                        typename Traits::Params const& p) {
  using Producer =
      cute::conditional_t<Traits::kIsCache, CacheProducer<Traits>, FwdProducer<Traits>>;
  using Helpers = typename FwdSlots<Traits>::Helpers;
  int const warp = cutlass::canonical_warp_idx_sync();
  // WHY whole warps first: where the control flow of the roles joins again, ptxas keeps coordinates
  // of copies in vector registers.
  if (Helpers::kAreWholeWarps && warp > 0) {
    Helpers::run(shared, p, warp);
    return;
  }
  if (!Producer::kIsWholeWarp && !cute::elect_one_sync()) {
    return;
  }
  if (warp < Producer::warps(p)) {
    Producer(shared, p, warp).run();
  } else if (!Helpers::kAreWholeWarps) {
    Helpers::run(shared, p, warp);
  }
}

template <class Traits>
CUTE_DEVICE void run_consumer(FwdStorage<Traits>& shared, typename Traits::Params const& p,
                              int warpgroup) {
  using Consumer = FwdConsumer<Traits>;
  using Loop =
      cute::conditional_t<Traits::k.is_skewed(), SkewedLoop<Consumer>, SerialLoop<Consumer>>;
  int const thread = int(threadIdx.x) % kWarpgroupThreads;
  Consumer consumer(shared, p, warpgroup, thread);
  Loop{consumer}.run();
  Consumer::Slots::Output::finish(thread);
  Consumer::Slots::Columns::end();
}

template <class Traits>
CUTE_DEVICE void run_converter(FwdStorage<Traits>& shared, typename Traits::Params const& p) {
  if constexpr (Traits::kConverts) {
    KeyConverter<Traits>(shared, p, int(threadIdx.x) % kWarpgroupThreads).run();
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::k.threads(), Config::k.measured.ctas_per_sm)
    forward_kernel(typename FwdTraits<Config>::Params const __grid_constant__ p) {
  using Traits = FwdTraits<Config>;
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<FwdStorage<Traits>*>(shared_bytes);

  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&p.q));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&p.k));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&p.v));
    if (!Traits::kIsCache) {
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&p.o));
    }
    shared.init_barriers(FwdSlots<Traits>::Keys::arrivals(p));
  }
  FwdSlots<Traits>::Columns::begin();

  int const warpgroup = cutlass::canonical_warp_group_idx();
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Config::k.producer_registers()>();
    run_producer_warpgroup<Traits>(shared, p);
  } else if (Traits::kConverts && warpgroup == Traits::kWarpgroups + 1) {
    cutlass::arch::warpgroup_reg_dealloc<Config::k.converter_registers()>();
    run_converter<Traits>(shared, p);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::k.consumer_registers()>();
    run_consumer<Traits>(shared, p, warpgroup - 1);
  }
}

}  // namespace fa3
