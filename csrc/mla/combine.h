// Combines the parts of output tiles whose keys several CTAs share, in key order, in a launch that
// follows the attention kernel. WHY the CTA that completes a tile does not combine it, as in
// forward/cache/combine_parts.h: a row of a part has 2 KiB, and one SM would read all of them.
#pragma once

#include "forward/cache/parts.h"
#include "forward/cache/result_rows.h"
#include "mla/traits.h"

namespace fa3 {

// A CTA of kWarps warps combines 16 rows of a tile, the rows that one warp stored (parts.h). First
// all its threads read the LSEs of all parts; then each warp adds up its float4s, weighted. If
// there are few rows, all warps work on the same float4s and each adds up different groups of
// parts.
//
// INVARIANT: the bits of a row depend on its parts alone. Each group of kAtOnce parts is summed
// separately, then the group sums are added in order.
//
// WHY the code is small: most instructions run once, so instruction fetch takes most of the time.
template <class Traits>
struct PartCombination {
  using Params = typename Traits::Params;
  using Work = FwdWork<Traits>;
  using Parts = PartRows<Traits>;
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kCtasPerSm = 4;
  static constexpr int kAtOnce = 8;
  static constexpr int kMost = 256;  // parts whose LSEs fit in shared memory

  // The largest LSE, base 2, and the sum of 2^(LSE - largest).
  struct Ends {
    float most;
    float sum;
  };

  struct Storage {
    SharedTile<Work> tile;
    int tiles;
    float lses[kMost][kWarpRows];
    Ends ends[kWarps][kWarpRows];  // one per warp, of the LSEs it read
    float4 sums[kMost / kAtOnce][32];
  };

  Params const& p;
  Storage& shared;
  Work const& work;
  int block;  // index of the 16 rows
  int warp = int(threadIdx.x) / 32;
  bool fits;
  // LSEs, by (part, row): in shared memory if they fit, else in the buffer. INVARIANT: parts that
  // do not fit have consecutive slots. Only an even split has other slots, and it has at most one
  // part per CTA of a line, fewer than kMost.
  float const* lses;
  int lses_stride;
  bool has_ends = false;
  Ends ends[2];  // for the lane's two rows

  // How many float4s of a block one CTA combines: 1 or a multiple of kWarps. `all` counts the
  // float4s of the whole launch.
  static int fours_of_cta(int64_t all, int sms) {
    int fours = 1;
    while (fours < Parts::kFours && all > int64_t(fours) * kCtasPerSm * sms) {
      fours = fours == 1 ? kWarps : 2 * fours;
    }
    return fours;
  }

  // WHY the tile is read before it is known to exist: both reads then take one wait. WHY one warp
  // reads it: when all warps of all CTAs read the same line of L2, they take 10 us (H200,
  // 2026-11-27).
  CUTE_DEVICE static void run(Params const& p, Storage& shared) {
    wait_for_earlier_launches();
    allow_later_launches();
    int const fours = p.fours_of_cta;
    CUTE_NO_UNROLL
    for (int i = int(blockIdx.x);; i += int(gridDim.x)) {
      int const unit = p.ctas_of_block.div(i);
      int const tile = p.blocks.div(unit);
      int const lane = lane_of_warp();
      if (int(threadIdx.x) < SharedTile<Work>::kWords) {
        shared.tile.word(lane) = __ldcg(&p.shared_tiles[min_of(tile, p.slots - 1)].word(lane));
      } else if (threadIdx.x == 31) {
        shared.tiles = read_now(&p.combine->tiles);
      }
      __syncthreads();
      if (tile >= shared.tiles) {
        break;
      }
      PartCombination combination{p, shared, unit - tile * int(p.blocks.divisor)};
      combination.combine((i - unit * int(p.ctas_of_block.divisor)) * fours, fours);
      __syncthreads();
    }
    end(p);
  }

