// Masks the scores of keys that a row does not see. Only K tiles at the ends of a row's range are
// masked (core/block_range.h).
#pragma once

#include "core/tree_mask.h"
#include "device/fragments.h"
#include "forward/work.h"

namespace fa3 {

// Which ends of a row's range of keys may lie in a K tile.
enum class Masked { kNothing, kEnd, kBothEnds };

// Counting, for 16-bit kernels: limits are columns, from the thread's first one on. One comparison
// for each score.
struct ColumnComparison {
  static constexpr int of_tile(int tile_n) { return tile_n; }

  CUTE_DEVICE static int count_before(int key, int thread) { return key - fragment_column(thread); }

  template <Masked kMasked, class Scores>
  CUTE_DEVICE static void apply(Scores& scores, int r, int begin, int end) {
    CUTE_UNROLL
    for (int c = 0; c < cute::size<1>(scores); ++c) {
      int const column = (c / 2) * 8 + c % 2;
      bool const is_visible = column < end && (kMasked != Masked::kBothEnds || column >= begin);
      scores(r, c) = is_visible ? scores(r, c) : -INFINITY;
    }
  }
};

// Counting, for FP8: limits count only the columns that the thread has, two of eight, and each is a
// bit. One instruction makes predicates of seven bits. WHY not all kernels: the 16-bit ones were
// tuned with comparisons.
struct ColumnBits {
  static constexpr int kAtOnce = 24;

  static constexpr int of_tile(int tile_n) { return tile_n / 4; }

  CUTE_DEVICE static int count_before(int key, int thread) {
    int const column = key - fragment_column(thread);
    return (column >> 3) * 2 + min_of(column & 7, 2);
  }

  template <Masked kMasked, class Scores>
  CUTE_DEVICE static void apply(Scores& scores, int r, int begin, int end) {
    CUTE_UNROLL
    for (int c = 0; c < cute::size<1>(scores); ++c) {
      int const from = c / kAtOnce * kAtOnce;
      uint32_t visible = bits_before(end - from);
      if (kMasked == Masked::kBothEnds) {
        visible &= ~bits_before(begin - from);
      }
      scores(r, c) = (visible & (1u << (c - from))) != 0 ? scores(r, c) : -INFINITY;
    }
  }

 private:
  CUTE_DEVICE static uint32_t bits_before(int count) {
    return (1u << clamp(count, 0, kAtOnce)) - 1;
  }
};

struct NoTree {
  template <class Params, class Work>
  CUTE_DEVICE void start(Params const&, Work const&, int) {}
  template <class Params, class Scores>
  CUTE_DEVICE void apply(Params const&, Scores&, int) const {}
};

// On a cache: the rows of a mask of bits, where the call has one.
template <class Traits>
struct TreeRows {
  int rows[2];
  int first;  // its column 0, counted from the thread's first column of K tile 0

  CUTE_DEVICE void start(CacheDeviceParams const& p, FwdWork<Traits> const& work, int thread) {
    CacheLocation const& at = work.location;
    int const first_row = p.has_packed_queries() ? at.q_end - at.len.q : work.entry * p.tree_stride;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      int const position = work.position_begin + p.pack.div(fragment_row(thread) + 8 * r);
      rows[r] = first_row + min_of(position, at.len.q - 1);
    }
    first = at.slot + at.len.k - at.len.q - fragment_column(thread);
  }

  template <class Scores>
  CUTE_DEVICE void apply(CacheDeviceParams const& p, Scores& scores, int n) const {
    if (p.tree == nullptr) {
      return;
    }
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      uint4 const words = __ldg(p.tree + rows[r]);
      TreeBits const bits =
          TreeBits{words.x | uint64_t(words.y) << 32, words.z | uint64_t(words.w) << 32}.from(
              n * Traits::kTileN - first);
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(scores); ++c) {
        scores(r, c) = bits.test(c / 2 * 8 + c % 2) ? scores(r, c) : -INFINITY;
      }
    }
  }
};

// The interval of keys that each of this thread's two rows sees. It begins at 0 except under an
// interval mask.
template <class Traits, class Counting>
struct RowLimits {
  using Params = typename Traits::Params;
  static constexpr bool kHasBegin = Traits::kKind.mask == MaskKind::kInterval;

