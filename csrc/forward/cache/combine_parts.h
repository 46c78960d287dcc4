// Partial results on a cache, and their combination: O of a part of the keys lies in a buffer in
// fp32, with its LSE. The group of threads that completes the last part of an output tile combines
// all of them, in the order of the keys.
#pragma once

#include "device/barriers.h"
#include "device/flags.h"
#include "forward/folded_parts.h"
#include "forward/results.h"

namespace fa3 {

// The threads that have the rows of a part together. flag: in shared memory, their own.
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

CUTE_DEVICE uint32_t pack_result(bool is_half, float a, float b) {
  return is_half ? pack_two<cutlass::half_t>(a, b) : pack_two<cutlass::bfloat16_t>(a, b);
}

// A row of the result, and of a part.
template <class Traits>
struct ResultRow {
  uint16_t* data;
  int columns;
  bool is_half;

  CUTE_DEVICE static ResultRow of(CacheDeviceParams const& p, FwdWork<Traits> const& work,
                                  RowOfTile const& row) {
    bool const is_packed = p.has_packed_queries();
    int64_t const batch = is_packed ? 0 : work.entry;
    int64_t const position = work.position_begin + row.offset +
                             (is_packed ? work.location.q_end - work.location.len.q : 0);
    return ResultRow{p.out.data + batch * p.out.batch_stride + position * p.out.row_stride +
                         (work.rows.head + row.head) * p.out.head_stride,
                     p.out.columns, p.out_is_half};
  }

  // The row from a column on.
  CUTE_DEVICE ResultRow from(int column) const {
    return ResultRow{data + column, columns - column, is_half};
  }

  CUTE_DEVICE void write(int column, float a, float b) const {
    write_pair(column, pack_result(is_half, a, b));
  }

  CUTE_DEVICE void write_pair(int column, uint32_t pair) const {
    if (column < columns) {
      *reinterpret_cast<uint32_t*>(data + column) = pair;
    }
  }

  // Writes eight columns, in one store if the address allows it.
  CUTE_DEVICE void write_pairs(int column, uint4 pairs) const {
    auto* const target = data + column;
    if (reinterpret_cast<uintptr_t>(target) % 16 == 0 && column + 8 <= columns) {
      *reinterpret_cast<uint4*>(target) = pairs;
    } else {
      write_pair(column, pairs.x);
      write_pair(column + 2, pairs.y);
      write_pair(column + 4, pairs.z);
      write_pair(column + 6, pairs.w);
    }
  }
};

struct PartRow {
  float* data;

  CUTE_DEVICE void write(int column, float a, float b) const {
    *reinterpret_cast<float2*>(data + column) = make_float2(a, b);
  }
};

// Parts of an output tile: the parts first, first + stride, ..., `count` of them.
struct PartList {
  int first;
  int stride;
  int count;
};

// Combines parts. A thread has four columns of a row: it loads those of kAtOnce parts at a time,
// together with their LSEs.
template <class Traits>
struct PartCombiner {
  static constexpr int kFours = Traits::kHeadDimV / 4;  // in a row
  static constexpr int kAtOnce = 8;

  CacheDeviceParams const& p;
  FwdWork<Traits> const& work;
  int first_row;  // where the warpgroup's rows begin in a part
  PartList parts;
  float const* lses;  // one for each row of a part

  // is_final: into the result; else into the buffer of the first part, with an LSE of the group.
  CUTE_DEVICE void run(PartGroup const& group, bool is_final) const {
    int const rows = rows_of_tile(p, work.rows);
    CUTE_NO_UNROLL
    for (int i = group.thread; i < rows * kFours; i += group.threads) {
      if (Traits::kMayFold && p.folds) {
        fold(i / kFours, i % kFours * 4);
      } else {
        combine(i / kFours, i % kFours * 4, is_final);
      }
    }
  }

 private:
  CUTE_DEVICE int64_t row_of_part(int i, int r) const {
    int const slot = work.location.part.slot_of(parts.first + i * parts.stride);
    return int64_t(slot) * p.part_rows + first_row + r;
  }

