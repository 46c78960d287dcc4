// OutputKind::kParts, on a cache: O of a whole output tile goes from registers to global memory. O
// of a part goes to a buffer in fp32, with its LSE; the CTA that completes the last part of an
// output tile combines all of them, in the order of the keys.
#pragma once

#include "forward/results.h"
#include "forward/storage.h"

namespace fa3 {

template <class Traits>
CUTE_DEVICE void release_queries(FwdStorage<Traits>& shared, int q_stage, int warpgroup,
                                 int thread) {
  __syncwarp();
  if (thread % 32 == 0) {
    shared.q_empty[q_stage][warpgroup].arrive();
  }
}

// Writes the values of O that a thread has of its row r: pairs of columns, which with
// ValuesKind::kTransposed are halves of fours (values_transposed.h).
template <class Traits, class Output, class Row>
CUTE_DEVICE void write_pairs(Output const& output, int r, int thread, Row const& row) {
  CUTE_UNROLL
  for (int i = 0; i < Traits::kHeadDimV / 8; ++i) {
    if (Traits::kTransposesV) {
      int const column = i / 2 * 16 + 2 * fragment_column(thread) + i % 2 * 2;
      row.write(column, output(r, i / 2 * 4 + i % 2), output(r, i / 2 * 4 + i % 2 + 2));
    } else {
      row.write(8 * i + fragment_column(thread), output(r, 2 * i), output(r, 2 * i + 1));
    }
  }
}

// A row of the result, and of a part.
template <class Traits>
struct ResultRow {
  uint16_t* data;
  int columns;
  bool is_half;

  CUTE_DEVICE static ResultRow of(CacheDeviceParams const& p, FwdWork<Traits> const& work,
                                  RowOfTile const& row) {
    using Element = typename Traits::Element;
    bool const is_packed = p.has_packed_queries();
    int64_t const batch = is_packed ? 0 : work.entry;
    int64_t const position = work.position_begin + row.offset +
                             (is_packed ? work.location.q_end - work.location.len.q : 0);
    return ResultRow{p.out.data + batch * p.out.batch_stride + position * p.out.row_stride +
                         (work.rows.head + row.head) * p.out.head_stride,
                     p.out.columns,
                     sizeof(Element) == 2 ? cute::is_same_v<Element, cutlass::half_t>
                                          : p.out_is_half};
  }

  CUTE_DEVICE void write(int column, float a, float b) const {
    if (column < columns) {
      *reinterpret_cast<uint32_t*>(data + column) =
          is_half ? pack_two<cutlass::half_t>(a, b) : pack_two<cutlass::bfloat16_t>(a, b);
    }
  }
};

struct PartRow {
  float* data;

  CUTE_DEVICE void write(int column, float a, float b) const {
    *reinterpret_cast<float2*>(data + column) = make_float2(a, b);
  }
};

// Combines the parts of an output tile. A warp takes every fourth row.
template <class Traits>
struct PartCombiner {
  static constexpr int kPairs = Traits::kHeadDimV / 64;  // of columns, per lane
  static constexpr int kAtOnce = 8;                      // parts whose loads are in flight

  CacheDeviceParams const& p;
  FwdWork<Traits> const& work;
  int first_row;  // of the warpgroup, in the buffer of a part

  CUTE_DEVICE void run(int thread) const {
    int const lane = thread % 32;
    for (int r = thread / 32; r < kWarpgroupRows; r += kWarpgroupWarps) {
      RowOfTile const row = row_of_tile(p, work.rows, r);
      if (row.exists) {
        combine_row(row, first_row + r, lane);
      }
    }
  }

 private:
  CUTE_DEVICE int64_t row_of_part(int part, int r) const {
    return int64_t(work.location.part.slot_of(part)) * p.part_rows + r;
  }

  CUTE_DEVICE float lse_of_part(int part, int r) const {
    return part < work.location.part.parts ? __ldcg(p.part_lses + row_of_part(part, r)) : -INFINITY;
  }