 private:
  CUTE_DEVICE PartCombination(Params const& p_, Storage& shared_, int block_)
      : p(p_), shared(shared_), work(shared.tile.work), block(block_) {
    fits = parts() <= kMost;
    lses = fits ? &shared.lses[0][0] : p.part_lses + row_in(work.location.part.first_slot);
    lses_stride = fits ? kWarpRows : p.part_rows;
  }

  // The last CTA to read the number of tiles resets the counters. WHY the last warp does it: the
  // ordered add waits for earlier stores of its thread, and often only the first warp stores.
  CUTE_DEVICE static void end(Params const& p) {
    if (threadIdx.x == kThreads - 1 && add_in_order(&p.combine->ctas, 1) == int(gridDim.x) - 1) {
      *p.combine = CombineCounters{0, 0};
    }
  }

  CUTE_DEVICE int parts() const { return work.location.part.parts; }
  CUTE_DEVICE int groups() const { return ceil_div(parts(), kAtOnce); }

  // Index of the first row of the block in the buffer of LSEs.
  CUTE_DEVICE int64_t row_in(int slot) const {
    return int64_t(slot) * p.part_rows + block * kWarpRows;
  }

  // Skips blocks without rows of the sequence, whose parts were not written.
  CUTE_DEVICE void combine(int first, int fours) {
    if (block * kWarpRows >= rows_of_tile(p, work.rows)) {
      return;
    }
    bool const is_together = fours < kWarps && fits;
    int const end = first + fours;
    int four = is_together ? first : first + warp;
    CUTE_NO_UNROLL
    do {
      float4 const sum =
          add_in_turn(min_of(four, end - 1), is_together ? warp : 0, is_together ? kWarps : 1);
      if (!is_together && four < end) {
        write(four, sum);
      }
      four += kWarps;
    } while (four < end);
    if (is_together) {
      __syncthreads();
      if (warp == 0) {
        write(first, sum_of_groups());
      }
    }
  }

  // Adds up every step-th group, starting at `group`. With step > 1 it also stores each group's
  // sum.
  CUTE_DEVICE float4 add_in_turn(int four, int group, int step) {
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    CUTE_NO_UNROLL
    do {
      float4 values[kAtOnce];
      load(values, group, four);
      if (!has_ends) {
        read_lses();
        has_ends = true;
      }
      float4 const group_sum = add(values, group);
      add_four(sum, group_sum, 1.f);
      if (step > 1 && group < groups()) {
        shared.sums[group][lane_of_warp()] = group_sum;
      }
      group += step;
    } while (group < groups());
    return sum;
  }

  // Loads one float4 of each part of a group, or 0 where there is no part.
  CUTE_DEVICE void load(float4 (&values)[kAtOnce], int group, int four) const {
    CUTE_UNROLL
    for (int j = 0; j < kAtOnce; ++j) {
      int const index = group * kAtOnce + j;
      Parts const part{p, work.location.part.slot_of(index)};
      values[j] = index < parts() ? __ldcg(part.fours(block, four) + lane_of_warp())
                                  : make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }

  CUTE_DEVICE float4 add(float4 const (&values)[kAtOnce], int group) const {
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    int const row = lane_of_warp() / 4;
    CUTE_UNROLL
    for (int j = 0; j < kAtOnce; ++j) {
      int const index = min_of(group * kAtOnce + j, parts() - 1);
      float const first = weight_of(index, row, ends[0]);
      float const second = weight_of(index, row + 8, ends[1]);
      sum = make_float4(fmaf(values[j].x, first, sum.x), fmaf(values[j].y, first, sum.y),
                        fmaf(values[j].z, second, sum.z), fmaf(values[j].w, second, sum.w));
    }
    return sum;
  }

  CUTE_DEVICE float4 sum_of_groups() const {
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
    for (int group = 0; group < groups(); ++group) {
      add_four(sum, shared.sums[group][lane_of_warp()], 1.f);
    }
    return sum;
  }

  CUTE_DEVICE float weight_of(int index, int row, Ends const& end) const {
    float const lse = __fmul_rn(lses[index * lses_stride + row], kLog2E);
    return exp2_approx(lse - finite_max(end.most));
  }

  template <int kCount>
  CUTE_DEVICE static Ends add(Ends const (&ends)[kCount]) {
    Ends all{ends[0].most, 0.f};
    CUTE_UNROLL
    for (int i = 1; i < kCount; ++i) {
      all.most = fmaxf(all.most, ends[i].most);
    }
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      all.sum = fmaf(ends[i].sum, exp2_approx(ends[i].most - finite_max(all.most)), all.sum);
    }
    return all;
  }