  CUTE_DEVICE void combine(int r, int column, bool is_final) const {
    float most = -INFINITY;
    float sum = 0.f;
    float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
    CUTE_NO_UNROLL
    for (int begin = 0; begin < parts.count; begin += kAtOnce) {
      float of_parts[kAtOnce];
      float4 values[kAtOnce];
      CUTE_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        int64_t const row = row_of_part(min_of(begin + j, parts.count - 1), r);
        of_parts[j] = __ldcg(lses + row);
        values[j] =
            __ldcg(reinterpret_cast<float4 const*>(p.parts + row * Traits::kHeadDimV + column));
      }
      float const before = most;
      CUTE_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        of_parts[j] = begin + j < parts.count ? of_parts[j] : -INFINITY;
        most = fmaxf(most, of_parts[j]);
      }
      float const used = finite_max(most);
      float const rescale = exp2_approx((before - used) * kLog2E);
      sum *= rescale;
      multiply_four(o, rescale);
      CUTE_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        float const weight = exp2_approx((of_parts[j] - used) * kLog2E);
        sum += weight;
        add_four(o, values[j], weight);
      }
    }
    write(r, column, most, sum, o, is_final);
  }

  // As PartTotal, in another CTA: bit for bit what a kernel computes that has all parts itself.
  CUTE_DEVICE void fold(int r, int column) const {
    float const scale_log2 = Traits::kConverts ? 1.f : p.scale_log2;
    float most = -INFINITY;
    float sum = 0.f;
    float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
    CUTE_NO_UNROLL
    for (int begin = 0; begin < parts.count; begin += kAtOnce) {
      float maxima[kAtOnce];
      float sums[kAtOnce];
      float4 values[kAtOnce];
      CUTE_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        int64_t const row = row_of_part(min_of(begin + j, parts.count - 1), r);
        maxima[j] = __ldcg(p.part_lses + row);
        sums[j] = __ldcg(p.group_lses + row);
        values[j] =
            __ldcg(reinterpret_cast<float4 const*>(p.parts + row * Traits::kHeadDimV + column));
      }
      CUTE_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        if (begin + j == 0) {
          most = maxima[j];
          sum = sums[j];
          o = values[j];
        } else if (begin + j < parts.count) {
          FoldFactors const factors = FoldFactors::of(most, maxima[j], scale_log2);
          most = factors.most;
          sum = factors.fold(sum, sums[j]);
          o = make_float4(factors.fold(o.x, values[j].x), factors.fold(o.y, values[j].y),
                          factors.fold(o.z, values[j].z), factors.fold(o.w, values[j].w));
        }
      }
    }
    float const scale = Traits::kConverts ? kLn2 : p.softmax_scale;
    RowOfTile const row = row_of_tile(p, work.rows, r);
    float const sink = p.sinks != nullptr ? p.sinks[work.rows.head + row.head] : -INFINITY;
    float const of_sink = exp2_approx(sink * kLog2E - most * scale_log2);
    multiply_four(o, inverse_sum(sum + of_sink));
    if (sum == 0.f) {
      o = make_float4(0.f, 0.f, 0.f, 0.f);
    }
    write_row(row, column, o, with_sink(log_sum_exp(most, sum, scale), sink));
  }

  CUTE_DEVICE void write_row(RowOfTile const& row, int column, float4 o, float lse) const {
    auto const target = ResultRow<Traits>::of(p, work, row);
    target.write(column, o.x, o.y);
    target.write(column + 2, o.z, o.w);
    if (p.lse != nullptr && column == 0) {
      p.lse[index_of_row(p, work.rows, row)] = lse;
    }
  }

  CUTE_DEVICE void write(int r, int column, float most, float sum, float4 o, bool is_final) const {
    float const lse = sum == 0.f ? -INFINITY : most + __logf(sum);
    if (!is_final) {
      multiply_four(o, inverse_sum(sum));
      int64_t const row = row_of_part(0, r);
      *reinterpret_cast<float4*>(p.parts + row * Traits::kHeadDimV + column) = o;
      if (column == 0) {
        p.group_lses[row] = lse;
      }
      return;
    }
    RowOfTile const row = row_of_tile(p, work.rows, r);
    float const sink = p.sinks != nullptr ? p.sinks[work.rows.head + row.head] : -INFINITY;
    float const of_sink = exp2_approx((sink - finite_max(most)) * kLog2E);
    multiply_four(o, inverse_sum(sum + of_sink));
    write_row(row, column, o, with_sink(lse, sink));
  }
};

// More parts are combined in two steps, in groups of about the square root of their number, so that
// several CTAs read them.
CUTE_DEVICE int parts_of_group(int parts) {
  constexpr int kMostAtOnce = 16;
  return parts <= kMostAtOnce ? parts : int(ceilf(sqrtf(float(parts))));
}

// Counts the part of `work` as complete, and combines what is complete with it. warpgroup: the
// 64 rows of a tile, of which each has its own counters.
template <class Traits>
CUTE_DEVICE void combine_parts(CacheDeviceParams const& p, FwdWork<Traits> const& work,
                               int warpgroup, PartGroup const& threads) {
  KeyPart const& part = work.location.part;
  int const first_row = warpgroup * kWarpgroupRows;
  int const group = Traits::kMayFold && p.folds ? part.parts : parts_of_group(part.parts);
  int const first = part.index / group * group;
  PartList list{first, 1, min_of(group, part.parts - first)};
  bool is_final = group == part.parts;
  int* counters = p.arrived + warpgroup + (is_final ? 0 : p.slots * Traits::kWarpgroups);
  float const* lses = p.part_lses;
  CUTE_NO_UNROLL
  while (threads.completes(counters + part.slot_of(list.first) * Traits::kWarpgroups, list.count)) {
    PartCombiner<Traits>{p, work, first_row, list, lses}.run(threads, is_final);
    if (is_final) {
      return;
    }
    list = PartList{0, group, ceil_div(part.parts, group)};
    counters = p.arrived + warpgroup;
    lses = p.group_lses;
    is_final = true;
  }
}

// Where the rows of a part lie in the buffers, in units of rows.
template <class Traits>
CUTE_DEVICE int64_t first_row_of_part(CacheDeviceParams const& p, FwdWork<Traits> const& work) {
  KeyPart const& part = work.location.part;
  // Output tiles of a launch, the queries of a packed head next to each other.
  int const tile =
      p.pack.div(work.rows.head) * p.m_tiles + p.line.positions.div(work.position_begin);
  int const slot = p.tiles_apart > 0 ? part.index * p.tiles_apart + tile : part.slot_of(part.index);
  return int64_t(slot) * p.part_rows;
}

}  // namespace fa3
