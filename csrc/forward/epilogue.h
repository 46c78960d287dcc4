// The way out: O from registers through shared memory to global memory, LSE straight to global
// memory.
#pragma once

#include "device/tensor_map.h"
#include "forward/softmax.h"
#include "forward/storage.h"

namespace fa3 {

// Consumer side: O over this warpgroup's rows of Q, then the store warp is told. A warp stores its
// 16 rows 16 columns at a time: a lane gives the address of one row of one of the four 8 x 8
// blocks.
template <class Traits, class FragmentO>
CUTE_DEVICE void stage_output(FwdStorage<Traits>& shared, int q_stage, int warpgroup, int thread,
                              FragmentO const& tOrO) {
  using Element = typename Traits::Element;
  auto rO = cute::make_tensor<Element>(tOrO.layout());  // ((2,2,Dv/8),1,1)
  convert_fragment<Element>(tOrO, rO);
  auto pairs = cute::recast<uint32_t>(rO);  // 4 to 16 columns
  char* const rows = reinterpret_cast<char*>(shared.q[q_stage][warpgroup]);
  int const row = thread / 32 * 16 + thread % 16;
  int const half = thread / 16 % 2;
  CUTE_UNROLL
  for (int j = 0; j < Traits::kHeadDimV / 16; ++j) {
    char* const target = rows + chunk_offset_bytes<kWarpgroupRows>(row, 2 * j + half);
    cute::SM90_U32x4_STSM_N::copy(pairs(4 * j), pairs(4 * j + 1), pairs(4 * j + 2),
                                  pairs(4 * j + 3), *reinterpret_cast<cute::uint128_t*>(target));
  }
  fence_shared_for_async_proxy();
  __syncwarp();
  if (thread % 32 == 0) {
    shared.o_staged[q_stage][warpgroup].arrive();
  }
}

// Consumer side: one lane of the four that share a row writes its LSE, if it is wanted.
template <class Traits>
CUTE_DEVICE void store_lse(FwdDeviceParams const& p, FwdWork const& work, int thread,
                           OnlineSoftmax<typename Traits::Config> const& softmax) {
  if (p.lse == nullptr) {
    return;
  }
  int const pack = int(p.pack.divisor);
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    int const row = fragment_row(thread) + 8 * r;
    int const offset = p.pack.div(row);
    int const position = work.position_begin + offset;
    bool const in_tile = offset < p.positions_per_warpgroup && position < p.seqlen.q;
    if (in_tile && thread % 4 == 0) {
      int const head = work.head_group * pack + (row - offset * pack);
      p.lse[(int64_t(work.batch) * p.heads_q + head) * p.seqlen.q + position] =
          log_sum_exp(softmax.row_max[r], softmax.row_sum[r], p.softmax_scale);
    }
  }
}

// Copies the O that is staged out, then hands the Q buffer back to the producer. One thread runs
// this. Rows past the end of the sequence are dropped by the copy engine.
template <class Traits>
CUTE_DEVICE void store_output(FwdStorage<Traits>& shared, FwdDeviceParams const& p, int q_stage,
                              int warpgroup) {
  FwdWork const& work = shared.work[q_stage][warpgroup];
  CUTE_UNROLL
  for (int column = 0; column < Traits::kColumnsV; column += kSliceColumns) {
    cute::SM90_TMA_STORE_5D::copy(&p.o, &shared.q[q_stage][warpgroup][column * kWarpgroupRows],
                                  column, 0, work.position_begin, work.head_group, work.batch);
  }
  cute::tma_store_arrive();
  cute::tma_store_wait<0>();  // the buffer has been read
  shared.q_empty[q_stage][warpgroup].arrive();
}

// Store warp of one consumer warpgroup.
template <class Traits>
CUTE_DEVICE void store_outputs(FwdStorage<Traits>& shared, FwdDeviceParams const& p,
                               int warpgroup) {
  RingState<Traits::kQStages> ring;
  while (true) {
    shared.q_full[ring.stage][warpgroup].wait(ring.phase);
    if (!shared.work[ring.stage][warpgroup].valid()) {
      return;
    }
    shared.o_staged[ring.stage][warpgroup].wait(ring.phase);
    store_output(shared, p, ring.stage, warpgroup);
    ring.advance();
  }
}

}  // namespace fa3
