// The roles of warps 1 to 3 of the producer warpgroup.
#pragma once

#include "forward/output_over_queries.h"
#include "forward/fp8/result_sender.h"
#include "forward/fp8/scales.h"
#include "forward/fp8/values_transposed.h"

namespace fa3 {

// They have nothing to do.
struct NoHelpers {
  static constexpr bool kAreWholeWarps = false;

  template <class Traits>
  CUTE_DEVICE static void publish_tile(FwdStorage<Traits>&, int) {}

  template <class Traits>
  CUTE_DEVICE static void run(FwdStorage<Traits>&, FwdDeviceParams const&, int) {}
};

// Each warp stores O of one consumer warpgroup.
struct StoreWarps {
  static constexpr bool kAreWholeWarps = false;  // one elected thread of each warp

  template <class Traits>
  CUTE_DEVICE static void publish_tile(FwdStorage<Traits>&, int) {}

  template <class Traits>
  CUTE_DEVICE static void run(FwdStorage<Traits>& shared, FwdDeviceParams const& p, int warp) {
    if (warp <= Traits::kWarpgroups) {
      OutputOverQueries<Traits>::run_store_warp(shared, p, warp - 1);
    }
  }
};

// Warp 1 reads scales and, with OutputKind::kSent, copies results; warps 2 and 3 transpose V.
struct ScaleAndTransposeWarps {
  static constexpr bool kAreWholeWarps = true;

  template <class Traits>
  CUTE_DEVICE static void publish_tile(FwdStorage<Traits>& shared, int q_stage) {
    shared.tile_known[q_stage].arrive();
  }

  template <class Traits>
  CUTE_DEVICE static void run(FwdStorage<Traits>& shared, FwdDeviceParams const& p, int warp) {
    if (warp == 1) {
      run_scale_warp(shared, p);
    } else {
      ValueTransposer<Traits>(shared, warp - 2, lane_of_warp()).run();
    }
  }

 private:
  // INVARIANT: the warp waits for the results of a tile after it has written all scales of the next
  // one, because with overlap of tiles the consumers need the first of these before they stage
  // results.
  template <class Traits>
  CUTE_DEVICE static void run_scale_warp(FwdStorage<Traits>& shared, FwdDeviceParams const& p) {
    using Sender = cute::conditional_t<Traits::k.output == OutputKind::kSent, ResultSender<Traits>,
                                       NoSender<Traits>>;
    ScaleReader<Traits> reader(shared, p);
    Sender sender(shared, p);
    CompactRing<Traits::kQStages> ring;
    while (true) {
      shared.tile_known[ring.stage()].wait(ring.phase());
      bool const is_last = !shared.work[ring.stage()][0].valid();
      if (!is_last) {
        reader.write_scales(ring.stage());
      }
      sender.send(ring.stage());
      if (is_last) {
        return;
      }
      ring.advance();
    }
  }
};

}  // namespace fa3
