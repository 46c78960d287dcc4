// Finds the first tile of a CTA. All threads of the CTA read lengths of sequences in parallel. With
// at most one sequence per thread, the lengths stay in shared memory.
#pragma once

#include "decode/traits.h"
#include "device/barriers.h"
#include "forward/cache/cache_batch.h"

namespace fa3 {

template <class Traits>
struct SequenceTable {
  static constexpr int kRuns = Traits::k.threads();
  static constexpr int kWarps = kRuns / 32;
  static_assert(kWarps % 4 == 0);

  // The first sequence of the CTA.
  struct Start {
    int sequence;
    int unit;   // unit at which it begins
    int units;  // units of each of its tiles; 0: unknown
    BlockRange keys;
  };

  CacheSequence last[kRuns];  // last sequence of each thread's run
  int warp_units[kWarps];
  int warp_others[kWarps];  // CacheWalk::others, or CacheWalk::fewest
  int warp_most[kWarps];    // CacheWalk::most
  Start start;
};

// Lengths of sequences, from the table if it holds all of them, otherwise from global memory.
template <class Traits>
struct KnownLengths {
  CacheLengths const& lengths;
  SequenceTable<Traits> const& table;
  int run;  // sequences per thread; if 1, the table holds all of them

  CUTE_DEVICE KnownLengths(CacheDeviceParams const& p, SequenceTable<Traits> const& table_)
      : lengths(p.lengths), table(table_), run(ceil_div(p.line.batch, table_.kRuns)) {}
};

template <class Traits>
CUTE_DEVICE CacheSequence cache_sequence(KnownLengths<Traits> const& known, int b) {
  return known.run == 1 ? known.table.last[b] : cache_sequence(known.lengths, b);
}

// Finds the parts that the CTA computes, in order. All threads call find() and confirm().
//
// INVARIANT: find() may run before earlier launches have ended. confirm() then reads the same
// lengths again once they have ended.
template <class Traits>
struct DecodeTiles {
  using Table = SequenceTable<Traits>;
  using Lengths = KnownLengths<Traits>;

  typename Traits::Params const& p;
  Table& table;
  Lengths lengths;
  CacheTiles<Traits, Lengths> tiles;

  CUTE_DEVICE DecodeTiles(typename Traits::Params const& p_, Table& table_)
      : p(p_), table(table_), lengths(p_, table_), tiles(p_, lengths) {}

  // Reads all lengths and finds the sequence at which the CTA's stretch begins.
  CUTE_DEVICE void find() {
    int const warp = int(threadIdx.x) / 32;
    int const begin = min_of(int(threadIdx.x) * lengths.run, p.line.batch);
    CacheTiles<Traits> own(p, p.lengths);
    int const units = own.walk.units_of(begin, min_of(begin + lengths.run, p.line.batch));
    table.last[threadIdx.x] = own.walk.sequence;
    int const until = scan_of_warp(units);
    constexpr bool kKeepsTilesWhole = Traits::kIsLatent;
    int const others = kKeepsTilesWhole
                           ? int(__reduce_min_sync(kWholeWarp, unsigned(own.walk.fewest)))
                       : p.line.shared.is_shared ? scan_of_warp(own.walk.others)
                                                 : 0;
    int const most =
        kKeepsTilesWhole ? int(__reduce_max_sync(kWholeWarp, unsigned(own.walk.most))) : 0;
    if (lane_of_warp() == 31) {
      table.warp_units[warp] = until;
      table.warp_others[warp] = others;
      table.warp_most[warp] = most;
    }
    if (threadIdx.x == 0) {
      table.start.sequence = 0;
    }
    __syncthreads();
    int before = 0;
    int total = 0;
    int all_others = 0;
    CUTE_UNROLL
    for (int i = 0; i < Table::kWarps; ++i) {
      before = i == warp ? total : before;
      total = min_of(total + table.warp_units[i], kMostUnits + 1);
      if constexpr (kKeepsTilesWhole) {
        tiles.walk.fewest = min_of(tiles.walk.fewest, table.warp_others[i]);
        tiles.walk.most = max_of(tiles.walk.most, table.warp_most[i]);
      } else {
        all_others = min_of(all_others + table.warp_others[i], kMostUnits + 1);
      }
    }
    tiles.walk.take_stretch(total, int(blockIdx.x), other_units(p, float(all_others)));
    int const offset = tiles.walk.unit - (before + until - units);
    if (tiles.walk.valid() && offset >= 0 && offset < units) {
      bool const is_one_tile = lengths.run == 1 && units == own.walk.units * p.line.heads;
      table.start = {begin, tiles.walk.unit - offset, is_one_tile ? own.walk.units : 0,
                     own.walk.keys};
    }
    __syncthreads();
  }

  // Moves to the first part that find() found. Whole warps call begin() and next().
  CUTE_DEVICE void begin() {
    if (!tiles.walk.valid()) {
      return;
    }
    typename Table::Start const& start = table.start;
    if (lengths.run == 1) {
      tiles.walk.begin_at(start.sequence, start.unit);
      if (start.units > 0) {
        tiles.walk.begin_in(table.last[start.sequence], start.keys, start.units);
      }
    } else {
      tiles.start_within(start.sequence, min_of(lengths.run, p.line.batch - start.sequence),
                         start.unit);
    }
  }

  CUTE_DEVICE FwdWork<Traits> next() { return tiles.next(); }

  CUTE_DEVICE void wait() const {
    if (!p.is_second) {
      wait_for_earlier_launches();
    }
  }

  // Waits for earlier launches, then reads the lengths again. Returns whether they are unchanged
  // and reads_same() is true in every thread.
  template <class ReadsSame>
  CUTE_DEVICE bool confirm(ReadsSame const& reads_same) {
    wait();
    int const b = int(threadIdx.x);
    bool const is_same = reads_same();
    bool const has_same_lengths =
        b >= p.line.batch || cache_sequence(p.lengths, b) == table.last[b];
    return __syncthreads_and(is_same && has_same_lengths) != 0;
  }
};

}  // namespace fa3
