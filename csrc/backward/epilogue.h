// The results of a tile of keys: dK and dV from registers through shared memory to global memory,
// at the end; for consumers by keys also dQ, which is added to its accumulator at every step.
#pragma once

#include "backward/add_order.h"
#include "backward/step_ring.h"
#include "device/bulk_copy.h"
#include "device/fragments.h"
#include "device/math.h"
#include "device/row_copies.h"

namespace fa3 {

// Copies a slice of k.store_rows() rows of dK or dV to global memory, as part of the thread's
// current bulk group. TMA drops keys past the end of the sequence.
template <class Traits>
CUTE_DEVICE void store_rows(CUtensorMap const& map, typename Traits::Element const* slice,
                            BwdWork const& work, int row, int column) {
  using Location = typename Traits::Location;
  store_box<Location>(map, slice,
                      {Traits::first_column() + column, work.k_row + row, work.kv_head,
                       Location{work.batch}, work.k_end});
}

// A warp writes its 16 rows of dK or dV, scaled and rounded, to slices of kRows rows: each lane
// gives the address of one row of one of the four 8 x 8 blocks.
template <class Element, int kRows, int kDim, class Fragment>
CUTE_DEVICE void round_to_shared(char* slices, int first_row, int thread, float scale,
                                 Fragment& acc) {
  auto const words = [&](int i) {
    return pack_two<Element>(acc(2 * i) * scale, acc(2 * i + 1) * scale);
  };
  store_warpgroup_rows<kRows, kDim / 16>(words, slices, first_row, thread);
  fence_shared_for_async_proxy();
}

// By products, at the end: over the same rows of K or V. Then one lane issues the copies to global
// memory.
template <class Traits, int kDim, class Fragment>
CUTE_DEVICE void store_gradient(CUtensorMap const& map, typename Traits::Element* tile,
                                BwdWork const& work, int thread, float scale, Fragment& acc) {
  using Element = typename Traits::Element;
  round_to_shared<Element, Traits::kTileN, kDim>(reinterpret_cast<char*>(tile), 0, thread, scale,
                                                 acc);
  __syncwarp();
  if (thread % 32 == 0) {
    int const row = thread / 32 * kWarpRows;
    CUTE_UNROLL
    for (int column = 0; column < kDim; column += kSliceColumns) {
      store_rows<Traits>(map, tile + column * Traits::kTileN + row * kSliceColumns, work, row,
                         column);
    }
    cute::tma_store_arrive();
  }
}

// Waits for the copies that a lane has issued, since shared memory is released when the CTA ends.
CUTE_DEVICE void finish_stores(int thread) {
  if (thread % 32 == 0) {
    cute::tma_store_wait<0>();
  }
}

// Writes zeros for keys that no query sees, from a buffer of K. One thread runs this. WHY not a
// step with P = 0: it would read dO, and 0 * NaN is NaN.
template <class Traits>
CUTE_DEVICE void store_zeros(typename Traits::Element* zeros, BwdWork const& work,
                             BwdDeviceParams const& p) {
  constexpr int kRows = Traits::k.store_rows();
  constexpr int kWords = kRows * kSliceColumns * sizeof(typename Traits::Element) / sizeof(uint4);
  CUTE_NO_UNROLL
  for (int i = 0; i < kWords; ++i) {
    reinterpret_cast<uint4*>(zeros)[i] = make_uint4(0, 0, 0, 0);
  }
  fence_shared_for_async_proxy();
  wait_for_earlier_launches();
  CUTE_NO_UNROLL
  for (int row = 0; row < Traits::kTileN; row += kRows) {
    CUTE_NO_UNROLL
    for (int column = 0; column < Traits::kHeadDim; column += kSliceColumns) {
      store_rows<Traits>(p.dk, zeros, work, row, column);
    }
    CUTE_NO_UNROLL
    for (int column = 0; column < Traits::kHeadDimV; column += kSliceColumns) {
      store_rows<Traits>(p.dv, zeros, work, row, column);
    }
  }
  cute::tma_store_arrive();
  cute::tma_store_wait<0>();
}

// The store warp of one consumer warpgroup by keys, which sends on what the warpgroup stages, in
// the same order. One thread runs this.
template <class Traits>
struct BwdStoreWarp {
  using Element = typename Traits::Element;

  BwdStorage<Traits>& shared;
  BwdDeviceParams const& p;
  int const warpgroup;
  uint32_t phase = 0;

  CUTE_DEVICE void run() {
    for (uint32_t n = 0; !(wait_for_step(shared, n) & BwdStep::kNone); ++n) {
      BwdStep const step = step_slot(shared, n);
      BwdWork const& work = work_slot(shared, step.tile);
      bool const is_last = step.flags & BwdStep::kIsLast;
      if (is_last && warpgroup == 0) {  // its dQ is one step late
        store_gradients(work);
      }
      add_dq(step, work);
      if (is_last && warpgroup == 1) {
        store_gradients(work);
      }
    }
  }

 private:
  CUTE_DEVICE void store_gradients(BwdWork const& work) {
    store<Traits::kHeadDimV>(p.dv, work);
    store<Traits::kHeadDim>(p.dk, work);
  }

  template <int kDim>
  CUTE_DEVICE void store(CUtensorMap const& map, BwdWork const& work) {
    shared.exchange.staged[warpgroup].wait(phase);
    auto* const slices = reinterpret_cast<Element*>(shared.exchange.staging[warpgroup]);
    CUTE_UNROLL
    for (int column = 0; column < kDim; column += kSliceColumns) {
      store_rows<Traits>(map, slices + column * kWarpgroupRows, work, warpgroup * kWarpgroupRows,
                         column);
    }
    release();
  }

  // Adds the block of dQ of a step to the accumulator.
  CUTE_DEVICE void add_dq(BwdStep const& step, BwdWork const& work) {
    constexpr int kBlockFloats = Traits::kDq.block_floats();
    int64_t const block = int64_t(step.rows) * Traits::kWarpgroups + warpgroup;
    int const m = Traits::kHasLists ? int(step.flags >> BwdStep::kFirstRankBit) : step.m;
    DqAddition<Traits> const addition{p, work, m, step.rows, warpgroup};
    bool const follows = addition.follows_another();
    shared.exchange.staged[warpgroup].wait(phase);
    bool const is_first = !follows && addition.is_first();
    fence_global_for_async_proxy();
    float* const target = p.dq_sum + block * kBlockFloats;
    auto const* const source = reinterpret_cast<float*>(shared.exchange.staging[warpgroup]);
    if (is_first) {
      bulk_store(target, source, kBlockFloats * sizeof(float));
    } else {
      bulk_add(target, source, kBlockFloats * sizeof(float));
    }
    release();
    if (is_first || p.is_deterministic) {
      wait_for_bulk_writes();
      fence_global_for_async_proxy();
      addition.publish(is_first);
    }
  }

  // The buffer is empty when the copies from it have read it.
  CUTE_DEVICE void release() {
    cute::tma_store_arrive();
    cute::tma_store_wait<0>();
    shared.exchange.staging_empty[warpgroup].arrive();
    phase ^= 1;
  }
};

}  // namespace fa3
