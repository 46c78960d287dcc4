// OutputKind::kParts, on a cache: a warpgroup stores the O of a whole output tile from registers to
// global memory, and the O of a part in fp32 to a buffer (combine_parts.h).
#pragma once

#include "forward/cache/combine_parts.h"
#include "forward/storage.h"

namespace fa3 {

// Writes the values of O that a thread has of its row r: pairs of columns, which with
// ValuesKind::kTransposed are halves of fours (values_transposed.h).
template <class Traits, class Output, class Row>
CUTE_DEVICE void write_pairs(Output const& output, int r, int thread, Row const& row) {
  CUTE_UNROLL
  for (int i = 0; i < Traits::kOutputColumns / 8; ++i) {
    if (Traits::kTransposesV) {
      int const column = i / 2 * 16 + 2 * fragment_column(thread) + i % 2 * 2;
      row.write(column, output(r, i / 2 * 4 + i % 2), output(r, i / 2 * 4 + i % 2 + 2));
    } else {
      row.write(8 * i + fragment_column(thread), output(r, 2 * i), output(r, 2 * i + 1));
    }
  }
}

// Transposes four words of each of the four lanes of a quad: lane i then has word i of all lanes.
CUTE_DEVICE uint4 transpose_in_quad(uint4 words) {
  int const lane = lane_of_warp();
  bool const is_odd = lane % 2 != 0;
  bool const is_upper = lane % 4 >= 2;
  uint32_t const x = __shfl_xor_sync(kWholeWarp, is_odd ? words.x : words.y, 1);
  uint32_t const z = __shfl_xor_sync(kWholeWarp, is_odd ? words.z : words.w, 1);
  words = is_odd ? make_uint4(x, words.y, z, words.w) : make_uint4(words.x, x, words.z, z);
  uint32_t const first = __shfl_xor_sync(kWholeWarp, is_upper ? words.x : words.z, 2);
  uint32_t const second = __shfl_xor_sync(kWholeWarp, is_upper ? words.y : words.w, 2);
  return is_upper ? make_uint4(first, second, words.z, words.w)
                  : make_uint4(words.x, words.y, first, second);
}

// What the maximum of a part is multiplied by. Converted scores have scales of their own, by
// sequence and head: their maxima are in units of base 2.
template <class Traits, class Softmax>
CUTE_DEVICE float scale_of_folds(Softmax const& softmax) {
  return Traits::kConverts ? softmax.scale_log2 : 1.f;
}

template <class Traits>
struct OutputParts {
  template <class Softmax, class FragmentO>
  CUTE_DEVICE static void store(FwdStorage<Traits>& shared, CacheDeviceParams const& p,
                                RowWriter writer, Softmax const& softmax, float const (&sinks)[2],
                                FragmentO const& tOrO) {
    auto const [q_stage, warpgroup, thread] = writer;
    FwdWork<Traits> const work = shared.work[q_stage][warpgroup];
    release_queries(shared, q_stage, warpgroup, thread);
    if (work.location.part.parts == 1) {
      store_tile(p, work, thread, tOrO);
      store_rows<Traits>(p, work.rows, thread, softmax, sinks);
    } else {
      store_part(p, work, thread, warpgroup * kWarpgroupRows, softmax, tOrO);
      if (p.tiles_apart == 0) {
        NamedBarrier const barrier{int(NamedBarrier::kWarpgroupFirst) + warpgroup};
        combine_parts(
            p, work, warpgroup,
            PartGroup{thread, kWarpgroupThreads, barrier, &shared.completes_tile[warpgroup]});
      }
    }
  }

  CUTE_DEVICE static void finish(int) {}

  // first_column: of those that the warpgroup has.
  template <class FragmentO>
  CUTE_DEVICE static void store_tile(CacheDeviceParams const& p, FwdWork<Traits> const& work,
                                     int thread, FragmentO const& tOrO, int first_column = 0) {
    auto const output = rows_view(tOrO);  // (2, (2, columns / 8))
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      RowOfTile const row = row_of_tile(p, work.rows, fragment_row(thread) + 8 * r);
      if constexpr (Traits::kTransposesV) {
        if (row.exists) {
          write_pairs<Traits>(output, r, thread,
                              ResultRow<Traits>::of(p, work, row).from(first_column));
        }
      } else {
        write_chunks(p, output, r, thread, row.exists,
                     ResultRow<Traits>::of(p, work, row).from(first_column));
      }
    }
  }

 private:
  // Writes row r, 16 bytes at a time. Whole warps call this.
  template <class Output>
  CUTE_DEVICE static void write_chunks(CacheDeviceParams const& p, Output const& output, int r,
                                       int thread, bool exists, ResultRow<Traits> const& row) {
    static_assert(Traits::kOutputColumns % 32 == 0);
    CUTE_UNROLL
    for (int i = 0; i < Traits::kOutputColumns / 32; ++i) {
      uint4 const pairs = transpose_in_quad(
          make_uint4(pack_result(p.out_is_half, output(r, 8 * i), output(r, 8 * i + 1)),
                     pack_result(p.out_is_half, output(r, 8 * i + 2), output(r, 8 * i + 3)),
                     pack_result(p.out_is_half, output(r, 8 * i + 4), output(r, 8 * i + 5)),
                     pack_result(p.out_is_half, output(r, 8 * i + 6), output(r, 8 * i + 7))));
      if (exists) {
        row.write_pairs(32 * i + 8 * (thread % 4), pairs);
      }
    }
  }

  template <class Softmax, class FragmentO>
  CUTE_DEVICE static void store_part(CacheDeviceParams const& p, FwdWork<Traits> const& work,
                                     int thread, int first_row, Softmax const& softmax,
                                     FragmentO const& tOrO) {
    auto const output = rows_view(tOrO);  // (2, (2, Dv / 8))
    int64_t const begin = first_row_of_part(p, work) + first_row;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      int const row = fragment_row(thread) + 8 * r;
      if (row_of_tile(p, work.rows, row).exists) {
        write_pairs<Traits>(output, r, thread,
                            PartRow{p.parts + (begin + row) * Traits::kHeadDimV});
        if (thread % 4 == 0 && p.folds) {
          p.part_lses[begin + row] = softmax.row_max[r] * scale_of_folds<Traits>(softmax);
          p.group_lses[begin + row] = softmax.row_sum[r];
        } else if (thread % 4 == 0) {
          p.part_lses[begin + row] = softmax.lse(r, p.softmax_scale);
        }
      }
    }
  }
};

}  // namespace fa3
