// Combines the parts of output tiles whose keys several CTAs share, in the order of their keys, in
// a launch after theirs. WHY not by the CTA that completes a tile, as in forward/output_parts.h: a
// row of a part has 2 KiB, and one multiprocessor would read them all.
#pragma once

#include "forward/output_parts.h"
#include "mla/traits.h"

namespace fa3 {

// Several parts of a row, four columns: O and the sum of weights, relative to 2^most.
struct PartSum {
  float most = -INFINITY;  // the largest LSE, base 2
  float sum = 0.f;
  float4 o = make_float4(0.f, 0.f, 0.f, 0.f);

  // Adds parts whose keys come after these. WHY fmaf: the compiler could fuse either of the two
  // multiplications, and not the same one everywhere.
  CUTE_DEVICE void add(PartSum const& later) {
    float const before = most;
    most = fmaxf(before, later.most);
    float const used = finite_max(most);
    float const factor = exp2_approx(before - used);
    float const weight = exp2_approx(later.most - used);
    sum = fmaf(later.sum, weight, sum * factor);
    o.x = fmaf(later.o.x, weight, o.x * factor);
    o.y = fmaf(later.o.y, weight, o.y * factor);
    o.z = fmaf(later.o.z, weight, o.z * factor);
    o.w = fmaf(later.o.w, weight, o.w * factor);
  }
};

// A CTA of kWarps warps. A warp has 128 columns of a row; or all warps have the same ones, and take
// turns at groups of parts.
//
// INVARIANT: the bits of a row depend on its parts alone. Each group of kAtOnce parts is summed up
// on its own, then the groups are added in their order, whichever warps have summed them up.
template <class Traits>
struct PartCombination {
  using Params = typename Traits::Params;
  using Work = FwdWork<Traits>;
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kCtasPerSm = 4;  // not tuned
  static constexpr int kColumns = 128;  // that a warp has
  static constexpr int kWarpsOfRow = Traits::kHeadDimV / kColumns;
  static constexpr int kAtOnce = 8;

  // Groups in shared memory at a time: those of a tile that 132 CTAs share are not more.
  static constexpr int kHeldGroups = 3 * kWarps;

  struct GroupSums {
    float4 o[kHeldGroups][32];
    float2 sums[kHeldGroups];  // most, sum
  };

  struct Storage {
    GroupSums groups[2];  // used in turn
    int tiles;
  };

  Params const& p;
  Storage& shared;
  int warp = int(threadIdx.x) / 32;
  int turn = 0;  // index in shared.groups

  CUTE_DEVICE void run() {
    wait_for_earlier_launches();
    allow_later_launches();
    int const tiles = count_tiles();
    int const rows = p.part_rows * kWarpsOfRow;  // each 128 columns
    int const groups = ceil_div(rows, kWarps);
    // Few rows have many parts.
    bool const are_few = tiles * groups <= int(gridDim.x) / 2;
    int const steps = are_few ? rows : groups;
    CUTE_NO_UNROLL
    for (int i = int(blockIdx.x); i < tiles * steps; i += int(gridDim.x)) {
      Work const& work = p.shared_tiles[i / steps];
      int const index = are_few ? i % steps : i % steps * kWarps + warp;
      int const row = index / kWarpsOfRow;
      // Rows that the sequence does not have were not written.
      if (!row_of_tile(p, work.rows, row).exists) {
        continue;
      }
      int const column = index % kWarpsOfRow * kColumns + 4 * lane_of_warp();
      KeyPart const part = work.location.part;
      PartSum const all =
          are_few ? sum_together(part, row, column, index) : sum_alone(part, row, column);
      if (!are_few || adds(index)) {
        write(work, row, column, all);
      }
    }
  }

 private:
  // The last CTA to read the number sets it back to 0.
  CUTE_DEVICE int count_tiles() {
    if (threadIdx.x == 0) {
      shared.tiles = read_now(&p.combine->tiles);
      if (add_in_order(&p.combine->ctas, 1) == int(gridDim.x) - 1) {
        *p.combine = CombineCounters{0, 0};
      }
    }
    __syncthreads();
    return shared.tiles;
  }

