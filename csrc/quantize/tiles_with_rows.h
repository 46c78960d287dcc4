// Packed sequences in clusters: the tiles with rows, without the numbers between sequences that no
// rows have, so that clusters get equal shares. Nobody knows the lengths at the launch.
#pragma once

#include "quantize/cluster_maximum.h"
#include "quantize/rows.h"

namespace fa3 {

// The rows that a CTA has of a tile of its team. number: of the tile, below 0 if the team has none.
struct TeamTile {
  QuantizeTile rows;
  int number;
  ClusterPlace team;
};

// Whole warps call its functions. Nonsense in cu_seqlens gives any tiles.
class TilesWithRows {
  QuantizeParams const& p_;
  QuantizeShape const& s_;
  int const* const cu_;

  // Of the entry of this lane, of 32 from `first` on.
  CUTE_DEVICE EntryTiles tiles_of_lane(int first) const {
    int const entry = first + int(threadIdx.x) % 32;
    return entry <= s_.batch ? tiles_of_entry(s_, cu_, entry) : EntryTiles{0, 0};
  }

 public:
  CUTE_DEVICE explicit TilesWithRows(QuantizeParams const& p)
      : p_(p), s_(p.shape), cu_(p.cu_seqlens) {}

  CUTE_DEVICE Bundles count() const {
    int64_t before_last = 0;
    int last[kTeamSizes] = {};
#pragma unroll 1
    for (int first = -1; first <= s_.batch; first += 32) {
      EntryTiles const own = tiles_of_lane(first);
      int const own_size = own.last_rows > 0 ? team_size_for(p_.team_sizes, own.last_rows) : -1;
      before_last += __reduce_add_sync(0xffffffffu, unsigned(own.before_last));
      CUTE_UNROLL
      for (int size = 0; size < kTeamSizes; ++size) {
        last[size] += __popc(__ballot_sync(0xffffffffu, own_size == size));
      }
    }
    int64_t const with_full = before_last + last[0];
    last[0] = int(with_full < s_.tiles() ? with_full : s_.tiles());
    return Bundles::of(p_.team_sizes, last);
  }

  // Of the CTA of this rank in a cluster.
  CUTE_DEVICE TeamTile find(Bundles const& bundles, int bundle, int rank) const {
    TeamPlace const place = team_place(p_.team_sizes, bundles, bundle, rank);
    if (place.tile < 0) {
      return TeamTile{{}, -1, {}};
    }
    auto const [entry, number] = find_tile(place.tile, place.size);
    QuantizeTile const tile = packed_tile(s_, cu_, p_.seqused, number, entry);
    return TeamTile{part_of(tile, place.rank, p_.cta_rows), number,
                    ClusterPlace{place.rank, p_.team_sizes[place.size].ctas, place.begin}};
  }

  // Writes 1 to the scales of numbers that no rows have. The threads of the grid share the entries.
  CUTE_DEVICE void write_ones(float* scales) const {
    int const places = int(s_.places(s_.tile));
    int const threads = int(gridDim.x * blockDim.x);
#pragma unroll 1
    for (int entry = int(blockIdx.x * blockDim.x + threadIdx.x) - 1; entry <= s_.batch;
         entry += threads) {
      EntryTiles const tiles = tiles_of_entry(s_, cu_, entry);
      int number = first_tile(s_, cu_, entry) + tiles.before_last + (tiles.last_rows > 0);
      int const end = entry < s_.batch ? first_tile(s_, cu_, entry + 1) : places + 1;
      for (number = max_of(number, 1); number < min_of(end, places + 1); ++number) {
        for (int head = 0; head < s_.heads; ++head) {
          scales[int64_t(head) * places + number - 1] = 1.f;
        }
      }
    }
  }

 private:
  struct Found {
    int entry;
    int number;
  };

  // place: among the tiles for teams of this size, less than their number.
  CUTE_DEVICE Found find_tile(int place, int size) const {
#pragma unroll 1
    for (int first = -1;; first += 32) {
      Interval const own = tiles_for_teams(p_.team_sizes, tiles_of_lane(first), size);
      int behind = own.end - own.begin;  // of this lane and those before it
      CUTE_UNROLL
      for (int distance = 1; distance < 32; distance *= 2) {
        int const other = __shfl_up_sync(0xffffffffu, behind, distance);
        behind += int(threadIdx.x) % 32 >= distance ? other : 0;
      }
      unsigned const is_there = __ballot_sync(0xffffffffu, place < behind);
      if (is_there != 0 || first + 32 > s_.batch) {
        int const lane = is_there != 0 ? __ffs(is_there) - 1 : 31;
        int const entry = min_of(first + lane, s_.batch);
        int const before = __shfl_sync(0xffffffffu, behind - own.end, lane);
        return Found{entry, max_of(first_tile(s_, cu_, entry) + place - before, 0)};
      }
      place -= __shfl_sync(0xffffffffu, behind, 31);
    }
  }
};

// What a CTA has to do, in shared memory: items, each a bundle and a head.
class TeamTiles {
  Bundles bundles_;
  int least_items_;  // of a cluster; the first `more_items_` have one more
  int more_items_;
  int first_found_;                // bundle
  TeamTile found_[kMostCtaWarps];  // that one and those behind it, one a warp
  int64_t head_step_;

 public:
  ClusterPlace team;  // of now

  // The cluster meets here.
  CUTE_DEVICE void share_out(QuantizeParams const& p) {
    TilesWithRows const tiles(p);
    if (threadIdx.x < 32) {
      Bundles const bundles = tiles.count();
      int const items = bundles.count() * p.shape.heads;
      if (threadIdx.x == 0) {
        bundles_ = bundles;
        least_items_ = p.by_clusters.div(items);
        more_items_ = p.by_clusters.mod(items);
        first_found_ = -kMostCtaWarps;
        head_step_ = p.head_step;
      }
      __syncwarp();
    }
    tiles.write_ones(p.scales);
    cute::cluster_wait();
    __syncthreads();
  }

  CUTE_DEVICE int first_item(int cluster) const {
    return cluster * least_items_ + min_of(cluster, more_items_);
  }

  // This CTA's part of a bundle; no earlier one is asked for again. Warps find one each, so that
  // few are waited for. All threads call it, behind a barrier.
  CUTE_DEVICE TeamTile find(QuantizeParams const& p, int bundle) {
    int const place = bundle - first_found_;
    if (place < int(blockDim.x) / 32) {
      return found_[place];
    }
    int const warp = int(threadIdx.x) / 32;
    TeamTile const own = TilesWithRows(p).find(bundles_, bundle + warp, cluster_rank());
    if (threadIdx.x % 32 == 0) {
      found_[warp] = own;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      first_found_ = bundle;
    }
    return found_[0];
  }

  // WHY from memory each time: head dim 128 has no registers for it.
  CUTE_DEVICE int64_t head_step() const {
    return *static_cast<int64_t const volatile*>(&head_step_);
  }
};

}  // namespace fa3
