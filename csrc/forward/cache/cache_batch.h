// BatchKind::kCache: the tiles of a CTA on a cache, as parts of a line of K tiles
// (core/cache_keys.h). A warp computes them: its lanes sum up the sequences together, then all
// lanes have the same state.
#pragma once

#include "core/cache_keys.h"
#include "device/math.h"
#include "forward/work.h"

namespace fa3 {

// The sum over this lane and those before it; more than kMostUnits count as one more.
CUTE_DEVICE int scan_of_warp(int x) {
  CUTE_UNROLL
  for (int distance = 1; distance < 32; distance *= 2) {
    int const before = __shfl_up_sync(kWholeWarp, x, distance);
    x = lane_of_warp() >= distance ? min_of(x + before, kMostUnits + 1) : x;
  }
  return x;
}

// The value that a lane has, for all lanes.
template <class T>
CUTE_DEVICE T of_lane(T const& x, int lane) {
  static_assert(sizeof(T) % sizeof(int) == 0);
  T y;
  CUTE_UNROLL
  for (int i = 0; i < int(sizeof(T) / sizeof(int)); ++i) {
    reinterpret_cast<int*>(&y)[i] =
        __shfl_sync(kWholeWarp, reinterpret_cast<int const*>(&x)[i], lane);
  }
  return y;
}

// Units of the other launch (SharedCall), from those per head.
CUTE_DEVICE float other_units(CacheDeviceParams const& p, float of_head) {
  return of_head * float(p.line.heads * int(p.line.lanes.divisor));
}

template <class Traits, class Lengths = CacheLengths const&>
struct CacheTiles {
  using Work = FwdWork<Traits>;
  using Mask = decltype(mask_of<Traits::kKind.mask>(IntervalMask{}));
  static constexpr LineKind kLine =
      Traits::kKind.is_latent ? LineKind::kWholeTiles : LineKind::kSharedCall;

  CacheDeviceParams const& p;
  CacheWalk<Mask, Lengths, kLine, Traits::kMayFold> walk;
  static constexpr int kMostKnown = 2 * 32;
  // This lane's sequences, the last one first; with more than kMostKnown they are not complete.
  CacheSequence known[2] = {};

  CUTE_DEVICE CacheTiles(CacheDeviceParams const& p_, Lengths lengths)
      : p(p_), walk(p_.line, lengths, mask_of<Traits::kKind.mask>(p_.mask), Traits::kTileN) {}

  // Reads the lengths and finds the CTA's stretch. Whole warps call this and the rest.
  CUTE_DEVICE void start() {
    Chunk chunk{0, p.line.batch, 0, false};
    walk.others = 0;
    walk.fewest = kMostUnits;
    walk.most = 0;
    int units_of_lane;
    int lane = 0;
    do {
      units_of_lane = units_in(chunk);
      int const until = scan_of_warp(units_of_lane);
      if (!chunk.is_narrowed) {
        take_stretch(__shfl_sync(kWholeWarp, until, 31));
      }
      chunk.is_narrowed = true;
      if (walk.valid()) {
        lane = narrow(chunk, units_of_lane, until);
      }
    } while (walk.valid() && chunk.sequences > 1);
    if (walk.valid()) {
      begin_in(chunk, units_of_lane, lane);
    }
  }

  // As start(), for a CTA whose stretch is known and begins in one of `sequences` sequences from
  // `begin` on. before: units of the line before them.
  CUTE_DEVICE void start_within(int begin, int sequences, int before) {
    Chunk chunk{begin, sequences, before, true};
    while (chunk.sequences > 1) {
      int const units_of_lane = units_in(chunk);
      narrow(chunk, units_of_lane, scan_of_warp(units_of_lane));
    }
    walk.begin_at(chunk.begin, chunk.before);
  }

  // Whether start() would read the same lengths now. False with more than kMostKnown sequences.
  CUTE_DEVICE bool is_current() const {
    if (p.line.batch > kMostKnown) {
      return false;
    }
    int const of_lane = ceil_div(p.line.batch, 32);
    int const b = lane_of_warp() * of_lane;
    int const end = min_of(b + of_lane, p.line.batch);
    bool const is_same = b >= end || (cache_sequence(p.lengths, end - 1) == known[0] &&
                                      (end - b == 1 || cache_sequence(p.lengths, b) == known[1]));
    return __all_sync(kWholeWarp, is_same);
  }

  CUTE_DEVICE Work next() { return walk.next() ? current() : no_tile<Traits>(); }

 private:
  // Sequences, and the units before them.
  struct Chunk {
    int begin;
    int sequences;
    int before;
    bool is_narrowed;  // from all sequences

