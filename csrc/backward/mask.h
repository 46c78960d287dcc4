// Masks the scores of queries that do not see a key. Keys are the rows of the scores here. Only
// steps at the ends of a tile's range are masked (backward/query_range.h).
#pragma once

#include "backward/storage.h"
#include "device/fragments.h"

namespace fa3 {

// The queries that see a key. In the last tile the interval may go past the end: those queries need
// no mask.
template <class Traits>
CUTE_DEVICE Interval queries_of_key(BwdDeviceParams const& p, BwdWork const& work, int key) {
  // The last tile of queries ends less than kTileM past the sequence.
  int const past_end = work.len.q + Traits::kTileM;
  return key < work.len.k ? mask_of<Traits::kKind.mask>(p.mask).queries(key, work.len)
                          : Interval{past_end, past_end};
}

// Masks of dense batches: the columns that see a key have no end. Their begin is computed in each
// masked step, of which there are few.
template <class Traits>
struct SimpleKeyMask {
  BwdDeviceParams const& p;
  int first_key;
  int thread;

  CUTE_DEVICE SimpleKeyMask(BwdDeviceParams const& p_, BwdStorage<Traits>&, int first_key_,
                            int thread_)
      : p(p_), first_key(first_key_), thread(thread_) {}

  CUTE_DEVICE void start(BwdWork const&) {}

  // Masks the scores of a step.
  template <class Fragment>
  CUTE_DEVICE void apply(Fragment& acc, BwdWork const& work, int m) const {
    auto scores = rows_view(acc);  // (2, (2, J))
    int own = thread;
    asm volatile("" : "+r"(own));
    int const first_query = m * Traits::kTileM + fragment_column(own);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      int const key = work.key_begin + first_key + fragment_row(own) + 8 * r;
      int const visible = queries_of_key<Traits>(p, work, key).begin - first_query;
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(scores); ++c) {
        int const column = (c / 2) * 8 + c % 2;
        scores(r, c) = column >= visible ? scores(r, c) : -INFINITY;
      }
    }
  }
};

// All masks. The limits of a key are in shared memory, since the loops have no registers for them.
// A step turns them into one bit for each score of a row, so that a score costs as much as above.
template <class Traits>
struct AnyKeyMask {
  BwdDeviceParams const& p;
  Interval* limits;  // starts at the warpgroup's first key, in shared memory
  int first_key;
  int thread;

  CUTE_DEVICE AnyKeyMask(BwdDeviceParams const& p_, BwdStorage<Traits>& shared, int first_key_,
                         int thread_)
      : p(p_), limits(shared.key_limits + first_key_), first_key(first_key_), thread(thread_) {}

  // Each warp writes the limits of its own keys.
  CUTE_DEVICE void start(BwdWork const& work) {
    int own = thread;
    asm volatile("" : "+r"(own));
    int const lane = own % 32;
    if (lane < kWarpRows) {
      int const row = own / 32 * kWarpRows + lane;
      limits[row] = queries_of_key<Traits>(p, work, work.key_begin + first_key + row);
    }
    __syncwarp();
  }

  // Masks the scores of a step.
  template <class Fragment>
  CUTE_DEVICE void apply(Fragment& acc, BwdWork const& work, int m) const {
    auto scores = rows_view(acc);  // (2, (2, J))
    static_assert(cute::size<1>(scores) <= 32);
    // WHY: values derived from the thread's number would otherwise stay in registers over all
    // steps.
    int own = thread;
    asm volatile("" : "+r"(own));
    int const first = m * Traits::kTileM + fragment_column(own);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      Interval const queries = limits[fragment_row(own) + 8 * r];
      uint32_t const visible =
          scores_below(queries.end - first) & ~scores_below(queries.begin - first);
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(scores); ++c) {
        scores(r, c) = visible >> c & 1 ? scores(r, c) : -INFINITY;
      }
    }
  }

 private:
  // One bit for each score of a row before a column, counted from the thread's first one.
  CUTE_DEVICE static uint32_t scores_below(int column) {
    int const count = column <= 0 ? 0 : column / 8 * 2 + min_of(column % 8, 2);
    return count >= 32 ? ~0u : (1u << count) - 1;
  }
};

// A mask of lists: the intervals of the queries of a step, and the blocks of its entry. A lane
// turns the intervals of two queries into bits for the 16 keys of its warp, and the lanes that have
// the queries' scores take them from it: a masked step took twice as long when each lane read the
// intervals of all of its columns.
template <class Traits>
struct ListedKeyMask {
  static constexpr uint32_t kAllLanes = ~0u;
  static constexpr int kQueriesOfWord = 64;

  ListedBwdParams const& p;
  int first_key;
  int thread;

  CUTE_DEVICE ListedKeyMask(BwdDeviceParams const& p_, BwdStorage<Traits>&, int first_key_,
                            int thread_)
      : p(static_cast<ListedBwdParams const&>(p_)), first_key(first_key_), thread(thread_) {}

  CUTE_DEVICE void start(BwdWork const&) {}