  CUTE_DEVICE static int groups_of(KeyPart const& part) { return ceil_div(part.parts, kAtOnce); }

  // The parts of a group.
  CUTE_DEVICE PartSum sum_of(KeyPart const& part, int row, int column, int group) const {
    int const begin = group * kAtOnce;
    float lses[kAtOnce];
    float4 values[kAtOnce];
    CUTE_UNROLL
    for (int j = 0; j < kAtOnce; ++j) {
      int const slot = part.slot_of(min_of(begin + j, part.parts - 1));
      int64_t const at = int64_t(slot) * p.part_rows + row;
      lses[j] = __ldcg(p.part_lses + at);
      values[j] =
          __ldcg(reinterpret_cast<float4 const*>(p.parts + at * Traits::kHeadDimV + column));
    }
    PartSum group_sum;
    CUTE_UNROLL
    for (int j = 0; j < kAtOnce; ++j) {
      lses[j] = begin + j < part.parts ? __fmul_rn(lses[j], kLog2E) : -INFINITY;
      group_sum.most = fmaxf(group_sum.most, lses[j]);
    }
    float const used = finite_max(group_sum.most);
    CUTE_UNROLL
    for (int j = 0; j < kAtOnce; ++j) {
      float const weight = exp2_approx(lses[j] - used);
      group_sum.sum += weight;
      add_four(group_sum.o, values[j], weight);
    }
    return group_sum;
  }

  CUTE_DEVICE PartSum sum_alone(KeyPart const& part, int row, int column) const {
    PartSum all;
    CUTE_NO_UNROLL
    for (int group = 0; group < groups_of(part); ++group) {
      all.add(sum_of(part, row, column, group));
    }
    return all;
  }

  // Whether this warp adds the groups that all have summed up.
  CUTE_DEVICE bool adds(int index) const { return warp == index % kWarps; }

  // The result is that of one warp.
  CUTE_DEVICE PartSum sum_together(KeyPart const& part, int row, int column, int index) {
    PartSum all;
    CUTE_NO_UNROLL
    for (int first = 0; first < groups_of(part); first += kHeldGroups) {
      int const count = min_of(groups_of(part) - first, kHeldGroups);
      GroupSums& held = shared.groups[turn];
      CUTE_NO_UNROLL
      for (int i = warp; i < count; i += kWarps) {
        PartSum const own = sum_of(part, row, column, first + i);
        held.o[i][lane_of_warp()] = own.o;
        held.sums[i] = make_float2(own.most, own.sum);
      }
      // After this all warps have also read the other buffer.
      __syncthreads();
#pragma unroll 4
      for (int i = 0; i < (adds(index) ? count : 0); ++i) {
        all.add(PartSum{held.sums[i].x, held.sums[i].y, held.o[i][lane_of_warp()]});
      }
      turn ^= 1;
    }
    return all;
  }

  CUTE_DEVICE void write(Work const& work, int r, int column, PartSum all) const {
    RowOfTile const row = row_of_tile(p, work.rows, r);
    float const sink = p.sinks != nullptr ? p.sinks[work.rows.head + row.head] : -INFINITY;
    float const of_sink = exp2_approx(sink * kLog2E - finite_max(all.most));
    float const lse = log_sum_exp(all.most, all.sum, kLn2);
    multiply_four(all.o, inverse_sum(all.sum + of_sink));
    auto const target = ResultRow<Traits>::of(p, work, row);
    target.write(column, all.o.x, all.o.y);
    target.write(column + 2, all.o.z, all.o.w);
    if (p.lse != nullptr && column == 0) {
      p.lse[index_of_row(p, work.rows, row)] = with_sink(lse, sink);
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(PartCombination<MlaTraits<Config>>::kThreads,
                                  PartCombination<MlaTraits<Config>>::kCtasPerSm)
    mla_combine_kernel(typename MlaTraits<Config>::Params const __grid_constant__ p) {
  using Combination = PartCombination<MlaTraits<Config>>;
  __shared__ typename Combination::Storage shared;
  Combination{p, shared}.run();
}

}  // namespace fa3
