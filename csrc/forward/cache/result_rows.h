// Writes O of output tiles on a cache from registers to the rows of the result.
#pragma once

#include "forward/results.h"

namespace fa3 {

CUTE_DEVICE uint32_t pack_result(bool is_half, float a, float b) {
  return is_half ? pack_two<cutlass::half_t>(a, b) : pack_two<cutlass::bfloat16_t>(a, b);
}

// A row of the result.
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

// Writes the 64 rows of a warpgroup's accumulator to the result. first_column: where the
// accumulator's columns begin among those of this CTA. All lanes of a warp must call write().
template <class Traits>
struct ResultColumns {
  CacheDeviceParams const& p;
  FwdWork<Traits> const& work;
  int thread;  // in the warpgroup
  int first_column;

  template <class Fragment>
  CUTE_DEVICE void write(Fragment const& acc) const {
    auto const output = rows_view(acc);  // (2, (2, columns / 8))
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      RowOfTile const row = row_of_tile(p, work.rows, fragment_row(thread) + 8 * r);
      auto const target = ResultRow<Traits>::of(p, work, row)
                              .from(ColumnsOf<Traits>::first_column() + first_column);
      if constexpr (!Traits::kTransposesV) {
        write_chunks(output, r, row.exists, target);
      } else if (row.exists) {
        write_fours(output, r, target);
      }
    }
  }

 private:
  // Writes row r, 16 bytes at a time.
  template <class Output>
  CUTE_DEVICE void write_chunks(Output const& output, int r, bool exists,
                                ResultRow<Traits> const& row) const {
    constexpr int kColumns = 4 * decltype(cute::size<1>(output))::value;
    static_assert(kColumns % 32 == 0);
    CUTE_UNROLL
    for (int i = 0; i < kColumns / 32; ++i) {
      uint4 const pairs =
          transpose_in_quad(make_uint4(packed(output, r, 8 * i), packed(output, r, 8 * i + 2),
                                       packed(output, r, 8 * i + 4), packed(output, r, 8 * i + 6)));
      if (exists) {
        row.write_pairs(32 * i + 8 * (thread % 4), pairs);
      }
    }
  }

  // Two values of the accumulator, in adjacent columns.
  template <class Output>
  CUTE_DEVICE uint32_t packed(Output const& output, int r, int i) const {
    return pack_result(p.out_is_half, output(r, i), output(r, i + 1));
  }

  // Writes row r with ValuesKind::kTransposed: a thread has four adjacent columns of each 16
  // (fp8/values_transposed.h).
  template <class Output>
  CUTE_DEVICE void write_fours(Output const& output, int r, ResultRow<Traits> const& row) const {
    CUTE_UNROLL
    for (int i = 0; i < decltype(cute::size<1>(output))::value; i += 4) {
      int const column = 4 * i + 2 * fragment_column(thread);
      row.write(column, output(r, i), output(r, i + 2));
      row.write(column + 2, output(r, i + 1), output(r, i + 3));
    }
  }
};

}  // namespace fa3
