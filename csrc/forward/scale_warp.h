// FP8: warp 1 of the producer warpgroup. It brings the scales of a tile ahead of the consumers and,
// where there are two warpgroups of these, takes away what they have staged of the tile before.
//
// INVARIANT: the results of a tile are awaited when all scales of the next one are there, for with
// overlap of tiles the consumers need the first of these before they stage them.
#pragma once

#include "forward/epilogue.h"
#include "forward/scales.h"

namespace fa3 {

template <class Traits>
CUTE_DEVICE void run_scale_warp(FwdStorage<Traits>& shared, FwdDeviceParams const& p) {
  ScaleReader<Traits> reader(shared, p);
  ResultSender<Traits> sender(shared, p, lane_of_warp());
  CompactRing<Traits::kQStages> ring;
  while (true) {
    shared.tile_known[ring.stage()].wait(ring.phase());
    FwdWork<Traits> const& work = shared.work[ring.stage()][0];
    bool const is_last = !work.valid();
    if (!is_last) {
      reader.write_scales(ring.stage());
    }
    if constexpr (Traits::kSendsResults) {
      sender.send(shared.work[ring.stage()][Traits::kWarpgroups - 1]);
    }
    if (is_last) {
      return;
    }
    ring.advance();
  }
}

}  // namespace fa3
