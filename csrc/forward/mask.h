// Hides the keys that a row does not see. Only tiles at the end of a row's range go through this
// (core/block_range.h).
#pragma once

#include "core/mask_limits.h"
#include "device/fragments.h"
#include "forward/params.h"

namespace fa3 {

// The columns [0, end) that each of this thread's two rows sees, counted from the thread's first
// column.
struct RowLimits {
  int end[2];

  template <class Traits>
  CUTE_DEVICE static RowLimits of_tile(FwdDeviceParams const& p, int position_begin, int thread) {
    RowLimits limits;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      int const position = position_begin + p.pack.div(fragment_row(thread) + 8 * r);
      limits.end[r] = visible_end(position, p.seqlen, Traits::kCausal) - fragment_column(thread);
    }
    return limits;
  }

  template <int kTileN, class Fragment>
  CUTE_DEVICE void apply(Fragment& acc, int n) const {
    auto scores = rows_view(acc);  // (2, (2, J))
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      int const visible = end[r] - n * kTileN;
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(scores); ++c) {
        int const column = (c / 2) * 8 + c % 2;
        scores(r, c) = column < visible ? scores(r, c) : -INFINITY;
      }
    }
  }
};

}  // namespace fa3
