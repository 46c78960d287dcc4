// OutputKind::kParts, on a cache: a warpgroup stores the O of a whole output tile from registers to
// global memory, and the O of a part in fp32 to a buffer (parts.h).
#pragma once

#include "forward/cache/combine_parts.h"
#include "forward/storage.h"

namespace fa3 {

template <class Traits>
struct OutputParts {
  template <class Softmax, class FragmentO>
  CUTE_DEVICE static void store(FwdStorage<Traits>& shared, CacheDeviceParams const& p,
                                RowWriter writer, Softmax const& softmax, float const (&sinks)[2],
                                FragmentO const& tOrO) {
    auto const [q_stage, warpgroup, thread] = writer;
    FwdWork<Traits> const work = shared.work[q_stage][warpgroup];
    release_queries(shared, q_stage, warpgroup, thread);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (thread % 4 == 0) {
        raise_largest(p, work.rows, fragment_row(thread) + 8 * r,
                      softmax.largest_logit(r, p.softmax_scale));
      }
    }
    if (work.location.part.parts == 1) {
      ResultColumns<Traits>{p, work, thread, 0}.write(tOrO);
      store_rows<Traits>(p, work.rows, thread, softmax, sinks);
    } else {
      store_part(p, work, writer, softmax, tOrO);
      NamedBarrier const barrier{int(NamedBarrier::kWarpgroupFirst) + warpgroup};
      combine_parts(
          p, work, warpgroup,
          PartGroup{thread, kWarpgroupThreads, barrier, &shared.completes_tile[warpgroup]});
    }
  }

  CUTE_DEVICE static void finish(int) {}

 private:
  // Stores O in register order, with the LSE of each row or, if parts are folded, its maximum
  // and sum.
  template <class Softmax, class FragmentO>
  CUTE_DEVICE static void store_part(CacheDeviceParams const& p, FwdWork<Traits> const& work,
                                     RowWriter writer, Softmax const& softmax,
                                     FragmentO const& tOrO) {
    auto const [q_stage, warpgroup, thread] = writer;
    if (fragment_row(thread) >= rows_of_tile(p, work.rows)) {
      return;
    }
    KeyPart const& own = work.location.part;
    PartRows<Traits> const part{p, slot_of_part<Traits>(own, own.index)};
    int const warp = warpgroup * kWarpgroupWarps + thread / 32;
    auto const fours = cute::recast<float4 const>(tOrO);
    CUTE_UNROLL
    for (int i = 0; i < PartRows<Traits>::kFours; ++i) {
      part.fours(warp, i)[thread % 32] = fours(i);
    }
    if (thread % 4 == 0) {
      float* const maxima = p.part_lses + part.first_row(warp) + thread % 32 / 4;
      float* const sums = p.group_lses + part.first_row(warp) + thread % 32 / 4;
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        if (Traits::kMayFold && p.folds) {
          maxima[part.half() * r] =
              softmax.row_max[r] * (Traits::kConverts ? softmax.scale_log2 : 1.f);
          sums[part.half() * r] = softmax.row_sum[r];
        } else {
          maxima[part.half() * r] = softmax.lse(r, p.softmax_scale);
        }
      }
    }
  }
};

}  // namespace fa3