  CUTE_DEVICE void combine_row(RowOfTile const& row, int r, int lane) const {
    int const parts = work.location.part.parts;
    float most = -INFINITY;
    for (int first = 0; first < parts; first += 32) {
      most = fmaxf(most, lse_of_part(first + lane, r));
    }
    most = max_over_lanes(most);
    float sum = 0.f;
    float2 o[kPairs];
    CUTE_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      o[i] = make_float2(0.f, 0.f);
    }
    for (int first = 0; first < parts; first += 32) {
      float const lse = lse_of_part(first + lane, r);
      float const weight = exp2_approx((lse - finite_max(most)) * kLog2E);
      sum += weight;
      add_parts(o, weight, first, min_of(32, parts - first), r, lane);
    }
    sum = sum_over_lanes<32>(sum);
    float const lse = sum == 0.f ? -INFINITY : most + __logf(sum);
    float const sink = p.sinks != nullptr ? p.sinks[work.rows.head + row.head] : -INFINITY;
    float const all = sink == -INFINITY ? sum : sum + exp2_approx((sink - finite_max(most)) * kLog2E);
    float const factor = inverse_sum(all);
    auto const target = ResultRow<Traits>::of(p, work, row);
    CUTE_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      target.write(2 * (lane + 32 * i), o[i].x * factor, o[i].y * factor);
    }
    if (p.lse != nullptr && lane == 0) {
      p.lse[index_of_row(p, work.rows, row)] = with_sink(lse, sink);
    }
  }

  CUTE_DEVICE void add_parts(float2 (&o)[kPairs], float weight, int first, int count, int r,
                             int lane) const {
    CUTE_NO_UNROLL
    for (int begin = 0; begin < count; begin += kAtOnce) {
      float2 values[kAtOnce][kPairs];
      CUTE_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        int const part = min_of(begin + j, count - 1);
        auto const* const from = reinterpret_cast<float2 const*>(
            p.parts + row_of_part(first + part, r) * Traits::kHeadDimV);
        CUTE_UNROLL
        for (int i = 0; i < kPairs; ++i) {
          values[j][i] = __ldcg(from + lane + 32 * i);
        }
      }
      CUTE_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        float const of_part = __shfl_sync(0xffffffffu, weight, (begin + j) % 32);
        float const factor = begin + j < count ? of_part : 0.f;
        CUTE_UNROLL
        for (int i = 0; i < kPairs; ++i) {
          o[i].x += values[j][i].x * factor;
          o[i].y += values[j][i].y * factor;
        }
      }
    }
  }

  CUTE_DEVICE static float max_over_lanes(float x) {
    CUTE_UNROLL
    for (int distance = 16; distance > 0; distance /= 2) {
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
    }
    return x;
  }
};

template <class Traits>
struct OutputParts {
  template <class Softmax, class FragmentO>
  CUTE_DEVICE static void store(FwdStorage<Traits>& shared, CacheDeviceParams const& p,
                                RowWriter writer, Softmax const& softmax, float const (&sinks)[2],
                                FragmentO const& tOrO) {
    auto const [q_stage, warpgroup, thread] = writer;
    FwdWork<Traits> const& work = shared.work[q_stage][warpgroup];
    int const first_row = warpgroup * kWarpgroupRows;
    bool const is_whole = work.location.part.parts == 1;
    if (is_whole) {
      store_tile(p, work, thread, tOrO);
      store_rows<Traits>(p, work.rows, thread, softmax, sinks);
    } else {
      store_part(p, work, thread, first_row, softmax, tOrO);
    }
    if (!is_whole && completes_tile(shared, p, work, warpgroup, thread)) {
      PartCombiner<Traits>{p, work, first_row}.run(thread);
    }
    release_queries(shared, q_stage, warpgroup, thread);
  }

  CUTE_DEVICE static void finish(int) {}

 private:
  template <class FragmentO>
  CUTE_DEVICE static void store_tile(CacheDeviceParams const& p, FwdWork<Traits> const& work,
                                     int thread, FragmentO const& tOrO) {
    auto const output = rows_view(tOrO);  // (2, (2, Dv / 8))
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      RowOfTile const row = row_of_tile(p, work.rows, fragment_row(thread) + 8 * r);
      if (row.exists) {
        write_pairs<Traits>(output, r, thread, ResultRow<Traits>::of(p, work, row));
      }
    }
  }

  template <class Softmax, class FragmentO>
  CUTE_DEVICE static void store_part(CacheDeviceParams const& p, FwdWork<Traits> const& work,
                                     int thread, int first_row, Softmax const& softmax,
                                     FragmentO const& tOrO) {
    auto const output = rows_view(tOrO);  // (2, (2, Dv / 8))
    KeyPart const& part = work.location.part;
    int64_t const begin = int64_t(part.slot_of(part.index)) * p.part_rows + first_row;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      int const row = fragment_row(thread) + 8 * r;
      if (row_of_tile(p, work.rows, row).exists) {
        write_pairs<Traits>(output, r, thread,
                            PartRow{p.parts + (begin + row) * Traits::kHeadDimV});
        if (thread % 4 == 0) {
          p.part_lses[begin + row] = softmax.lse(r, p.softmax_scale);
        }
      }
    }
  }

  // Whether all other parts of the output tile are complete. The counter is 0 again after the last.
  CUTE_DEVICE static bool completes_tile(FwdStorage<Traits>& shared, CacheDeviceParams const& p,
                                         FwdWork<Traits> const& work, int warpgroup, int thread) {
    KeyPart const& part = work.location.part;
    __threadfence();
    sync_warpgroup(warpgroup);
    if (thread == 0) {
      int* const counter = p.arrived + part.first_slot * Traits::kWarpgroups + warpgroup;
      bool const is_last = atomicAdd(counter, 1) == part.parts - 1;
      if (is_last) {
        *counter = 0;
      }
      shared.completes_tile[warpgroup] = is_last;
    }
    sync_warpgroup(warpgroup);
    __threadfence();
    return shared.completes_tile[warpgroup];
  }
};

}  // namespace fa3
