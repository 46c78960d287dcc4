// Attention of few queries on a cache, with both GEMMs transposed: S^T = K Q^T and O^T = V^T P^T. N
// is the number of queries, so the cost follows the queries that exist.
//
//   warpgroup 0      producer: tiles, Q, K and V into shared memory (producer.h)
//   warpgroups 1, 2  consumers (consumer.h)
//   warpgroup 3      e4m3 latents: the other half of the producer's threads
#pragma once

#include "decode/consumer.h"
#include "decode/producer.h"

namespace fa3 {

template <class Config>
__global__ void __launch_bounds__(Config::k.threads(), 1)
    decode_kernel(typename DecodeTraits<Config>::Params const __grid_constant__ p) {
  using Traits = DecodeTraits<Config>;
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<DecodeStorage<Traits>*>(shared_bytes);
  if (threadIdx.x == Config::k.threads() - 1) {  // its warp has the fewest lengths to read
    shared.init_barriers();
  }
  int const warpgroup = cutlass::canonical_warp_group_idx();
  bool const is_other_half = Traits::kProducers > 1 && warpgroup == 1 + Traits::kConsumers;
  bool const is_producer = warpgroup == 0 || is_other_half;
  int const thread = int(threadIdx.x) % kWarpgroupThreads + is_other_half * kWarpgroupThreads;
  DecodeTiles<Traits> tiles(p, shared.sequences);
  DecodeProducer<Traits> producer(shared, p, tiles, thread);
  // The first tile is found while earlier launches still run and is checked once they have ended.
  // With more sequences than threads the check would repeat the whole search, so the CTA then waits
  // first.
  bool is_early = tiles.lengths.run == 1;
  bool is_current;
  if (!is_early) {
    tiles.wait();
  }
  do {
    tiles.find();
    if (is_producer) {
      producer.find_first(is_early);
    }
    is_current = !is_early || tiles.confirm([&] { return warpgroup > 0 || producer.reads_same(); });
    is_early = false;
  } while (!is_current);
  if (is_producer) {
    cutlass::arch::warpgroup_reg_dealloc<Config::k.producer_registers()>();
    producer.run();
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::k.consumer_registers()>();
    DecodeConsumer<Traits>(shared, p, warpgroup - 1, thread).run();
  }
}

}  // namespace fa3
