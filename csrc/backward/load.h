// The producer warp: loads K and V once, then Q with its LSE and dO with its delta for each step,
// as far ahead as the rings allow. One thread of it runs this.
#pragma once

#include "backward/storage.h"
#include "backward/work.h"
#include "device/bulk_copy.h"
#include "device/cluster.h"
#include "device/row_copies.h"

namespace fa3 {

template <class Traits>
struct BwdProducer {
  using Element = typename Traits::Element;
  using Location = typename Traits::Location;

  static constexpr uint64_t kReadOnce = uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST);  // K, V
  static constexpr uint64_t kKeepInL2 =
      uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST);  // Q, dO: read by every CTA of the head

  BwdStorage<Traits>& shared;
  BwdDeviceParams const& p;
  BwdWork const work;
  RingState<Traits::kQStages> q_ring;
  RingState<Traits::kDoutStages> dout_ring;

  CUTE_DEVICE BwdProducer(BwdStorage<Traits>& shared_, BwdDeviceParams const& p_)
      : shared(shared_), p(p_), work(shared_.work) {}

  // Loads in the order in which the consumers wait. INVARIANT: whatever this kernel reads or writes
  // in global memory comes after these loads, and so after the wait for earlier launches; the
  // ticket and the flags come after the wait in add_order.h.
  CUTE_DEVICE void run() {
    wait_for_earlier_launches();
    BwdSteps steps(work);
    load_keys(p.k, shared.k_full, shared.k, work.k_row, 0, padded_columns(Traits::kHeadDim));
    load_q(steps);
    load_keys(p.v, shared.v_full, shared.v, work.k_row, 0, padded_columns(Traits::kHeadDimV));
    load_dout(steps);
    if constexpr (Traits::kSplit == BwdSplit::kProducts) {
      load_other_keys();
    }
    for (steps.next(); steps.valid(); steps.next()) {
      load_q(steps);
      load_dout(steps);
    }
    allow_later_launches();
  }

  // Loads `columns` columns of the keys from `row` on, slice by slice.
  CUTE_DEVICE void load_keys(CUtensorMap const& map, Mbarrier& full, Element* target, int row,
                             int first_column, int columns) {
    full.arrive_and_expect_tx(Traits::kTileN * columns * sizeof(Element));
    CUTE_UNROLL
    for (int column = 0; column < columns; column += kSliceColumns) {
      load_box<Location>(
          map, mbarrier_word(full), kReadOnce, target + column * Traits::kTileN,
          {first_column + column, row, work.kv_head, Location{work.batch}, work.k_end});
    }
  }

  // Loads the columns of the other CTA's K that this CTA needs for its blocks of dQ.
  CUTE_DEVICE void load_other_keys() {
    int const rank = cluster_rank();
    load_keys(p.k, shared.exchange.k_other_full, shared.exchange.k_other,
              work.k_row + (rank == 0 ? Traits::kTileN : -Traits::kTileN),
              BwdExchange<Traits>::other_column(rank), Traits::kOtherColumns);
  }

  CUTE_DEVICE void load_q(BwdSteps const& steps) {
    int const i = q_ring.stage;
    shared.q_empty[i].wait(q_ring.phase ^ 1);
    load_queries<Traits::kHeadDim>(p.q, shared.q_full[i], shared.q[i], steps);
    load_row_values(p.lse_log2, shared.q_full[i], shared.lse_log2[i], steps);
    q_ring.advance();
  }

  CUTE_DEVICE void load_dout(BwdSteps const& steps) {
    int const i = dout_ring.stage;
    shared.dout_empty[i].wait(dout_ring.phase ^ 1);
    load_queries<Traits::kHeadDimV>(p.dout, shared.dout_full[i], shared.dout[i], steps);
    load_row_values(p.delta, shared.dout_full[i], shared.delta[i], steps);
    dout_ring.advance();
  }

 private:
  static constexpr uint32_t kRowValueBytes = Traits::kTileM * sizeof(float);

  // Loads a tile of queries. The expected bytes include those of load_row_values().
  template <int kDim>
  CUTE_DEVICE void load_queries(CUtensorMap const& map, Mbarrier& full, Element* target,
                                BwdSteps const& steps) {
    full.arrive_and_expect_tx(Traits::kTileM * padded_columns(kDim) * sizeof(Element) +
                              kRowValueBytes);
    int const row = (kServesPacked<Traits> ? work.q_row : 0) + steps.m * Traits::kTileM;
    CUTE_UNROLL
    for (int column = 0; column < kDim; column += kSliceColumns) {
      load_box<Location>(map, mbarrier_word(full), kKeepInL2, target + column * Traits::kTileM,
                         {column, row, steps.head, Location{work.batch}, work.q_end});
    }
  }

  CUTE_DEVICE void load_row_values(float const* values, Mbarrier& full, float* target,
                                   BwdSteps const& steps) {
    bulk_load(target, values + steps.tile(p) * Traits::kTileM, kRowValueBytes, full);
  }
};

}  // namespace fa3
