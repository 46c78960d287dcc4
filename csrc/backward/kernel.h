// The main kernel of the backward: which warp runs which role.
//
//   warpgroup 0   warp 0: loads K and V, then Q, dO, LSE and delta of every step
//                 warps 1, 2: by keys, send on what the consumers stage: dQ, dV and dK
//                 warps 1 to 3: by products, send dS to the other CTA, and keep the order of
//                 additions to dQ
//   warpgroup 1.. consumers, which split the keys (mma_by_keys.h) or the products
//                 (mma_by_products.h)
#pragma once

#include "backward/cluster_exchange.h"
#include "backward/dq_consumer.h"
#include "backward/load.h"
#include "backward/mma_by_keys.h"
#include "backward/mma_by_products.h"

namespace fa3 {

template <class Traits>
CUTE_DEVICE void run_producer_warpgroup(BwdStorage<Traits>& shared,
                                        typename Traits::Params const& p) {
  int const warp = cutlass::canonical_warp_idx_sync();
  if (!cute::elect_one_sync()) {
    return;
  }
  if (warp == 0) {
    BwdProducer<Traits>(shared, p).run();
    return;
  }
  if constexpr (Traits::kSplit == BwdSplit::kKeys) {
    if (warp <= Traits::kWarpgroups) {
      BwdStoreWarp<Traits>{shared, p, warp - 1}.run();
    }
  } else {
    run_exchange<Traits>(shared, p, warp);
  }
}

template <int kRegisters, class Config>
CUTE_DEVICE void set_registers() {
  if constexpr (kRegisters < Config::k.registers_at_launch()) {
    cutlass::arch::warpgroup_reg_dealloc<kRegisters>();
  } else {
    cutlass::arch::warpgroup_reg_alloc<kRegisters>();
  }
}

template <class Traits>
CUTE_DEVICE void run_consumer(BwdStorage<Traits>& shared, BwdDeviceParams const& p, int warpgroup) {
  using Config = typename Traits::Config;
  int const thread = int(threadIdx.x) % kWarpgroupThreads;
  if constexpr (Traits::kSplit == BwdSplit::kKeys) {
    set_registers<Config::k.registers[0], Config>();
    KeysConsumer<Traits>(shared, p, warpgroup, thread).run();
  } else if (warpgroup == 0) {
    set_registers<Config::k.registers[0], Config>();
    DvConsumer<Traits>(shared, p, thread).run();
  } else if (warpgroup == 1) {
    set_registers<Config::k.registers[1], Config>();
    DkConsumer<Traits>(shared, p, thread).run();
  } else {
    set_registers<Config::k.registers[2], Config>();
    DqConsumer<Traits>(shared, p, thread).run();
  }
}

// All threads of a CTA call this with the same condition. WHY asm: where the compiler sees a
// branch, it keeps values of the loops of d192 and d256 in registers that these kernels do not
// have.
CUTE_DEVICE void exit_if(bool condition) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p exit; }" ::"r"(uint32_t(condition))
               : "memory");
}

// One thread initialises the barriers.
template <class Traits>
CUTE_DEVICE void init_barriers(BwdStorage<Traits>& shared, BwdDeviceParams const& p) {
  if (threadIdx.x == 0) {
    for (CUtensorMap const* map : {&p.q, &p.dout, &p.k, &p.v, &p.dk, &p.dv}) {
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(map));
    }
    shared.init_barriers();
  }
}

// By products: meanwhile another warp resolves the only work of this CTA. Where no query sees the
// keys, that warp writes the zeros.
template <class Traits>
CUTE_DEVICE void resolve_only_work(BwdStorage<Traits>& shared, typename Traits::Params const& p) {
  int const rank = cluster_rank();
  bool const resolves_work = threadIdx.x == 32;
  if (resolves_work) {
    if (is_packed<Traits>(p)) {
      wait_for_earlier_launches();  // one of them fills the tables
    }
    if (p.is_deterministic && rank == 0) {
      shared.exchange.number = draw_number(p);
    }
  }
  if (p.is_deterministic) {
    cluster_sync();
  }
  if (resolves_work) {
    int const number = p.is_deterministic ? read_remote(0, shared.exchange.number)
                                          : int(blockIdx.x) / Traits::kClusterSize;
    BwdWorkOf<Traits> const work = work_of_number<Traits>(p, number, rank);
    shared.exchange.work = work;
    if (work.steps() == 0 && work.has_keys()) {
      store_zeros<Traits>(shared.k[0], work, p);
    }
  }
}

template <class Config>
__global__ void __cluster_dims__(Config::k.cluster_size, 1, 1)
    __launch_bounds__(Config::k.threads(), 1)
        backward_kernel(typename BwdTraits<Config>::Params const __grid_constant__ p) {
  using Traits = BwdTraits<Config>;
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<BwdStorage<Traits>*>(shared_bytes);

  init_barriers<Traits>(shared, p);
  if constexpr (Traits::kSplit == BwdSplit::kProducts) {
    resolve_only_work<Traits>(shared, p);
    cluster_sync();
    exit_if(shared.exchange.work.steps() == 0);
  } else {
    __syncthreads();
  }

  int const warpgroup = cutlass::canonical_warp_group_idx();
  if (warpgroup == 0) {
    set_registers<Config::k.producer_registers(), Config>();
    run_producer_warpgroup<Traits>(shared, p);
  } else {
    run_consumer<Traits>(shared, p, warpgroup - 1);
    if constexpr (Traits::kClusterSize > 1) {
      cluster_sync();  // the other CTA has read the dS sent to it, and sends no more
    }
  }
}

}  // namespace fa3
