// One CTA sorts the sequences by cost into buckets that are an eighth of a power of two wide. The
// order within a bucket is arbitrary; no result depends on it.
#include <cub/block/block_scan.cuh>

#include "device/barriers.h"
#include "launch/launch.h"
#include "schedule/prepare.h"

namespace fa3 {
namespace {

constexpr int kThreads = 1024;
constexpr int kBuckets = 256;  // 8 for each of 31 powers of two

using Scan = cub::BlockScan<int, kThreads>;

struct Shared {
  Scan::TempStorage scan;
  int next_index[kBuckets];
};

// A saturating sum of tiles. WHY: with invalid lengths sequences may overlap, and then there are
// more tiles than the table holds; their number may not even fit into an int.
struct SumWithin {
  int capacity;

  __device__ int operator()(int a, int b) const { return min_of(a + b, capacity); }
};

// Numbers the tiles of all threads. Returns how many tiles precede those of this thread, and adds
// the total to `before`.
__device__ int number_tiles_of(int tiles, SumWithin sum, Shared& shared, int& before) {
  int base;
  int all;
  Scan(shared.scan).ExclusiveScan(min_of(tiles, sum.capacity), base, 0, sum, all);
  __syncthreads();
  base = sum(base, before);
  before = sum(before, all);
  return base;
}

// The bucket of a cost; the largest costs come first.
__device__ int bucket_of(int cost) {
  int const power = 31 - __clz(max_of(cost, 1));
  int const eighth = power >= 3 ? (cost >> (power - 3)) & 7 : (cost << (3 - power)) & 7;
  return kBuckets - 1 - (8 * power + eighth);
}

__device__ Sequence entry_at(PrepareParams const& p, int b) {
  return entry_of(p.lengths, b, p.batch, p.total_q, p.total_k);
}

__device__ int bucket_at(PrepareParams const& p, Sequence const& entry, int b) {
  Sequence const s = scheduled_part(entry, b >= p.batch, p.schedules_keys());
  return bucket_of(p.schedules_keys() ? min_of(s.len.q, p.most_queries)
                                      : min_of(s.len.k, p.most_keys));
}

// Computes the first index of each bucket.
__device__ void count_buckets(PrepareParams const& p, Shared& shared) {
  int const thread = int(threadIdx.x);
  if (thread < kBuckets) {
    shared.next_index[thread] = 0;
  }
  __syncthreads();
  for (int b = thread; b < p.entries; b += kThreads) {
    atomicAdd(&shared.next_index[bucket_at(p, entry_at(p, b), b)], 1);
  }
  __syncthreads();
  int index = thread < kBuckets ? shared.next_index[thread] : 0;
  Scan(shared.scan).ExclusiveSum(index, index);
  __syncthreads();
  if (thread < kBuckets) {
    shared.next_index[thread] = index;
  }
  __syncthreads();
}

// Each warp writes the query tiles of its 32 sequences, one sequence at a time.
__device__ void fill_row_tiles(PrepareParams const& p, Sequence const& s, int base) {
  int const lane = int(threadIdx.x) % 32;
  for (int i = 0; i < 32; ++i) {
    int const one_base = __shfl_sync(0xffffffffu, base, i);
    int const row = __shfl_sync(0xffffffffu, s.q_begin, i);
    int const rows = __shfl_sync(0xffffffffu, s.len.q, i);
    for (int m = lane; m < ceil_div(rows, p.tile_positions); m += 32) {
      int const first = m * p.tile_positions;
      p.tables.row_tiles[one_base + m] =
          RowTile{row + first, min_of(p.tile_positions, rows - first)};
    }
  }
}

// Returns the index of the first query tile of this thread's sequence. INVARIANT: no tile is
// outside the workspaces.
__device__ int number_row_tiles(PrepareParams const& p, Shared& shared, Sequence& s, int& before) {
  int const capacity = p.tables.row_tile_count;
  int const tiles = ceil_div(s.len.q, p.tile_positions);
  int const base = number_tiles_of(tiles, SumWithin{capacity}, shared, before);
  s = clip_to_capacity(s, capacity - base, p.tile_positions);
  fill_row_tiles(p, s, base);
  return base;
}

__device__ void sort_sequences(PrepareParams const& p, Shared& shared) {
  int const thread = int(threadIdx.x);
  int before = 0;
  for (int first = 0; first < p.entries; first += kThreads) {
    int const b = first + thread;
    Sequence s = b < p.entries ? entry_at(p, b) : Sequence{0, 0, SeqlenPair{0, 0}};
    int const bucket = bucket_at(p, s, b);
    int const base = p.schedules_keys() ? number_row_tiles(p, shared, s, before) : 0;
    if (b < p.entries) {
      s = scheduled_part(s, b >= p.batch, p.schedules_keys());
      int const tiles =
          p.schedules_keys() ? ceil_div(s.len.k, p.tile_keys) : ceil_div(s.len.q, p.tile_positions);
      int const index = atomicAdd(&shared.next_index[bucket], 1);
      p.tables.sequences[index] = SequenceTiles{s, 0, tiles, base, b};
    }
  }
  for (int m = before + thread; m < p.tables.row_tile_count; m += kThreads) {
    p.tables.row_tiles[m] = RowTile{0, 0};
  }
  __syncthreads();
}

// Each warp writes the tiles of its 32 sequences, one sequence at a time.
__device__ void fill_table(PrepareParams const& p, int index, int base, int tiles) {
  int const lane = int(threadIdx.x) % 32;
  for (int i = 0; i < 32; ++i) {
    int const one_base = __shfl_sync(0xffffffffu, base, i);
    int const one_end = min_of(one_base + __shfl_sync(0xffffffffu, tiles, i), p.tables.tiles);
    for (int tile = one_base + lane; tile < one_end; tile += 32) {
      p.tables.sequence_of_tile[tile] = index - lane + i;
    }
  }
}

__device__ void number_tiles(PrepareParams const& p, Shared& shared) {
  int before = 0;
  for (int first = 0; first < p.entries; first += kThreads) {
    int const index = first + int(threadIdx.x);
    int const tiles = index < p.entries ? p.tables.sequences[index].tiles : 0;
    int const base = number_tiles_of(tiles, SumWithin{p.tables.tiles}, shared, before);
    if (index < p.entries) {
      p.tables.sequences[index].tile_base = base;
    }
    fill_table(p, index, base, tiles);
  }
  for (int tile = before + int(threadIdx.x); tile < p.tables.tiles; tile += kThreads) {
    p.tables.sequence_of_tile[tile] = PackedTables::kNoTile;
  }
}

__global__ void __launch_bounds__(kThreads)
    prepare_kernel(PrepareParams const __grid_constant__ p) {
  __shared__ Shared shared;
  wait_for_earlier_launches();
  count_buckets(p, shared);
  sort_sequences(p, shared);
  number_tiles(p, shared);
  if (threadIdx.x == 0) {
    p.tables.header[PackedTables::kTicket] = 0;
  }
  allow_later_launches();
}

}  // namespace

void launch_prepare(PrepareParams const& params, void* stream) {
  bind_thread("prepare", 1, 0);
  launch_early(prepare_kernel, LaunchShape{"prepare", 1, kThreads, 0}, params, stream);
}

}  // namespace fa3
