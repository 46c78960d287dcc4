// Combines partial results on a cache (parts.h). The warpgroup that completes the last part of its
// rows combines them, in key order; more than 16 parts first in groups (parts_of_group).
#pragma once

#include "device/barriers.h"
#include "device/flags.h"
#include "forward/cache/parts.h"
#include "forward/cache/result_rows.h"
#include "forward/folded_parts.h"

namespace fa3 {

// Threads that store and combine the same rows. flag: a word of shared memory of this group.
struct PartGroup {
  int thread;
  int threads;
  NamedBarrier barrier;
  int* flag;

  CUTE_DEVICE void sync() const { named_sync(barrier, threads); }

  // Whether this group is the last of `count` to get here, whose results are then visible to it.
  // The counter is 0 again after the last.
  CUTE_DEVICE bool completes(int* counter, int count) const {
    sync();
    if (thread == 0) {
      bool const is_last = add_in_order(counter, 1) == count - 1;
      if (is_last) {
        *counter = 0;
      }
      *flag = is_last;
    }
    sync();
    return *flag != 0;
  }
};

// Parts of an output tile: the parts first, first + stride, ..., `count` of them.
struct PartList {
  int first;
  int stride;
  int count;
};

// Factors that turn the maximum of a part into a base-2 exponent and into a natural-log LSE.
// Converted scores are scaled per sequence and head, so their maxima are already in base 2.
struct MaximumScale {
  float log2;
  float natural;

  template <class Traits>
  CUTE_DEVICE static MaximumScale of(CacheDeviceParams const& p) {
    if (Traits::kMayFold && p.folds) {
      return Traits::kConverts ? MaximumScale{1.f, kLn2}
                               : MaximumScale{p.scale_log2, p.softmax_scale};
    }
    return MaximumScale{kLog2E, 1.f};  // the maxima are LSEs
  }
};

// Combines parts: folds them in order, with the bits of PartTotal. A part that is divided by its
// sum has an LSE in place of its maximum, and sum 1. A warp takes 32 columns of 16 rows at a time,
// in the register order of the parts.
template <class Traits>
struct PartCombiner {
  static constexpr int kFours = 4;                                 // float4s of a lane
  static constexpr int kUnits = Traits::kHeadDimV / (8 * kFours);  // per 16 rows
  static constexpr int kAtOnce = Traits::kHeadDimV > 128 ? 1 : 2;  // more: spills in the K loop
  static_assert(Traits::kHeadDimV % (8 * kFours) == 0);
  using Columns = decltype(cute::make_tensor<float>(
      cute::Layout<
          cute::Shape<cute::Shape<cute::_2, cute::_2, cute::Int<kFours>>, cute::_1, cute::_1>>{}));

  // O, and the maximum and sum of a lane's two rows.
  struct Part {
    float most[2];
    float sum[2];
    Columns o;
  };

  CacheDeviceParams const& p;
  FwdWork<Traits> const& work;
  int first_warp;  // the warpgroup's first warp, counted in the tile
  PartList parts;
  float const* maxima;  // by row; LSEs where parts are not folded

  // is_final: into the result; else into the buffer of the first part, with an LSE of the group.
  CUTE_DEVICE void run(PartGroup const& group, bool is_final) const {
    int const blocks = ceil_div(rows_of_tile(p, work.rows), kWarpRows);
    CUTE_NO_UNROLL
    for (int i = group.thread / 32; i < blocks * kUnits; i += group.threads / 32) {
      int const block = i / kUnits;
      int const unit = i % kUnits;
      Part total = combined(block, unit);
      is_final ? write(block, unit, total) : store(block, unit, total);
    }
  }

 private:
  CUTE_DEVICE bool folds() const { return Traits::kMayFold && p.folds; }

  // Whether this lane's first row exists. If so, parts hold both of its rows.
  CUTE_DEVICE bool has_row(int block) const {
    return fragment_row(32 * block + lane_of_warp()) < rows_of_tile(p, work.rows);
  }

  CUTE_DEVICE PartRows<Traits> rows_of(int i) const {
    return PartRows<Traits>{
        p, slot_of_part<Traits>(work.location.part, parts.first + i * parts.stride)};
  }

  // The first of this lane's two rows in the buffers of values per row.
  CUTE_DEVICE static int64_t row_of_lane(PartRows<Traits> const& rows, int warp) {
    return rows.first_row(warp) + lane_of_warp() / 4;
  }

