// The way out: O from registers through shared memory to global memory, LSE straight to global
// memory. FP8: both through shared memory, or both straight (kStageOutput).
#pragma once

#include "device/row_copies.h"
#include "forward/softmax.h"
#include "forward/softmax_fp8.h"
#include "forward/storage.h"

namespace fa3 {

template <class Traits>
using SoftmaxOf =
    cute::conditional_t<Traits::kFp8, Fp8Softmax<Traits>, OnlineSoftmax<typename Traits::Config>>;

// Consumer side: O over this warpgroup's rows of Q, then the store warp is told. A warp stores its
// 16 rows 16 columns at a time: a lane gives the address of one row of one of the four 8 x 8
// blocks.
template <class Traits, class FragmentO>
CUTE_DEVICE void stage_output(FwdStorage<Traits>& shared, int q_stage, int warpgroup, int thread,
                              FragmentO const& tOrO) {
  using Element = typename Traits::Element;
  auto rO = cute::make_tensor<Element>(tOrO.layout());  // ((2,2,Dv/8),1,1)
  convert_fragment<Element>(tOrO, rO);
  auto pairs = cute::recast<uint32_t>(rO);  // 4 to 16 columns
  char* const rows = reinterpret_cast<char*>(shared.q[q_stage][warpgroup]);
  int const row = thread / 32 * 16 + thread % 16;
  int const half = thread / 16 % 2;
  CUTE_UNROLL
  for (int j = 0; j < Traits::kHeadDimV / 16; ++j) {
    char* const target = rows + chunk_offset_bytes<kWarpgroupRows>(row, 2 * j + half);
    cute::SM90_U32x4_STSM_N::copy(pairs(4 * j), pairs(4 * j + 1), pairs(4 * j + 2),
                                  pairs(4 * j + 3), *reinterpret_cast<cute::uint128_t*>(target));
  }
  fence_shared_for_async_proxy();
  __syncwarp();
  if (thread % 32 == 0) {
    shared.o_staged[q_stage][warpgroup].arrive();
  }
}

// Which query and head a row of a warpgroup is.
struct RowOfTile {
  bool exists;
  int offset;  // of the query, from the first one
  int head;    // in the pack
};

CUTE_DEVICE RowOfTile row_of_tile(FwdDeviceParams const& p, FwdRows const& rows, int row) {
  int const offset = p.pack.div(row);
  bool const exists = offset < p.positions_per_warpgroup && offset < rows.left;
  return RowOfTile{exists, offset, row - offset * int(p.pack.divisor)};
}

// Where the rows of a tile begin in O, in elements.
template <class Traits>
CUTE_DEVICE int64_t output_of_tile(FwdDeviceParams const& p, FwdWork<Traits> const& work) {
  int64_t batch = work.entry;
  int64_t row = work.position_begin;
  if constexpr (Traits::kGeneral) {
    if (p.is_packed()) {
      batch = 0;
      row += first_row_of_sequence(work);
    }
  }
  return batch * p.out.batch_stride + row * p.out.row_stride + work.rows.head * p.out.head_stride;
}

// FP8: O from registers to global memory. A thread has columns 4 j .. 4 j + 3 of each sixteen
// (transpose.h), the four lanes of a row 32 bytes.
template <class Traits, class Out, class FragmentO>
CUTE_DEVICE void write_output(FwdDeviceParams const& p, FwdWork<Traits> const& work, int thread,
                              FragmentO const& tOrO) {
  auto const output = rows_view(tOrO);  // (2, (2, Dv / 8))
  int64_t const first = output_of_tile(p, work);
  // WHY: what is made of the thread's number would else be kept in registers over all tiles.
  asm volatile("" : "+r"(thread));
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    RowOfTile const row = row_of_tile(p, work.rows, fragment_row(thread) + 8 * r);
    if (!row.exists) {
      continue;
    }
    uint16_t* const target = p.out.data + first + row.offset * p.out.row_stride +
                             row.head * p.out.head_stride + fragment_column(thread) * 2;
    CUTE_UNROLL
    for (int i = 0; i < Traits::kHeadDimV / 16; ++i) {
      if (16 * i < p.out.columns) {
        *reinterpret_cast<uint2*>(target + 16 * i) =
            uint2{pack_two<Out>(output(r, 4 * i), output(r, 4 * i + 2)),
                  pack_two<Out>(output(r, 4 * i + 1), output(r, 4 * i + 3))};
      }
    }
  }
}

// FP8: where a thread's first columns of O lie in `staged`, its columns of each sixteen 8 bytes
// beside those of the next lane.
CUTE_DEVICE uint32_t staged_place(uint16_t const* staged, int thread) {
  asm volatile("" : "+r"(thread));        // as in write_output
  thread %= unsigned(kWarpgroupThreads);  // known to be positive: divisions are shifts
  int const lane = thread % 4;
  return cute::cast_smem_ptr_to_uint(staged) + lane % 2 * 8 +
         chunk_offset_bytes<kWarpgroupRows>(fragment_row(thread), lane / 2);
}

