// The results of a tile's rows other than O: the LSE and the largest logit; and the sinks, which
// enter both O and the LSE.
#pragma once

#include "core/softmax_math.h"
#include "device/fragments.h"
#include "device/global_max.h"
#include "forward/work.h"

namespace fa3 {

// A thread of a consumer warpgroup that writes results, for the tile whose Q is in the stage.
struct RowWriter {
  int q_stage;
  int warpgroup;
  int thread;
};

// The query and head of a row of a warpgroup.
struct RowOfTile {
  bool exists;
  int offset;  // the query, counted from the first one
  int head;    // in the pack
};

CUTE_DEVICE RowOfTile row_of_tile(FwdDeviceParams const& p, FwdRows const& rows, int row) {
  int const offset = p.pack.div(row);
  bool const exists = offset < p.positions_per_warpgroup && offset < rows.left;
  return RowOfTile{exists, offset, row - offset * int(p.pack.divisor)};
}

// Rows of a tile of one warpgroup that exist, the first ones.
CUTE_DEVICE int rows_of_tile(FwdDeviceParams const& p, FwdRows const& rows) {
  return min_of(p.positions_per_warpgroup, rows.left) * int(p.pack.divisor);
}

// Index of a row in the LSE.
CUTE_DEVICE int64_t index_of_row(FwdDeviceParams const& p, FwdRows const& rows,
                                 RowOfTile const& row) {
  return rows.offset + int64_t(row.head) * p.seqlen.q + row.offset;
}

// The sinks of this thread's two rows; -inf: none.
template <class Traits>
CUTE_DEVICE void read_sinks(FwdDeviceParams const& p, FwdWork<Traits> const& work, int thread,
                            float (&sinks)[2]) {
  sinks[0] = sinks[1] = -INFINITY;
  if (Traits::kHasRowOptions && p.sinks != nullptr && work.location.has_sink()) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      sinks[r] = p.sinks[work.rows.head + p.pack.mod(fragment_row(thread) + 8 * r)];
    }
  }
}

// LSE of a thread's row r, 0 or 1.
template <class Traits, class Softmax>
CUTE_DEVICE float lse_of_row(FwdDeviceParams const& p, Softmax const& softmax,
                             float const (&sinks)[2], int r) {
  float const lse = softmax.lse(r, p.softmax_scale);
  return Traits::kHasRowOptions ? with_sink(lse, r == 0 ? sinks[0] : sinks[1]) : lse;
}

// Stores the LSE and, if wanted, the largest logit: one lane of the four that share two rows writes
// both rows.
template <class Traits, class Softmax>
CUTE_DEVICE void store_rows(FwdDeviceParams const& p, FwdRows const& rows, int thread,
                            Softmax const& softmax, float const (&sinks)[2]) {
  if (p.lse == nullptr) {
    return;
  }
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    RowOfTile const row = row_of_tile(p, rows, fragment_row(thread) + 8 * r);
    if (!row.exists || thread % 4 != 0) {
      continue;
    }
    int64_t const index = index_of_row(p, rows, row);
    p.lse[index] = lse_of_row<Traits>(p, softmax, sinks, r);
    if (Traits::kHasRowOptions && !Traits::kIsCache && p.max_logits != nullptr) {
      p.max_logits[index] = softmax.row_max[r] * p.softmax_scale;
    }
  }
}

// Stores the LSE alone: one lane writes the first row, another the second. WHY not everywhere:
// ptxas (13.0) then orders the loop of bf16 at head dim 64, full attention, differently: 5 to 8 %
// slower (timed together with other changes; docs/journal/fp8.md).
template <class Traits, class Softmax>
CUTE_DEVICE void store_lse(FwdDeviceParams const& p, FwdRows const& rows, int thread,
                           Softmax const& softmax, float const (&sinks)[2]) {
  int const r = thread % 4;
  if (p.lse == nullptr || r >= 2) {
    return;
  }
  RowOfTile const row = row_of_tile(p, rows, fragment_row(thread) + 8 * r);
  if (row.exists) {
    p.lse[index_of_row(p, rows, row)] = lse_of_row<Traits>(p, softmax, sinks, r);
  }
}

// On a cache: raises the largest logit of a row of a tile to that of some keys, if it is wanted.
// Other CTAs may have other keys of the row; memory holds -inf before the launch.
CUTE_DEVICE void raise_largest(FwdDeviceParams const& p, FwdRows const& rows, int row,
                               float logit) {
  if (p.max_logits == nullptr) {
    return;
  }
  if (RowOfTile const at = row_of_tile(p, rows, row); at.exists) {
    raise_in_global(p.max_logits + index_of_row(p, rows, at), logit);
  }
}

// Stores the largest logit of a thread's row r, if it is wanted.
template <class Traits, class Softmax>
CUTE_DEVICE void store_largest(FwdDeviceParams const& p, FwdRows const& rows, int thread,
                               Softmax const& softmax, int r) {
  if (p.max_logits == nullptr || !Traits::kHasRowOptions || r >= 2) {
    return;
  }
  RowOfTile const row = row_of_tile(p, rows, fragment_row(thread) + 8 * r);
  if (row.exists) {
    p.max_logits[index_of_row(p, rows, row)] = softmax.largest_logit(r, p.softmax_scale);
  }
}

}  // namespace fa3
