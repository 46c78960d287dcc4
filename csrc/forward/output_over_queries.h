// OutputKind::kOverQueries: a warpgroup writes O over its rows of Q in shared memory, and a store
// warp copies it to global memory.
#pragma once

#include "device/row_copies.h"
#include "forward/results.h"
#include "forward/softmax.h"
#include "forward/storage.h"

namespace fa3 {

// Copies a warpgroup's O from shared memory to its rows, from `position` on; a negative position
// means that it has no rows. Part of the thread's bulk group. TMA drops rows past the
// end of the sequence.
template <class Traits>
CUTE_DEVICE void copy_output(FwdDeviceParams const& p, FwdWork<Traits> const& work,
                             void const* staged, int position) {
  if (position < 0) {
    return;
  }
  char const* const rows = static_cast<char const*>(staged);
  CUTE_UNROLL
  for (int column = 0; column < padded_columns(Traits::kHeadDimV); column += kSliceColumns) {
    store_box<typename Traits::Location>(
        p.o, rows + column * kWarpgroupRows * 2,
        {ColumnsOf<Traits>::first_column() + column, work.rows.head,
         work.location.first_q() + position, work.location, work.location.end_q()});
  }
}

template <class Traits>
struct OutputOverQueries {
  static_assert(sizeof(typename Traits::Element) == 2, "O has the elements of Q");

  // Consumer side. softmax and O are finished.
  template <class Softmax, class FragmentO>
  CUTE_DEVICE static void store(FwdStorage<Traits>& shared, FwdDeviceParams const& p,
                                RowWriter writer, Softmax const& softmax, float const (&sinks)[2],
                                FragmentO const& tOrO) {
    auto const [q_stage, warpgroup, thread] = writer;
    store_rows<Traits>(p, shared.work[q_stage][warpgroup].rows, thread, softmax, sinks);
    stage(shared, q_stage, warpgroup, thread, tOrO);
  }

  // Consumer side, after the last tile.
  CUTE_DEVICE static void finish(int) {}

  // Store warp of a consumer warpgroup. One thread runs this.
  CUTE_DEVICE static void run_store_warp(FwdStorage<Traits>& shared, FwdDeviceParams const& p,
                                         int warpgroup) {
    RingState<Traits::kQStages> ring;
    while (true) {
      shared.q_full[ring.stage][warpgroup].wait(ring.phase);
      if (!shared.work[ring.stage][warpgroup].valid()) {
        return;
      }
      shared.o_staged[ring.stage][warpgroup].wait(ring.phase);
      copy_out(shared, p, ring.stage, warpgroup);
      ring.advance();
    }
  }

  // Copies O out, then releases the Q buffer to the producer.
  CUTE_DEVICE static void copy_out(FwdStorage<Traits>& shared, FwdDeviceParams const& p,
                                   int q_stage, int warpgroup) {
    FwdWork<Traits> const& work = shared.work[q_stage][warpgroup];
    copy_output(p, work, shared.q[q_stage][warpgroup], work.position_begin);
    cute::tma_store_arrive();
    cute::tma_store_wait<0>();  // the buffer has been read
    shared.q_empty[q_stage][warpgroup].arrive();
  }

 private:
  // A warp stores its 16 rows 16 columns at a time: each lane gives the address of one row of one
  // of the four 8 x 8 blocks.
  template <class FragmentO>
  CUTE_DEVICE static void stage(FwdStorage<Traits>& shared, int q_stage, int warpgroup, int thread,
                                FragmentO const& tOrO) {
    using Element = typename Traits::Element;
    auto rO = cute::make_tensor<Element>(tOrO.layout());  // ((2,2,Dv/8),1,1)
    convert_fragment<Element>(tOrO, rO);
    auto pairs = cute::recast<uint32_t>(rO);  // 4 to 16 columns
    char* const rows = reinterpret_cast<char*>(shared.q[q_stage][warpgroup]);
    store_warpgroup_rows<kWarpgroupRows, Traits::kHeadDimV / 16>(pairs, rows, 0, thread);
    fence_shared_for_async_proxy();
    __syncwarp();
    if (thread % 32 == 0) {
      shared.o_staged[q_stage][warpgroup].arrive();
    }
  }
};

}  // namespace fa3
