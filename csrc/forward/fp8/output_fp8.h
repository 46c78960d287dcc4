// The outputs of FP8, whose O has 16 bits. kRegisters: from registers to global memory. kStaged and
// kSent: through a buffer in shared memory, which the consumers or the scale warp copy out. The
// buffer of Q is released once the scores have been computed.
//
// A thread has columns 4 j .. 4 j + 3 of every 16 columns (values_transposed.h), so the four
// lanes that share a row hold 32 bytes.
#pragma once

#include "forward/output_over_queries.h"

namespace fa3 {

// WHY: ptxas would keep values derived from the thread's number in registers over all tiles.
CUTE_DEVICE int recomputed(int thread) {
  asm volatile("" : "+r"(thread));
  return thread;
}

// ------------------------------------------------------------------------------------- kRegisters

template <class Traits>
struct OutputFromRegisters {
  template <class Softmax, class FragmentO>
  CUTE_DEVICE static void store(FwdStorage<Traits>& shared, FwdDeviceParams const& p,
                                RowWriter writer, Softmax const& softmax, float const (&sinks)[2],
                                FragmentO const& tOrO) {
    auto const [q_stage, warpgroup, thread] = writer;
    FwdWork<Traits> const& work = shared.work[q_stage][warpgroup];
    if (p.out_is_half) {
      write<cutlass::half_t>(p, work, thread, tOrO);
    } else {
      write<cutlass::bfloat16_t>(p, work, thread, tOrO);
    }
    store_lse<Traits>(p, work.rows, thread, softmax, sinks);
    store_largest<Traits>(p, work.rows, thread, softmax, thread % 4);
    release_queries(shared, q_stage, warpgroup, thread);
  }

  CUTE_DEVICE static void finish(int) {}

 private:
  template <class Out, class FragmentO>
  CUTE_DEVICE static void write(FwdDeviceParams const& p, FwdWork<Traits> const& work, int thread,
                                FragmentO const& tOrO) {
    auto const output = rows_view(tOrO);  // (2, (2, Dv / 8))
    int64_t const first = first_element(p, work);
    thread = recomputed(thread);
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

  // The index in O of the first element of a tile's rows.
  CUTE_DEVICE static int64_t first_element(FwdDeviceParams const& p, FwdWork<Traits> const& work) {
    int64_t batch = work.entry;
    int64_t row = work.position_begin;
    if (!Traits::kKind.is_dense() && p.is_packed()) {
      batch = 0;
      row += first_row_of_sequence(p, work);
    }
    return batch * p.out.batch_stride + row * p.out.row_stride + work.rows.head * p.out.head_stride;
  }
};

// --------------------------------------------------------------------------------- kStaged, kSent

// Writes O to the staging buffer. A thread's columns of every 16 are 8 bytes, next to those of the
// next lane. Rows r and r + 8 have the same swizzle; exclusive ors lead to the other chunks.
template <class Traits>
struct OutputStaging {
  template <class FragmentO>
  CUTE_DEVICE static void stage(FwdStorage<Traits>& shared, FwdDeviceParams const& p, int warpgroup,
                                int thread, FragmentO const& tOrO) {
    uint32_t const first = first_address(shared.staged[warpgroup], thread);
    if (p.out_is_half) {
      write<cutlass::half_t>(first, tOrO);
    } else {
      write<cutlass::bfloat16_t>(first, tOrO);
    }
    fence_shared_for_async_proxy();
  }

 private:
  CUTE_DEVICE static uint32_t first_address(uint16_t const* staged, int thread) {
    thread = recomputed(thread);
    thread %= unsigned(kWarpgroupThreads);  // known to be positive: divisions are shifts
    int const lane = thread % 4;
    return cute::cast_smem_ptr_to_uint(staged) + lane % 2 * 8 +
           chunk_offset_bytes<kWarpgroupRows>(fragment_row(thread), lane / 2);
  }

  template <class Out, class FragmentO>
  CUTE_DEVICE static void write(uint32_t first, FragmentO const& tOrO) {
    auto const output = rows_view(tOrO);  // (2, (2, Dv / 8))
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
};

// kStaged: each warpgroup copies its own O out. Thread 0 issues the copies; the buffer has been
// read when its bulk group is complete.
template <class Traits>
struct OutputStaged {
  template <class Softmax, class FragmentO>
  CUTE_DEVICE static void store(FwdStorage<Traits>& shared, FwdDeviceParams const& p,
                                RowWriter writer, Softmax const& softmax, float const (&sinks)[2],
                                FragmentO const& tOrO) {
    auto const [q_stage, warpgroup, thread] = writer;
    FwdWork<Traits> const& work = shared.work[q_stage][warpgroup];
    if (thread == 0) {
      cute::tma_store_wait<0>();
    }
    sync_warpgroup(warpgroup);
    OutputStaging<Traits>::stage(shared, p, warpgroup, thread, tOrO);
    sync_warpgroup(warpgroup);
    if (thread == 0) {
      copy_output(p, work, shared.staged[warpgroup], work.position_begin);
      cute::tma_store_arrive();
    }
    store_lse<Traits>(p, work.rows, thread, softmax, sinks);
    store_largest<Traits>(p, work.rows, thread, softmax, thread % 4);
    release_queries(shared, q_stage, warpgroup, thread);
  }

  // Shared memory is released when the CTA ends.
  CUTE_DEVICE static void finish(int thread) {
    if (thread == 0) {
      cute::tma_store_wait<0>();
    }
  }
};

// kSent: O and the LSE go to the buffers from which ResultSender copies them, once it has read
// those of the tile before. The largest logits, which few calls want, are stored here. WHY only two
// warpgroups: with three, head dim 64 loses 1 to 2 %, and 128 gains nothing.
template <class Traits>
struct OutputSent {
  template <class Softmax, class FragmentO>
  CUTE_DEVICE static void store(FwdStorage<Traits>& shared, FwdDeviceParams const& p,
                                RowWriter writer, Softmax const& softmax, float const (&sinks)[2],
                                FragmentO const& tOrO) {
    auto const [q_stage, warpgroup, thread] = writer;
    static_assert(Traits::kQStages == 2, "the number of a stage is the parity of its tile");
    shared.o_sent[warpgroup].wait(uint32_t(q_stage));
    if (int const r = thread % 4; r < 2) {
      shared.staged_lse[warpgroup][fragment_row(thread) + 8 * r] =
          lse_of_row<Traits>(p, softmax, sinks, r);
      store_largest<Traits>(p, shared.work[q_stage][warpgroup].rows, thread, softmax, r);
    }
    OutputStaging<Traits>::stage(shared, p, warpgroup, thread, tOrO);
    __syncwarp();
    if (thread % 32 == 0) {
      shared.o_staged[q_stage][warpgroup].arrive();
    }
    release_queries(shared, q_stage, warpgroup, thread);
  }

  CUTE_DEVICE static void finish(int) {}
};

}  // namespace fa3
