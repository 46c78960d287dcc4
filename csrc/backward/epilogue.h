// The results of a CTA: dK and dV from registers through shared memory to global memory, at the
// end; for consumers by keys, dQ from shared memory to its accumulator, at every step.
#pragma once

#include "backward/storage.h"
#include "backward/add_order.h"
#include "device/bulk_copy.h"
#include "device/fragments.h"
#include "device/math.h"
#include "device/row_copies.h"

namespace fa3 {

// Copies a slice of 16 rows of dK or dV to global memory, as part of the thread's current bulk
// group. The copy engine drops keys past the end of the sequence.
template <class Traits>
CUTE_DEVICE void store_rows(CUtensorMap const& map, typename Traits::Element const* slice,
                            BwdWork const& work, int row, int column) {
  using Location = typename Traits::Location;
  store_box<Location>(map, slice,
                      {column, work.k_row + row, work.kv_head, Location{work.batch}, work.k_end});
}

// A warp writes its 16 rows of dK or dV over the same rows of K or V, 16 columns at a time: each
// lane gives the address of one row of one of the four 8 x 8 blocks. Then one lane issues the
// copies to global memory.
template <class Traits, int kDim, class Fragment>
CUTE_DEVICE void store_gradient(CUtensorMap const& map, typename Traits::Element* tile,
                                BwdWork const& work, int first_key, int thread, float scale,
                                Fragment& acc) {
  using Element = typename Traits::Element;
  CUTE_UNROLL
  for (int i = 0; i < cute::size(acc); ++i) {
    acc(i) *= scale;
  }
  auto rounded = cute::make_tensor<Element>(acc.layout());  // ((2,2,D/8),1,1)
  convert_fragment<Element>(acc, rounded);
  auto pairs = cute::recast<uint32_t>(rounded);
  int const first_row = first_key + thread / 32 * kWarpRows;
  store_warpgroup_rows<Traits::kTileN, kDim / 16>(pairs, reinterpret_cast<char*>(tile), first_key,
                                                  thread);
  fence_shared_for_async_proxy();
  __syncwarp();
  if (thread % 32 == 0) {
    CUTE_UNROLL
    for (int column = 0; column < kDim; column += kSliceColumns) {
      store_rows<Traits>(map, tile + column * Traits::kTileN + first_row * kSliceColumns, work,
                         first_row, column);
    }
    cute::tma_store_arrive();
  }
}

// Waits for the copies that a lane has issued, since shared memory is released when the CTA ends.
CUTE_DEVICE void finish_stores(int thread) {
  if (thread % 32 == 0) {
    cute::tma_store_wait<0>();
  }
}

// Writes zeros for keys that no query sees. One thread runs this. WHY not a step with P = 0: it
// would read dO, and 0 * NaN is NaN.
template <class Traits>
CUTE_DEVICE void store_zeros(BwdStorage<Traits>& shared, BwdDeviceParams const& p) {
  constexpr int kWords =
      kWarpRows * kSliceColumns * sizeof(typename Traits::Element) / sizeof(uint4);
  CUTE_NO_UNROLL
  for (int i = 0; i < kWords; ++i) {
    reinterpret_cast<uint4*>(shared.k)[i] = make_uint4(0, 0, 0, 0);
  }
  fence_shared_for_async_proxy();
  wait_for_earlier_launches();
  CUTE_NO_UNROLL
  for (int row = 0; row < Traits::kTileN; row += kWarpRows) {
    CUTE_NO_UNROLL
    for (int column = 0; column < Traits::kHeadDim; column += kSliceColumns) {
      store_rows<Traits>(p.dk, shared.k, shared.work, row, column);
    }
    CUTE_NO_UNROLL
    for (int column = 0; column < Traits::kHeadDimV; column += kSliceColumns) {
      store_rows<Traits>(p.dv, shared.k, shared.work, row, column);
    }
  }
  cute::tma_store_arrive();
  cute::tma_store_wait<0>();
}

// Store warp of one consumer warpgroup: adds its block of dQ to the accumulator at every step, in
// deterministic mode after its predecessors. One thread runs this.
template <class Traits>
CUTE_DEVICE void add_dq(BwdStorage<Traits>& shared, BwdDeviceParams const& p, int warpgroup) {
  constexpr int kBlockFloats = Traits::kDq.block_floats();
  // WHY a copy: nothing then waits for shared memory between two steps. General kernels have no
  // registers for it.
  cute::conditional_t<kServesPacked<Traits>, BwdWork const&, BwdWork const> work = shared.work;
  uint32_t phase = 0;
  for (BwdSteps steps(work); steps.valid(); steps.next(), phase ^= 1) {
    int64_t const block = steps.tile(p) * Traits::kWarpgroups + warpgroup;
    if (p.is_deterministic()) {
      wait_for_predecessors<Traits>(p, steps, warpgroup);
      fence_global_for_async_proxy();
    }
    shared.exchange.dq_staged[warpgroup].wait(phase);
    bulk_add(p.dq_sum + block * kBlockFloats, shared.exchange.dq[warpgroup],
             kBlockFloats * sizeof(float));
    cute::tma_store_arrive();
    cute::tma_store_wait<0>();  // the buffer has been read
    shared.exchange.dq_empty[warpgroup].arrive();
    if (p.is_deterministic()) {
      wait_for_bulk_writes();
      fence_global_for_async_proxy();
      publish_added<Traits>(p, steps, warpgroup);
    }
  }
}

}  // namespace fa3
