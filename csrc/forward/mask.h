// Hides the keys that a row does not see. Only tiles at the ends of a row's range go through this
// (core/block_range.h).
#pragma once

#include "device/fragments.h"
#include "forward/work.h"

namespace fa3 {

// What a K tile may have that a row does not see.
enum class Hidden { kNothing, kEnd, kBothEnds };

// The columns that each of this thread's two rows sees, counted from the thread's first column.
template <class Traits>
struct RowLimits {
  static constexpr bool kHasBegin = Traits::kGeneral;

  int begin[kHasBegin ? 2 : 1];
  int end[2];

  CUTE_DEVICE static RowLimits of_tile(FwdDeviceParams const& p, FwdWork<Traits> const& work,
                                       int thread) {
    RowLimits limits;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      int const position = work.position_begin + p.pack.div(fragment_row(thread) + 8 * r);
      Interval const keys =
          mask_of<Traits::kMask>(p.mask).keys(position, work.place.lengths(p.seqlen));
      if constexpr (kHasBegin) {
        limits.begin[r] = keys.begin - fragment_column(thread);
      }
      limits.end[r] = keys.end - fragment_column(thread);
    }
    return limits;
  }

  template <Hidden kHidden, class Fragment>
  CUTE_DEVICE void apply(Fragment& acc, int n) const {
    auto scores = rows_view(acc);  // (2, (2, J))
    int const first = n * Traits::kTileN;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(scores); ++c) {
        int const column = (c / 2) * 8 + c % 2;
        bool is_visible = column < end[r] - first;
        if constexpr (kHidden == Hidden::kBothEnds) {
          is_visible = is_visible && column >= begin[r] - first;
        }
        scores(r, c) = is_visible ? scores(r, c) : -INFINITY;
      }
    }
  }
};

}  // namespace fa3
