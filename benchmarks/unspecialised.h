// The forward kernel without warp specialisation: a row of benchmarks/ablation.py, never shipped.
//
// There is no producer warpgroup, no store warp and no setmaxnreg. The first thread of each
// warpgroup stores that warpgroup's O; thread 0 also loads Q, K and V, while the products of its
// own warpgroup run. The loads take the role of the ping-pong. Everything else is that of
// csrc/forward: tiles, rings, products, softmax, output.
//
// INVARIANT: no deadlock. A buffer is loaded when the loading warpgroup itself has released it; the
// other warpgroups release it after work that needs only loads that were issued earlier.
//
// Registers (ptxas 13.0): nothing is spilled with two warpgroups; with three (head dim 64) some
// words between tiles, none in the loops over the keys.
#pragma once

#include "forward/launch.h"

namespace fa3 {

// In the role of the ping-pong (FwdConsumer): while the products of a step run, loads the operands
// of the next step.
template <class Traits>
struct Feed {
  FwdProducer<Traits> producer;
  FwdWork<Traits> work;  // the tile that is loaded
  int n = -1;            // its K tile whose V comes next; -1: none

  CUTE_DEVICE Feed(FwdStorage<Traits>& shared, FwdDeviceParams const& p)
      : producer(shared, p), work() {}

  CUTE_DEVICE static bool is_loader() { return threadIdx.x == 0; }

  CUTE_DEVICE void wait() const {}

  CUTE_DEVICE void pass() {
    if (is_loader() && n >= 0) {
      if (n > 0) {
        producer.load_k(work, n - 1);
      }
      producer.load_v(work, n);
      --n;
    }
  }

  // The K tile that is visited first.
  CUTE_DEVICE void load_first_k(FwdWork<Traits> const& next) {
    work = next;
    if (is_loader()) {
      producer.load_k(work, work.keys.end - 1);
    }
  }

  CUTE_DEVICE void load_q() {
    if (is_loader()) {
      producer.load_q(work);
    }
  }

  // From here on pass() comes once for each K tile, and once more when n is -1.
  CUTE_DEVICE void begin_steps() { n = work.keys.end - 1; }
};

template <class Traits>
CUTE_DEVICE void run_warpgroup(FwdStorage<Traits>& shared, FwdDeviceParams const& p,
                               int warpgroup) {
  using Consumer = FwdConsumer<Traits, Feed<Traits>>;
  using Output = OutputOverQueries<Traits>;
  constexpr FwdConfig k = Traits::k;
  static_assert(k.is_skewed() && !k.tile_overlap && !k.ping_pong,
                "Feed loads V a step ahead, when all products of a step have been issued");
  // With one Q buffer O has to leave it first.
  constexpr bool kLoadsQEarly = Traits::kQStages > 1;
  int const thread = int(threadIdx.x) % kWarpgroupThreads;
  Consumer consumer(shared, p, warpgroup, thread, {shared, p});
  SkewedLoop<Consumer> loop{consumer};
  Feed<Traits>& feed = consumer.ping_pong;

  DenseTiles<Traits> tiles(p);
  FwdWork<Traits> work = tiles.next();
  feed.load_first_k(work);
  feed.load_q();
  while (work.valid()) {
    FwdTile<Traits> tile = consumer.take_tile();
    feed.begin_steps();
    loop.begin(tile);
    loop.visit_keys(tile);
    work = tiles.next();
    if (work.valid()) {
      feed.load_first_k(work);
      if constexpr (kLoadsQEarly) {
        feed.load_q();
      }
    }
    loop.end(tile);
    if (thread == 0) {
      Output::copy_out(shared, p, tile.q_stage, warpgroup);
    }
    if (!kLoadsQEarly && work.valid()) {
      feed.load_q();
    }
  }
}

template <class Config>
constexpr int unspecialised_threads() {
  return Config::k.consumer_warpgroups * kWarpgroupThreads;
}

template <class Config>
__global__ void __launch_bounds__(unspecialised_threads<Config>(), 1)
    unspecialised_kernel(FwdDeviceParams const __grid_constant__ p) {
  using Traits = FwdTraits<Config>;
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<FwdStorage<Traits>*>(shared_bytes);
  if (threadIdx.x == 0) {
    shared.init_barriers();
  }
  __syncthreads();
  run_warpgroup<Traits>(shared, p, cutlass::canonical_warp_group_idx());
}

template <class Config>
void launch_unspecialised(FwdParams const& p, void* stream) {
  constexpr int kBytes = Config::k.shared_bytes();
  int const grid = p.schedule.grid;
  auto const check = [&](cudaError_t error) { check_launch(error, Config::k.name, grid, kBytes); };
  // First, because the tensor maps need the CUDA context that this gives a thread.
  check(cudaFuncSetAttribute(unspecialised_kernel<Config>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  TensorMapMaker maps{p.problem.dtype};
  FwdDeviceParams const params = device_params<Config>(maps, p);
  check(maps.error);
  unspecialised_kernel<Config>
      <<<grid, unspecialised_threads<Config>(), kBytes, static_cast<cudaStream_t>(stream)>>>(
          params);
  check(cudaGetLastError());
}

}  // namespace fa3