  CUTE_DEVICE static RowLimits of_tile(Params const& p, FwdWork<Traits> const& work, int thread) {
    RowLimits limits;
    limits.tree.start(p, work, thread);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      int const position = work.position_begin + p.pack.div(fragment_row(thread) + 8 * r);
      Interval const keys =
          mask_of<Traits::kKind.mask>(p.mask).keys(position, work.location.lengths(p.seqlen));
      int const slot = work.location.first_slot();
      if (kHasBegin) {
        limits.begin(r) = Counting::count_before(slot + keys.begin, thread);
      }
      limits.end_[r] = Counting::count_before(slot + keys.end, thread);
    }
    return limits;
  }

  // The K tile of a visit.
  CUTE_DEVICE static int at(BlockRange const& keys, int n) { return keys.tile(n); }

  // Masks the scores of K tile n.
  template <Masked kMasked, class Fragment>
  CUTE_DEVICE void apply(Params const& p, Fragment& acc, int n) {
    auto scores = rows_view(acc);  // (2, (2, J))
    int const first = n * Counting::of_tile(Traits::kTileN);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      Counting::template apply<kMasked>(scores, r, begin(r) - first, end_[r] - first);
    }
    tree.apply(p, scores, n);
  }

 private:
  CUTE_DEVICE int& begin(int r) { return begin_[kHasBegin ? r : 0]; }

  int begin_[kHasBegin ? 2 : 1];
  int end_[2];
  cute::conditional_t<Traits::kIsCache, TreeRows<Traits>, NoTree> tree;
};

// With lists: two intervals of keys for each of this thread's two rows, and the blocks of a K tile
// that the warpgroup sees. A masked tile makes a bit for each score of a row, as ColumnBits does:
// with four comparisons for each score a window with sinks had 0.84 of the speed of a window alone,
// 32k, instead of 0.98 (H200, 2026-11-28).
template <class Traits>
struct ListedLimits {
  using Params = typename Traits::Params;
  static constexpr bool kHasBegin = false;
  static constexpr int kScores = Traits::kTileN / 4;  // that a thread holds of a row

  Interval seen[2][2];  // by row; in scores of a row, from those of K tile 0 on
  int half;             // which half of the tile's queries the warpgroup has

  // work: of the warpgroup alone (share_of_warpgroup()).
  CUTE_DEVICE static ListedLimits of_tile(Params const& p, FwdWork<Traits> const& work,
                                          int thread) {
    ListedLimits limits;
    limits.half = work.position_begin / kWarpgroupRows % 2;
    SeqlenPair const len = work.location.len;
    auto const scores = [&](int begin, int end) {
      return Interval{ColumnBits::count_before(begin, thread),
                      ColumnBits::count_before(min_of(end, len.k), thread)};
    };
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      int const position = min_of(work.position_begin + fragment_row(thread) + 8 * r, len.q - 1);
      int4 row{0, len.k, 0, 0};
      if (p.listed.rows != nullptr) {
        int64_t const first = p.is_packed() ? int64_t(work.location.end_q() - len.q) * 4
                                            : work.location.batch * p.listed.rows_batch_stride;
        row = __ldg(reinterpret_cast<int4 const*>(p.listed.rows + first) + position);
      }
      limits.seen[r][0] = scores(row.x, row.y);
      limits.seen[r][1] = scores(row.z, row.w);
    }
    return limits;
  }

  CUTE_DEVICE static ListEntry at(KeyList const& keys, int n) { return keys.entry(n); }

  template <Masked, class Fragment>
  CUTE_DEVICE void apply(Params const&, Fragment& acc, ListEntry entry) const {
    constexpr uint32_t kLowerKeys = 0xffff;  // the scores of 64 keys
    auto scores = rows_view(acc);            // (2, (2, J))
    int const halves = entry.halves(half);
    int const first = entry.tile() * kScores;
    uint32_t const shown = (halves & 1 ? kLowerKeys : 0) | (halves & 2 ? ~kLowerKeys : 0);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      uint32_t const visible = shown & (bits(seen[r][0], first) | bits(seen[r][1], first));
      CUTE_UNROLL
      for (int c = 0; c < kScores; ++c) {
        scores(r, c) = (visible & (1u << c)) != 0 ? scores(r, c) : -INFINITY;
      }
    }
  }

 private:
  CUTE_DEVICE static uint32_t bits(Interval interval, int first) {
    return bits_before(interval.end - first) & ~bits_before(interval.begin - first);
  }

  CUTE_DEVICE static uint32_t bits_before(int count) {
    return count >= 32 ? ~0u : (1u << max_of(count, 0)) - 1;
  }
};

// Where the scores of a thread lie in a K tile (device/score.h).
template <class Traits>
struct FwdScoresAt {
  typename Traits::Params const& p;
  FwdWork<Traits> const& work;
  int n;  // the visit
  int thread;

  CUTE_DEVICE int row(int i) const { return work.position_begin + p.pack.div(row_of_tile(i)); }
  CUTE_DEVICE int head(int i) const { return work.rows.head + p.pack.mod(row_of_tile(i)); }
  CUTE_DEVICE int key(int i) const {
    int const column = fragment_column(thread) + i / 4 * 8 + i % 2;
    return work.keys.tile(n) * Traits::kTileN + column - work.location.first_slot();
  }

 private:
  CUTE_DEVICE int row_of_tile(int i) const { return fragment_row(thread) + i / 2 % 2 * 8; }
};

}  // namespace fa3
