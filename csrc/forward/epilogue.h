// The way out: O from registers through shared memory to global memory, LSE straight to global
// memory; FP8: O too.
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

// FP8: O to where the copy engine takes it from; a thread's columns of each sixteen lie 8 bytes
// beside those of the next lane.
template <class Traits, class Out, class FragmentO>
CUTE_DEVICE void write_staged(uint16_t* staged, int thread, FragmentO const& tOrO) {
  auto const output = rows_view(tOrO);  // (2, (2, Dv / 8))
  asm volatile("" : "+r"(thread));      // as in write_output
  int const row = fragment_row(thread);
  int const lane = thread % 4;
  // The swizzle of a row is that of the row 8 further. Chunks go up by exclusive ors.
  uint32_t const first = cute::cast_smem_ptr_to_uint(staged) + lane % 2 * 8 +
                         chunk_offset_bytes<kWarpgroupRows>(row, lane / 2);
  CUTE_UNROLL
  for (int i = 0; i < Traits::kHeadDimV / 16; ++i) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      uint32_t const target = (first ^ i % 4 * 32) + (i / 4 * kWarpgroupRows + 8 * r) * 128;
      asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(target),
                   "r"(pack_two<Out>(output(r, 4 * i), output(r, 4 * i + 2))),
                   "r"(pack_two<Out>(output(r, 4 * i + 1), output(r, 4 * i + 3)))
                   : "memory");
    }
  }
}

// FP8: O through the copy engine. The copy before has been read when this thread's group of copies
// has: it is thread 0 that issues them.
template <class Traits, class FragmentO>
CUTE_DEVICE void send_output(FwdStorage<Traits>& shared, FwdDeviceParams const& p,
                             FwdWork<Traits> const& work, int warpgroup, int thread,
                             FragmentO const& tOrO) {
  auto const id = NamedBarrier(int(NamedBarrier::kStagedFirst) + warpgroup);
  uint16_t* const staged = shared.staged[warpgroup];
  if (thread == 0) {
    cute::tma_store_wait<0>();
  }
  named_sync(id, kWarpgroupThreads);
  if (p.out_is_half) {
    write_staged<Traits, cutlass::half_t>(staged, thread, tOrO);
  } else {
    write_staged<Traits, cutlass::bfloat16_t>(staged, thread, tOrO);
  }
  fence_shared_for_async_proxy();
  named_sync(id, kWarpgroupThreads);
  if (thread == 0) {
    CUTE_UNROLL
    for (int column = 0; column < padded_columns(Traits::kHeadDimV); column += kSliceColumns) {
      store_box(p.o, staged + column * kWarpgroupRows, column, work.rows.head,
                work.place.first_q() + work.position_begin, work.place, work.place.end_q());
    }
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

// Consumer side: one lane of the four that share a row writes what there is of it beside O, if it
// is wanted: the LSE, the largest logit.
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
    int64_t const target = rows.offset + int64_t(row.head) * p.seqlen.q + row.offset;
    float const lse = softmax.lse(r, p.softmax_scale);
    p.lse[target] = Traits::kGeneral ? with_sink(lse, sinks[r]) : lse;
    if constexpr (Traits::kGeneral && !Traits::kFp8) {
      if (p.max_logits != nullptr) {
        p.max_logits[target] = softmax.row_max[r] * p.softmax_scale;
      }
    }
  }
}

// Copies the O that is staged out, then hands the Q buffer back to the producer. One thread runs
// this. Rows past the end of the sequence are dropped by the copy engine.
template <class Traits>
CUTE_DEVICE void store_output(FwdStorage<Traits>& shared, FwdDeviceParams const& p, int q_stage,
                              int warpgroup) {
  FwdWork<Traits> const& work = shared.work[q_stage][warpgroup];
  char const* const rows = reinterpret_cast<char const*>(shared.q[q_stage][warpgroup]);
  CUTE_UNROLL
  for (int column = 0; column < padded_columns(Traits::kHeadDimV); column += kSliceColumns) {
    store_box(p.o, rows + column * kWarpgroupRows * 2, column, work.rows.head,
              work.place.first_q() + work.position_begin, work.place, work.place.end_q());
  }
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

}  // namespace fa3
