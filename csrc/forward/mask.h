// Hides the keys that a row does not see. Only tiles at the ends of a row's range go through this
// (core/block_range.h).
#pragma once

#include "device/fragments.h"
#include "forward/work.h"

namespace fa3 {

// What a K tile may have that a row does not see.
enum class Hidden { kNothing, kEnd, kBothEnds };

// The keys that each of this thread's two rows sees. FP8 counts those alone that the thread has the
// scores of, two of eight; the others count all, from the thread's first column on.
template <class Traits>
struct RowLimits {
  static constexpr bool kHasBegin = Traits::kGeneral;
  static constexpr int kOfTile = Traits::kFp8 ? Traits::kTileN / 4 : Traits::kTileN;  // so counted

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
        limits.begin[r] = count_before(keys.begin, thread);
      }
      limits.end[r] = count_before(keys.end, thread);
    }
    return limits;
  }

  // Whether no row of this warp sees a key of K tile n.
  CUTE_DEVICE bool hides_all(int n) const {
    int const first = n * kOfTile;
    bool sees = false;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      bool row_sees = end[r] > first;
      if constexpr (kHasBegin) {
        row_sees = row_sees && begin[r] < first + kOfTile;
      }
      sees = sees || row_sees;
    }
    return !__any_sync(0xffffffffu, sees);
  }

  template <Hidden kHidden, class Fragment>
  CUTE_DEVICE void apply(Fragment& acc, int n) const {
    auto scores = rows_view(acc);  // (2, (2, J))
    int const first = n * kOfTile;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      if constexpr (Traits::kFp8) {
        apply_by_bits<kHidden>(scores, r, first);
      } else {
        apply_by_columns<kHidden>(scores, r, first);
      }
    }
  }

 private:
  template <Hidden kHidden, class Scores>
  CUTE_DEVICE void apply_by_columns(Scores& scores, int r, int first) const {
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

  // One instruction makes predicates of seven bits.
  // WHY of FP8 alone: the other kernels were tuned without.
  template <Hidden kHidden, class Scores>
  CUTE_DEVICE void apply_by_bits(Scores& scores, int r, int first) const {
    CUTE_UNROLL
    for (int c = 0; c < cute::size<1>(scores); ++c) {
      int const from = c / kAtOnce * kAtOnce;
      uint32_t visible = bits_before(end[r] - first - from);
      if constexpr (kHidden == Hidden::kBothEnds) {
        visible &= ~bits_before(begin[r] - first - from);
      }
      scores(r, c) = (visible & (1u << (c - from))) != 0 ? scores(r, c) : -INFINITY;
    }
  }

  CUTE_DEVICE static int count_before(int key, int thread) {
    int const column = key - fragment_column(thread);
    return Traits::kFp8 ? (column >> 3) * 2 + min_of(column & 7, 2) : column;
  }

  CUTE_DEVICE static uint32_t bits_before(int count) {
    return (1u << clamp(count, 0, kAtOnce)) - 1;
  }

  static constexpr int kAtOnce = 24;
};

}  // namespace fa3
