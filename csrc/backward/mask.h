// Hides the queries that do not see a key. Keys are the rows of the scores here; only steps before
// QueryRange::free_begin go through this.
#pragma once

#include "backward/params.h"
#include "device/fragments.h"

namespace fa3 {

// The columns [begin, ...) that see each of this thread's two keys, counted from the thread's first
// column and the first query of the sequence.
struct KeyLimits {
  int begin[2];

  template <class Traits>
  CUTE_DEVICE static KeyLimits of_warpgroup(BwdDeviceParams const& p, int key_begin, int thread) {
    KeyLimits limits;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      int const key = key_begin + fragment_row(thread) + 8 * r;
      // Tiles of queries end less than kTileM past the sequence.
      int const nobody = p.seqlen.q + Traits::kTileM;
      int const first = key < p.seqlen.k ? first_position(key, p.seqlen, Traits::kCausal) : nobody;
      limits.begin[r] = first - fragment_column(thread);
    }
    return limits;
  }

  template <class Fragment>
  CUTE_DEVICE void apply(Fragment& acc, int first_query) const {
    auto scores = rows_view(acc);  // (2, (2, J))
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      int const visible = begin[r] - first_query;
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(scores); ++c) {
        int const column = (c / 2) * 8 + c % 2;
        scores(r, c) = column >= visible ? scores(r, c) : -INFINITY;
      }
    }
  }
};

}  // namespace fa3