// FP8: O to where the copy engine takes it from. The swizzle of a row is that of the row 8 further;
// chunks go up by exclusive ors.
template <class Traits, class Out, class FragmentO>
CUTE_DEVICE void write_staged(uint32_t place, FragmentO const& tOrO) {
  auto const output = rows_view(tOrO);  // (2, (2, Dv / 8))
  CUTE_UNROLL
  for (int i = 0; i < Traits::kHeadDimV / 16; ++i) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      uint32_t const target = (place ^ i % 4 * 32) + (i / 4 * kWarpgroupRows + 8 * r) * 128;
      asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(target),
                   "r"(pack_two<Out>(output(r, 4 * i), output(r, 4 * i + 2))),
                   "r"(pack_two<Out>(output(r, 4 * i + 1), output(r, 4 * i + 3)))
                   : "memory");
    }
  }
}

template <class Traits, class FragmentO>
CUTE_DEVICE void stage_fp8_output(FwdStorage<Traits>& shared, FwdDeviceParams const& p,
                                  int warpgroup, int thread, FragmentO const& tOrO) {
  uint32_t const place = staged_place(shared.staged[warpgroup], thread);
  if (p.out_is_half) {
    write_staged<Traits, cutlass::half_t>(place, tOrO);
  } else {
    write_staged<Traits, cutlass::bfloat16_t>(place, tOrO);
  }
  fence_shared_for_async_proxy();
}

// O of a warpgroup from where it is staged to its rows, from `position` on; less than 0: it has
// none. Part of the thread's bulk group. Rows past the end of the sequence are dropped by the copy
// engine.
template <class Traits>
CUTE_DEVICE void copy_output(FwdDeviceParams const& p, FwdWork<Traits> const& work,
                             void const* staged, int position) {
  if (position < 0) {
    return;
  }
  char const* const rows = static_cast<char const*>(staged);
  CUTE_UNROLL
  for (int column = 0; column < padded_columns(Traits::kHeadDimV); column += kSliceColumns) {
    store_box(p.o, rows + column * kWarpgroupRows * 2, column, work.rows.head,
              work.place.first_q() + position, work.place, work.place.end_q());
  }
}

// FP8, three warpgroups: each takes its O out by itself. The copy before has been read when this
// thread's group of copies has: it is thread 0 that issues them.
template <class Traits, class FragmentO>
CUTE_DEVICE void send_output(FwdStorage<Traits>& shared, FwdDeviceParams const& p,
                             FwdWork<Traits> const& work, int warpgroup, int thread,
                             FragmentO const& tOrO) {
  if (thread == 0) {
    cute::tma_store_wait<0>();
  }
  meet_in_warpgroup(warpgroup);
  stage_fp8_output(shared, p, warpgroup, thread, tOrO);
  meet_in_warpgroup(warpgroup);
  if (thread == 0) {
    copy_output(p, work, shared.staged[warpgroup], work.position_begin);
    cute::tma_store_arrive();
  }
}

// Of this thread's two rows; -inf: none.
template <class Traits>
CUTE_DEVICE void read_sinks(FwdDeviceParams const& p, FwdWork<Traits> const& work, int thread,
                            float (&sinks)[2]) {
  sinks[0] = sinks[1] = -INFINITY;
  if constexpr (Traits::kGeneral) {
    if (p.sinks != nullptr && work.place.len.k != kNoSequence) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        sinks[r] = p.sinks[work.rows.head + p.pack.mod(fragment_row(thread) + 8 * r)];
      }
    }
  }
}

// Of row r of a thread, 0 or 1.
template <class Traits, class Softmax>
CUTE_DEVICE float lse_of_row(FwdDeviceParams const& p, Softmax const& softmax,
                             float const (&sinks)[2], int r) {
  float const lse = softmax.lse(r, p.softmax_scale);
  return Traits::kGeneral ? with_sink(lse, r == 0 ? sinks[0] : sinks[1]) : lse;
}

CUTE_DEVICE int64_t place_of_row(FwdDeviceParams const& p, FwdRows const& rows,
                                 RowOfTile const& row) {
  return rows.offset + int64_t(row.head) * p.seqlen.q + row.offset;
}

// Consumer side: one lane of the four that share two rows writes what there is of them beside O, if
// it is wanted: the LSE, the largest logit.
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
    int64_t const target = place_of_row(p, rows, row);
    p.lse[target] = lse_of_row<Traits>(p, softmax, sinks, r);
    if constexpr (Traits::kGeneral) {
      if (p.max_logits != nullptr) {
        p.max_logits[target] = softmax.row_max[r] * p.softmax_scale;
      }
    }
  }
}