  // The total begins with the first part. A lane without a row loads nothing.
  CUTE_DEVICE Part combined(int block, int unit) const {
    MaximumScale const scale = MaximumScale::of<Traits>(p);
    Part total{{-INFINITY, -INFINITY}, {0.f, 0.f}};
    cute::clear(total.o);
    if (!has_row(block)) {
      return total;
    }
    load(total, 0, block, unit);
    CUTE_NO_UNROLL
    for (int begin = 1; begin < parts.count; begin += kAtOnce) {
      Part next[kAtOnce];
      CUTE_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        load(next[j], min_of(begin + j, parts.count - 1), block, unit);
      }
      CUTE_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        if (begin + j < parts.count) {
          fold(total, next[j], scale.log2);
        }
      }
    }
    return total;
  }

  CUTE_DEVICE void load(Part& part, int i, int block, int unit) const {
    PartRows<Traits> const rows = rows_of(i);
    int64_t const row = row_of_lane(rows, first_warp + block);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      part.most[r] = __ldcg(maxima + row + rows.half() * r);
      part.sum[r] = folds() ? __ldcg(p.group_lses + row + rows.half() * r) : 1.f;
    }
    auto fours = cute::recast<float4>(part.o);
    CUTE_UNROLL
    for (int n = 0; n < kFours; ++n) {
      fours(n) = __ldcg(rows.fours(first_warp + block, kFours * unit + n) + lane_of_warp());
    }
  }

  CUTE_DEVICE static void fold(Part& total, Part const& next, float scale_log2) {
    auto sums = rows_view(total.o);
    auto const values = rows_view(next.o);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      FoldFactors const factors = FoldFactors::of(total.most[r], next.most[r], scale_log2);
      total.most[r] = factors.most;
      total.sum[r] = factors.fold(total.sum[r], next.sum[r]);
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(sums); ++c) {
        sums(r, c) = factors.fold(sums(r, c), values(r, c));
      }
    }
  }

  // Writes the result. A row without a visible key is 0, whatever V holds.
  CUTE_DEVICE void write(int block, int unit, Part& total) const {
    MaximumScale const scale = MaximumScale::of<Traits>(p);
    int const thread = 32 * block + lane_of_warp();
    float factors[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      RowOfTile const row = row_of_tile(p, work.rows, fragment_row(thread) + 8 * r);
      float const sink =
          p.sinks != nullptr && row.exists ? p.sinks[work.rows.head + row.head] : -INFINITY;
      float const of_sink = exp2_approx(sink * kLog2E - finite_max(total.most[r]) * scale.log2);
      factors[r] = inverse_sum(total.sum[r] + of_sink);
      if (p.lse != nullptr && row.exists && unit == 0 && thread % 4 == 0) {
        p.lse[index_of_row(p, work.rows, row)] =
            with_sink(log_sum_exp(total.most[r], total.sum[r], scale.natural), sink);
      }
    }
    auto output = rows_view(total.o);
    CUTE_UNROLL
    for (int c = 0; c < cute::size<1>(output); ++c) {
      output(0, c) = total.sum[0] == 0.f ? 0.f : output(0, c) * factors[0];
      output(1, c) = total.sum[1] == 0.f ? 0.f : output(1, c) * factors[1];
    }
    ResultColumns<Traits>{p, work, thread, 8 * kFours * unit}.write(total.o);
  }

  // Stores a group of parts in place of its first one, with its LSEs.
  CUTE_DEVICE void store(int block, int unit, Part& total) const {
    if (!has_row(block)) {
      return;
    }
    PartRows<Traits> const rows = rows_of(0);
    multiply_rows(total.o, {inverse_sum(total.sum[0]), inverse_sum(total.sum[1])});
    auto const fours = cute::recast<float4>(total.o);
    CUTE_UNROLL
    for (int n = 0; n < kFours; ++n) {
      rows.fours(first_warp + block, kFours * unit + n)[lane_of_warp()] = fours(n);
    }
    int const r = lane_of_warp() % 4;
    if (unit == 0 && r < 2) {
      p.group_lses[row_of_lane(rows, first_warp + block) + rows.half() * r] = log_sum_exp(
          r == 0 ? total.most[0] : total.most[1], r == 0 ? total.sum[0] : total.sum[1], 1.f);
    }
  }
};

// More than kMostAtOnce parts are combined in two steps, in groups of about the square root of
// their number, so that several CTAs read them.
CUTE_DEVICE int parts_of_group(int parts) {
  constexpr int kMostAtOnce = 16;
  return parts <= kMostAtOnce ? parts : int(ceilf(sqrtf(float(parts))));
}

// Counts the part of `work` as complete, and combines what is complete with it. Each
// warpgroup of a tile has its own counters.
template <class Traits>
CUTE_DEVICE void combine_parts(CacheDeviceParams const& p, FwdWork<Traits> const& work,
                               int warpgroup, PartGroup const& threads) {
  KeyPart const& part = work.location.part;
  int const group = Traits::kMayFold && p.folds ? part.parts : parts_of_group(part.parts);
  int const first = part.index / group * group;
  PartList list{first, 1, min_of(group, part.parts - first)};
  bool is_final = group == part.parts;
  int* counters = p.arrived + warpgroup + (is_final ? 0 : p.slots * Traits::kWarpgroups);
  float const* maxima = p.part_lses;
  CUTE_NO_UNROLL
  while (threads.completes(counters + slot_of_part<Traits>(part, list.first) * Traits::kWarpgroups,
                           list.count)) {
    PartCombiner<Traits>{p, work, warpgroup * kWarpgroupWarps, list, maxima}.run(threads, is_final);
    if (is_final) {
      return;
    }
    list = PartList{0, group, ceil_div(part.parts, group)};
    counters = p.arrived + warpgroup;
    maxima = p.group_lses;
    is_final = true;
  }
}

}  // namespace fa3