    CUTE_DEVICE int of_lane() const { return ceil_div(sequences, 32); }
  };

  CUTE_DEVICE void take_stretch(int units_of_line) {
    float others = 0.f;
    if constexpr (kLine == LineKind::kSharedCall) {
      others = p.line.shared.is_shared ? sum_over_lanes<32>(float(walk.others)) : 0.f;
    } else {
      walk.fewest = int(__reduce_min_sync(kWholeWarp, unsigned(walk.fewest)));
      walk.most = int(__reduce_max_sync(kWholeWarp, unsigned(walk.most)));
    }
    walk.take_stretch(units_of_line, ColumnsOf<Traits>::own_cta(), other_units(p, others));
  }

  // Begins in the only sequence of `chunk`, the last one that the lane has read.
  CUTE_DEVICE void begin_in(Chunk const& chunk, int units_of_lane, int lane) {
    if constexpr (kLine == LineKind::kSharedCall) {
      walk.begin_at(chunk.begin, chunk.before);
    } else {
      CacheSequence const sequence = of_lane(walk.sequence, lane);
      BlockRange const keys = of_lane(walk.keys, lane);
      int const units = __shfl_sync(kWholeWarp, walk.units, lane);
      walk.begin_at(chunk.begin, chunk.before);
      if (__shfl_sync(kWholeWarp, units_of_lane, lane) == units * p.line.heads) {
        walk.begin_in(sequence, keys, units);
      }
    }
  }

  CUTE_DEVICE int units_in(Chunk const& chunk) {
    int const begin = min_of(lane_of_warp() * chunk.of_lane(), chunk.sequences);
    int const end = min_of(begin + chunk.of_lane(), chunk.sequences);
    int sum = 0;
    CUTE_NO_UNROLL
    for (int b = chunk.begin + begin; b < chunk.begin + end; ++b) {
      sum = min_of(sum + walk.units_of(b, b + 1), kMostUnits + 1);
      if (!chunk.is_narrowed) {
        known[1] = known[0];
        known[0] = walk.sequence;
      }
    }
    return sum;
  }

  // To the share of the lane that has the first unit of the stretch. Returns the lane.
  CUTE_DEVICE int narrow(Chunk& chunk, int units_of_lane, int until) const {
    uint32_t const after = __ballot_sync(kWholeWarp, chunk.before + until > walk.unit);
    int const lane = __ffs(int(after)) - 1;
    chunk.before += __shfl_sync(kWholeWarp, until - units_of_lane, lane);
    int const first = lane * chunk.of_lane();
    chunk.sequences = min_of(chunk.of_lane(), chunk.sequences - first);
    chunk.begin += first;
    return lane;
  }

  CUTE_DEVICE Work current() const {
    Work work;
    work.location = CacheLocation::of(walk.sequence, walk.b, p.has_packed_queries());
    work.location.part = walk.part;
    int const positions = Traits::kWarpgroups * p.positions_per_warpgroup;
    work.position_begin = walk.m * positions;
    work.rows.head = walk.head * int(p.pack.divisor);
    work.rows.left = walk.sequence.len.q - work.position_begin;
    int64_t const first_row =
        p.has_packed_queries() ? walk.sequence.q_begin : int64_t(walk.b) * p.lse_heads * p.seqlen.q;
    work.rows.offset = first_row + int64_t(work.rows.head) * p.seqlen.q + work.position_begin;
    work.kv_head = p.groups_per_kv_head.div(walk.head);
    work.entry = walk.b;
    work.skipped = SkippedTiles{0, 0};
    work.keys = walk.keys;
    work.keys.end = work.keys.begin + work.location.part.end;
    work.keys.begin += work.location.part.begin;
    return work;
  }
};

// The share of a warpgroup, of a part.
template <class Traits>
CUTE_DEVICE FwdWork<Traits> share_of_part(CacheDeviceParams const& p, FwdWork<Traits> const& part,
                                          int warpgroup) {
  // The free K tiles of one warpgroup are those of the tile.
  FwdWork<Traits> work =
      Traits::kWarpgroups == 1 ? part : share_of_warpgroup<Traits>(p, part, warpgroup);
  if (p.tree != nullptr) {  // only keys before the tree are visible to all
    SeqlenPair const len = work.location.len;
    int const before = work.location.slot + max_of(0, len.k - len.q);
    work.keys.free_end = min_of(work.keys.free_end, before / Traits::kTileN);
  }
  work.keys.free_begin = max_of(work.keys.free_begin, work.keys.begin);
  work.keys.free_end = max_of(work.keys.free_end, work.keys.begin);
  return work;
}

}  // namespace fa3