// FP8: one lane writes the LSE of the one row, another that of the other. WHY not above: ptxas
// (13.0) then takes another order in the loop of bf16 at head dim 64, full attention, 5 to 8 %
// slower (timed with more changes; README.md, FP8).
template <class Traits, class Softmax>
CUTE_DEVICE void store_lse(FwdDeviceParams const& p, FwdRows const& rows, int thread,
                           Softmax const& softmax, float const (&sinks)[2]) {
  int const r = thread % 4;
  if (p.lse == nullptr || r >= 2) {
    return;
  }
  RowOfTile const row = row_of_tile(p, rows, fragment_row(thread) + 8 * r);
  if (row.exists) {
    p.lse[place_of_row(p, rows, row)] = lse_of_row<Traits>(p, softmax, sinks, r);
  }
}

// FP8, two warpgroups: O and the LSE to where ResultSender takes them from, once it has read those
// of the tile before.
template <class Traits, class Softmax, class FragmentO>
CUTE_DEVICE void stage_results(FwdStorage<Traits>& shared, FwdDeviceParams const& p, int q_stage,
                               int warpgroup, int thread, Softmax const& softmax,
                               float const (&sinks)[2], FragmentO const& tOrO) {
  static_assert(Traits::kQStages == 2, "the number of a stage is the parity of its tile");
  shared.o_sent[warpgroup].wait(uint32_t(q_stage));
  if (int const r = thread % 4; r < 2) {
    shared.staged_lse[warpgroup][fragment_row(thread) + 8 * r] =
        lse_of_row<Traits>(p, softmax, sinks, r);
  }
  stage_fp8_output(shared, p, warpgroup, thread, tOrO);
  __syncwarp();
  if (thread % 32 == 0) {
    shared.o_staged[q_stage][warpgroup].arrive();
  }
}

// Copies the O that is staged out, then hands the Q buffer back to the producer. One thread runs
// this.
template <class Traits>
CUTE_DEVICE void store_output(FwdStorage<Traits>& shared, FwdDeviceParams const& p, int q_stage,
                              int warpgroup) {
  FwdWork<Traits> const& work = shared.work[q_stage][warpgroup];
  copy_output(p, work, shared.q[q_stage][warpgroup], work.position_begin);
  cute::tma_store_arrive();
  cute::tma_store_wait<0>();  // the buffer has been read
  shared.q_empty[q_stage][warpgroup].arrive();
}

// Store warp of consumer warpgroup `warpgroup`.
template <class Traits>
CUTE_DEVICE void store_outputs(FwdStorage<Traits>& shared, FwdDeviceParams const& p,
                               int warpgroup) {
  RingState<Traits::kQStages> ring;
  while (true) {
    shared.q_full[ring.stage][warpgroup].wait(ring.phase);
    if (!shared.work[ring.stage][warpgroup].valid()) {
      return;
    }
    shared.o_staged[ring.stage][warpgroup].wait(ring.phase);
    store_output(shared, p, ring.stage, warpgroup);
    ring.advance();
  }
}

// FP8, two warpgroups: takes the results of a tile out of shared memory, for both. A warp runs
// this. WHY not for three: that costs head dim 64 1 to 2 %, and gives 128 nothing (README.md, FP8).
template <class Traits>
struct ResultSender {
  FwdStorage<Traits>& shared;
  FwdDeviceParams const& p;
  int lane;
  RingState<Traits::kQStages> ring;
  FwdWork<Traits> work;  // of the last warpgroup, which has rows in every tile

  CUTE_DEVICE ResultSender(FwdStorage<Traits>& shared_, FwdDeviceParams const& p_, int lane_)
      : shared(shared_), p(p_), lane(lane_), work(no_tile<Traits>()) {}

  // What there is of the tile `work`; then `next`, which is in shared memory, takes its place.
  CUTE_DEVICE void send(FwdWork<Traits> const& next) {
    if (work.valid()) {
      CUTE_NO_UNROLL
      for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
        shared.o_staged[ring.stage][wg].wait(ring.phase);
        send_of_warpgroup(wg, (Traits::kWarpgroups - 1 - wg) * p.positions_per_warpgroup);
      }
      if (lane == 0) {
        cute::tma_store_arrive();
        cute::tma_store_wait<0>();  // it has been read
      }
      ring.advance();
    }
    // A copy: the memory is given away when its tile is through, before its results are sent.
    work = next;
    __syncwarp();
    if (lane == 0) {
      CUTE_UNROLL
      for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
        shared.o_sent[wg].arrive();
      }
    }
  }

 private:
  CUTE_DEVICE void send_of_warpgroup(int wg, int to_last) {
    int const position = work.position_begin - to_last;
    if (lane == 0) {
      copy_output(p, work, shared.staged[wg], position);
    }
    if (p.lse != nullptr && position >= 0) {
      send_lse(wg, FwdRows{work.rows.offset - to_last, work.rows.left + to_last, work.rows.head});
    }
  }

  CUTE_DEVICE void send_lse(int wg, FwdRows const& rows) {
    CUTE_UNROLL
    for (int row = lane; row < kWarpgroupRows; row += 32) {
      RowOfTile const of_tile = row_of_tile(p, rows, row);
      if (of_tile.exists) {
        p.lse[place_of_row(p, rows, of_tile)] = shared.staged_lse[wg][row];
      }
    }
  }
};

}  // namespace fa3
