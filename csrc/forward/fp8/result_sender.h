// OutputKind::kSent: the scale warp copies O and the LSE of a tile from shared to global memory,
// for both warpgroups. A whole warp runs this.
#pragma once

#include "forward/output_over_queries.h"

namespace fa3 {

// With other kinds of output the scale warp has no results to copy.
template <class Traits>
struct NoSender {
  CUTE_DEVICE NoSender(FwdStorage<Traits>&, FwdDeviceParams const&) {}
  CUTE_DEVICE void send(int) {}
};

template <class Traits>
struct ResultSender {
  FwdStorage<Traits>& shared;
  FwdDeviceParams const& p;
  int const lane;
  RingState<Traits::kQStages> ring;
  FwdWork<Traits> work;  // the last warpgroup's, which has rows in every tile

  CUTE_DEVICE ResultSender(FwdStorage<Traits>& shared_, FwdDeviceParams const& p_)
      : shared(shared_), p(p_), lane(lane_of_warp()), work(no_tile<Traits>()) {}

  // Sends the results of the tile `work`, if there is one. Then the tile at q_stage becomes `work`.
  CUTE_DEVICE void send(int q_stage) {
    FwdWork<Traits> const& next = shared.work[q_stage][Traits::kWarpgroups - 1];
    if (work.valid()) {
      CUTE_NO_UNROLL
      for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
        shared.o_staged[ring.stage][wg].wait(ring.phase);
        send_of_warpgroup(wg, (Traits::kWarpgroups - 1 - wg) * p.positions_per_warpgroup);
      }
      if (lane == 0) {
        cute::tma_store_arrive();
        cute::tma_store_wait<0>();  // it has been read
      }
      ring.advance();
    }
    // WHY a copy: `next` is overwritten when its tile is complete, before its results are sent.
    work = next;
    __syncwarp();
    if (lane == 0) {
      CUTE_UNROLL
      for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
        shared.o_sent[wg].arrive();
      }
    }
  }

 private:
  CUTE_DEVICE void send_of_warpgroup(int wg, int to_last) {
    int const position = work.position_begin - to_last;
    if (lane == 0) {
      copy_output(p, work, shared.staged[wg], position);
    }
    if (p.lse != nullptr && position >= 0) {
      send_lse(wg, FwdRows{work.rows.offset - to_last, work.rows.left + to_last, work.rows.head});
    }
  }

  CUTE_DEVICE void send_lse(int wg, FwdRows const& rows) {
    CUTE_UNROLL
    for (int row = lane; row < kWarpgroupRows; row += 32) {
      RowOfTile const of_tile = row_of_tile(p, rows, row);
      if (of_tile.exists) {
        p.lse[index_of_row(p, rows, of_tile)] = shared.staged_lse[wg][row];
      }
    }
  }
};

}  // namespace fa3