  // Whole warps call it.
  template <class Fragment>
  CUTE_DEVICE void apply(Fragment& acc, BwdWork const& work, BwdStep const& step) const {
    auto scores = rows_view(acc);  // (2, (2, J))
    int own = thread;
    asm volatile("" : "+r"(own));  // else values derived from it stay in registers
    int const lane = own % 32;
    int const first = work.key_begin + first_key;
    uint32_t const blocks = step.flags >> BwdStep::kFirstBlockBit >> first / kWarpgroupRows % 2;
    int const warp_key = first + own / 32 * kWarpRows;
    if (p.listed.rows == nullptr) {
      hide_blocks(scores, blocks, work.len.k - warp_key - lane / 4);
      return;
    }
    CUTE_UNROLL
    for (int w = 0; w < Traits::kTileM / kQueriesOfWord; ++w) {
      int const query = step.m * Traits::kTileM + w * kQueriesOfWord + lane;
      uint32_t const both = keys_seen(work, query, warp_key) |
                            keys_seen(work, query + kQueriesOfWord / 2, warp_key) << kWarpRows;
      uint32_t const word = blocks >> 2 * w & 1 ? both : 0;
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) {  // two of the lane's columns: c and the one 32 queries later
        uint32_t const seen =
            __shfl_sync(kAllLanes, word, i / 2 * 8 + i % 2 + fragment_column(own)) >> lane / 4;
        CUTE_UNROLL
        for (int bit = 0; bit < 4; ++bit) {
          auto& score = scores(bit % 2, 16 * w + 8 * (bit / 2) + i);
          score = seen >> 8 * bit & 1 ? score : -INFINITY;
        }
      }
    }
  }

 private:
  // Without intervals. keys: from the lane's first row to the end of the sequence.
  template <class Scores>
  CUTE_DEVICE static void hide_blocks(Scores& scores, uint32_t blocks, int keys) {
    CUTE_UNROLL
    for (int c = 0; c < cute::size<1>(scores); ++c) {
      bool const is_shown = blocks >> 2 * (c / 16) & 1;
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        scores(r, c) = is_shown && 8 * r < keys ? scores(r, c) : -INFINITY;
      }
    }
  }

  // The keys of a warp that a query sees, a bit each.
  CUTE_DEVICE uint32_t keys_seen(BwdWork const& work, int query, int warp_key) const {
    int4 const row = __ldg(rows_of(work) + min_of(query, work.len.q - 1));
    auto const below = [&](int key) { return (1u << clamp(key - warp_key, 0, kWarpRows)) - 1; };
    uint32_t const seen = (below(row.y) & ~below(row.x)) | (below(row.w) & ~below(row.z));
    return seen & below(work.len.k);
  }

  // The intervals of the sequence's queries.
  CUTE_DEVICE int4 const* rows_of(BwdWork const& work) const {
    int64_t const first = p.is_packed() ? int64_t(work.q_end - work.len.q) * 4
                                        : work.batch * p.listed.rows_batch_stride;
    return reinterpret_cast<int4 const*>(p.listed.rows + first);
  }
};

// Where the scores of a thread lie in a step (device/score.h). Keys are the rows of the fragment.
struct BwdScoresAt {
  BwdDeviceParams const& p;
  BwdWork const& work;
  int first_key;
  int first_query;
  int step_head;
  int thread;

  CUTE_DEVICE int row(int i) const {
    return first_query + fragment_column(thread) + i / 4 * 8 + i % 2;
  }
  CUTE_DEVICE int key(int i) const {
    return work.key_begin + first_key + fragment_row(thread) + i / 2 % 2 * 8;
  }
  CUTE_DEVICE int head(int) const { return step_head; }
};

// The mask of a warpgroup; first_key: its first key in the tile.
template <class Traits>
struct KeyMask {
  using IntervalLimits = cute::conditional_t<Traits::kKind.mask == MaskKind::kInterval,
                                             AnyKeyMask<Traits>, SimpleKeyMask<Traits>>;
  cute::conditional_t<Traits::kHasLists, ListedKeyMask<Traits>, IntervalLimits> limits;

  CUTE_DEVICE KeyMask(BwdDeviceParams const& p, BwdStorage<Traits>& shared, int first_key,
                      int thread)
      : limits(p, shared, first_key, thread) {}

  // Before the steps of a tile of keys.
  CUTE_DEVICE void start(BwdWork const& work) { limits.start(work); }

  template <class Fragment>
  CUTE_DEVICE void apply(Fragment& acc, BwdWork const& work, BwdStep const& step) const {
    if constexpr (Traits::kHasLists) {
      limits.apply(acc, work, step);
    } else {
      limits.apply(acc, work, step.m);
    }
  }

  // Where a step needs the mask.
  template <class Fragment>
  CUTE_DEVICE void apply(Fragment& acc, StepsOf<Traits> const& steps) const {
    if (steps.template is_masked<Traits>()) {
      apply(acc, *steps.work, BwdStep{steps.own_flags(), 0, 0, steps.m});
    }
  }
};

}  // namespace fa3
