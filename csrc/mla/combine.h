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

  // Adds others, each relative to 2^lse; -inf: none.
  template <int kCount>
  CUTE_DEVICE void add(float const (&lses)[kCount], float const (&sums)[kCount],
                       float4 const (&values)[kCount]) {
    float const before = most;
    CUTE_UNROLL
    for (int j = 0; j < kCount; ++j) {
      most = fmaxf(most, lses[j]);
    }
    float const used = finite_max(most);
    scale(exp2_approx(before - used));
    CUTE_UNROLL
    for (int j = 0; j < kCount; ++j) {
      float const weight = exp2_approx(lses[j] - used);
      sum += weight * sums[j];
      add_four(o, values[j], weight);
    }
  }

  CUTE_DEVICE void scale(float factor) {
    sum *= factor;
    multiply_four(o, factor);
  }
};

// A CTA of kWarps warps. A warp has 128 columns of a row; or all warps have the same ones, and each
// has its share of the parts.
template <class Traits>
struct PartCombination {
  using Params = typename Traits::Params;
  using Work = FwdWork<Traits>;
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kColumns = 128;  // that a warp has
  static constexpr int kWarpsOfRow = Traits::kHeadDimV / kColumns;
  static constexpr int kAtOnce = 8;

  struct Storage {
    float4 o[kWarps][32];
    float2 sums[kWarps];  // most, sum
    int tiles;
  };

  Params const& p;
  Storage& shared;
  int warp = int(threadIdx.x) / 32;
  int lane = int(threadIdx.x) % 32;

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
      if (are_few) {
        combine_together(work, i % steps);
      } else {
        combine_alone(work, i % steps * kWarps + warp);
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

  // The parts [begin, end) in the order of their keys.
  CUTE_DEVICE PartSum sum_of(KeyPart const& part, int row, int column, int begin, int end) const {
    PartSum all;
    CUTE_NO_UNROLL
    for (; begin < end; begin += kAtOnce) {
      float lses[kAtOnce];
      float sums[kAtOnce];
      float4 values[kAtOnce];
      CUTE_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        int const slot = part.slot_of(min_of(begin + j, end - 1));
        int64_t const at = int64_t(slot) * p.part_rows + row;
        lses[j] = __ldcg(p.part_lses + at);
        values[j] =
            __ldcg(reinterpret_cast<float4 const*>(p.parts + at * Traits::kHeadDimV + column));
      }
      CUTE_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        lses[j] = begin + j < end ? lses[j] * kLog2E : -INFINITY;
        sums[j] = 1.f;
      }
      all.add(lses, sums, values);
    }
    return all;
  }

  CUTE_DEVICE void write(Work const& work, int r, int column, PartSum all) const {
    RowOfTile const row = row_of_tile(p, work.rows, r);
    float const sink = p.sinks != nullptr ? p.sinks[work.rows.head + row.head] : -INFINITY;
    float const of_sink = exp2_approx(sink * kLog2E - finite_max(all.most));
    float const lse = log_sum_exp(all.most, all.sum, kLn2);
    all.scale(inverse_sum(all.sum + of_sink));
    auto const target = ResultRow<Traits>::of(p, work, row);
    target.write(column, all.o.x, all.o.y);
    target.write(column + 2, all.o.z, all.o.w);
    if (p.lse != nullptr && column == 0) {
      p.lse[index_of_row(p, work.rows, row)] = with_sink(lse, sink);
    }
  }

  // Rows that the sequence does not have were not written.
  CUTE_DEVICE bool has_row(Work const& work, int row) const {
    return row_of_tile(p, work.rows, row).exists;
  }

  CUTE_DEVICE void combine_alone(Work const& work, int index) {
    int const row = index / kWarpsOfRow;
    if (has_row(work, row)) {
      int const column = index % kWarpsOfRow * kColumns + 4 * lane;
      write(work, row, column,
            sum_of(work.location.part, row, column, 0, work.location.part.parts));
    }
  }

  CUTE_DEVICE void combine_together(Work const& work, int index) {
    int const row = index / kWarpsOfRow;
    if (!has_row(work, row)) {
      return;
    }
    int const column = index % kWarpsOfRow * kColumns + 4 * lane;
    int const parts = work.location.part.parts;
    int const share = ceil_div(parts, kWarps);
    PartSum const own =
        sum_of(work.location.part, row, column, warp * share, min_of(parts, (warp + 1) * share));
    __syncthreads();  // `shared` has been read
    shared.o[warp][lane] = own.o;
    shared.sums[warp] = make_float2(own.most, own.sum);
    __syncthreads();
    if (warp == index % kWarps) {
      PartSum all;
      float lses[kWarps];
      float sums[kWarps];
      float4 values[kWarps];
      CUTE_UNROLL
      for (int j = 0; j < kWarps; ++j) {
        lses[j] = shared.sums[j].x;
        sums[j] = shared.sums[j].y;
        values[j] = shared.o[j][lane];
      }
      all.add(lses, sums, values);
      write(work, row, column, all);
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(PartCombination<MlaTraits<Config>>::kThreads)
    mla_combine_kernel(typename MlaTraits<Config>::Params const __grid_constant__ p) {
  using Combination = PartCombination<MlaTraits<Config>>;
  __shared__ typename Combination::Storage shared;
  Combination{p, shared}.run();
}

}  // namespace fa3
