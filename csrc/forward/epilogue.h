// The way out: O from registers through shared memory to global memory, LSE straight to global
// memory.
#pragma once

#include "device/tensor_map.h"
#include "forward/mma.h"

namespace fa3 {

// Consumer side: O over this warpgroup's rows of Q, then the store warp is told.
template <class Traits, class FragmentO>
CUTE_DEVICE void stage_output(FwdStorage<Traits>& shared, RingState<Traits::kQStages> const& q_ring,
                              int warpgroup, int thread, FragmentO const& tOrO) {
  using Element = typename Traits::Element;
  auto rO = cute::make_tensor<Element>(tOrO.layout());  // ((2,2,Dv/8),1,1)
  convert_fragment<Element>(tOrO, rO);
  auto sO = cute::make_tensor(cute::make_smem_ptr(shared.q[q_ring.stage][warpgroup]),
                              typename Traits::SmemLayoutO{});  // (64, Dv)
  auto copy = cute::make_tiled_copy_C(cute::Copy_Atom<cute::SM90_U32x4_STSM_N, Element>{},
                                      typename Traits::MmaO{});
  auto slice = copy.get_thread_slice(thread);
  cute::copy(copy, slice.retile_S(rO), slice.partition_D(sO));
  fence_shared_for_async_proxy();
  __syncwarp();
  if (thread % 32 == 0) {
    shared.o_staged[q_ring.stage][warpgroup].arrive();
  }
}

// Consumer side: one lane of the four that share a row writes its LSE.
template <class Traits>
CUTE_DEVICE void store_lse(FwdDeviceParams const& p, FwdWork const& work, int warpgroup, int thread,
                           OnlineSoftmax<typename Traits::Config> const& softmax) {
  int const pack = int(p.pack.divisor);
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    int const row = fragment_row(thread) + 8 * r;
    int const offset = p.pack.div(row);
    int const position = work.position_begin + warpgroup * p.positions_per_warpgroup + offset;
    bool const in_tile = offset < p.positions_per_warpgroup && position < p.seqlen.q;
    if (in_tile && thread % 4 == 0) {
      int const head = work.head_group * pack + (row - offset * pack);
      p.lse[(int64_t(work.batch) * p.heads_q + head) * p.seqlen.q + position] =
          log_sum_exp(softmax.row_max[r], softmax.row_sum[r], p.softmax_scale);
    }
  }
}

// Store warp of one consumer warpgroup: copies O out, then hands the Q buffer back to the producer.
// One thread runs this. Rows past the end of the sequence are dropped by the copy engine.
template <class Traits>
CUTE_DEVICE void store_outputs(FwdStorage<Traits>& shared, FwdDeviceParams const& p,
                               int warpgroup) {
  RingState<Traits::kQStages> ring;
  for (TileWalk walk = walk_tiles(p); walk.valid(); walk.next()) {
    FwdWork const work = resolve_tile<Traits>(p, walk.coord());
    shared.o_staged[ring.stage][warpgroup].wait(ring.phase);
    CUTE_UNROLL
    for (int column = 0; column < Traits::kHeadDimV; column += kBoxColumns) {
      cute::SM90_TMA_STORE_5D::copy(
          &p.o, &shared.q[ring.stage][warpgroup][column * kWarpgroupRows], column, 0,
          work.position_begin + warpgroup * p.positions_per_warpgroup, work.head_group, work.batch);
    }
    cute::tma_store_arrive();
    cute::tma_store_wait<0>();  // the buffer has been read
    shared.q_empty[ring.stage][warpgroup].arrive();
    ring.advance();
  }
}

}  // namespace fa3