  // Sets `ends`. Each thread reads the LSEs of every 16th part of a row, kLoads at a time.
  CUTE_DEVICE void read_lses() {
    constexpr int kThreadsOfRow = kThreads / kWarpRows;
    constexpr int kLoads = 4;
    int const row = int(threadIdx.x) % kWarpRows;
    Ends own[1 + kLoads] = {{-INFINITY, 0.f}};
    CUTE_NO_UNROLL
    for (int begin = int(threadIdx.x) / kWarpRows; begin < parts();
         begin += kLoads * kThreadsOfRow) {
      float loaded[kLoads];
      CUTE_UNROLL
      for (int j = 0; j < kLoads; ++j) {
        int const i = begin + j * kThreadsOfRow;
        int const slot = work.location.part.slot_of(i);
        loaded[j] = i < parts() ? __ldcg(p.part_lses + row_in(slot) + row) : -INFINITY;
      }
      CUTE_UNROLL
      for (int j = 0; j < kLoads; ++j) {
        int const i = begin + j * kThreadsOfRow;
        if (i < parts() && fits) {
          shared.lses[i][row] = loaded[j];
        }
        own[1 + j] = Ends{__fmul_rn(loaded[j], kLog2E), 1.f};
      }
      own[0] = add(own);
    }
    own[1] = Ends{__shfl_xor_sync(kWholeWarp, own[0].most, kWarpRows),
                  __shfl_xor_sync(kWholeWarp, own[0].sum, kWarpRows)};
    if (lane_of_warp() < kWarpRows) {
      shared.ends[warp][row] = add<2>({own[0], own[1]});
    }
    __syncthreads();
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      Ends warp_ends[kWarps];
      CUTE_UNROLL
      for (int i = 0; i < kWarps; ++i) {
        warp_ends[i] = shared.ends[i][lane_of_warp() / 4 + 8 * r];
      }
      ends[r] = add(warp_ends);
    }
  }

  // Divides by the sum of the weights, including the sink, and writes O and the LSE.
  CUTE_DEVICE void write(int four, float4 const& sum) const {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      RowOfTile const row =
          row_of_tile(p, work.rows, block * kWarpRows + lane_of_warp() / 4 + 8 * r);
      if (!row.exists) {
        continue;
      }
      auto const [most, weights] = ends[r];
      float const sink = p.sinks != nullptr ? p.sinks[work.rows.head + row.head] : -INFINITY;
      float const sink_weight = exp2_approx(sink * kLog2E - finite_max(most));
      float const scale = inverse_sum(weights + sink_weight);
      ResultRow<Traits>::of(p, work, row)
          .write(8 * four + fragment_column(lane_of_warp()), scale * (r == 0 ? sum.x : sum.z),
                 scale * (r == 0 ? sum.y : sum.w));
      if (p.lse != nullptr && four == 0 && lane_of_warp() % 4 == 0) {
        float const lse = log_sum_exp(most, weights, kLn2);
        p.lse[index_of_row(p, work.rows, row)] = with_sink(lse, sink);
      }
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(PartCombination<MlaTraits<Config>>::kThreads,
                                  PartCombination<MlaTraits<Config>>::kCtasPerSm)
    mla_combine_kernel(typename MlaTraits<Config>::Params const __grid_constant__ p) {
  using Combination = PartCombination<MlaTraits<Config>>;
  __shared__ typename Combination::Storage shared;
  Combination::run(p, shared);
}

}  // namespace fa3
