// The load warp: for each tile of keys, K and V once, then Q with its LSE and dO with its delta for
// each step, as far ahead as the buffers allow. One thread of it runs this.
#pragma once

#include "backward/epilogue.h"
#include "backward/next_work.h"
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
  RingState<Traits::kQStages> q_ring;
  RingState<Traits::kDoutStages> dout_ring;
  uint32_t step_count = 0;
  uint32_t bits = 0;

  CUTE_DEVICE BwdProducer(BwdStorage<Traits>& shared_, BwdDeviceParams const& p_)
      : shared(shared_), p(p_) {}

  // INVARIANT: whatever this kernel reads or writes in global memory comes after these loads, and so
  // after the wait for earlier launches; tickets and flags come after the wait in add_order.h.
  CUTE_DEVICE void run() {
    wait_for_earlier_launches();
    if constexpr (Traits::kSplit == BwdSplit::kProducts) {
      load_tile(shared.works[0], 0);
    } else {
      BwdWork work = next_work_with_steps(true);
      uint32_t tile = 0;
      for (; work.has_keys(); ++tile) {
        shared.works[tile % Traits::k.works()] = work;
        load_tile(shared.works[tile % Traits::k.works()], tile);
        work = next_work_with_steps(false);
      }
      publish({0, BwdStep::kNone});
    }
    allow_later_launches();
  }

  // The next tile of keys that has queries.
  CUTE_DEVICE BwdWork next_work_with_steps(bool is_first) {
    BwdWork work = next_work<Traits>(p, is_first);
    while (work.has_keys() && work.steps() == 0) {
      shared.q_empty[q_ring.stage].wait(q_ring.phase ^ 1);
      store_zeros<Traits>(shared.q[q_ring.stage], work, p);
      work = next_work<Traits>(p, false);
    }
    return work;
  }

  CUTE_DEVICE void publish(BwdStep step) {
    bool const is_none = step.tile == BwdStep::kNone;
    uint32_t const started_before = step_count > 1 ? bits << 1 & 16 : 0;
    bits = (bits << 1 & 6) | started_before | (step.tile & 1) | (step.is_first || is_none ? 8 : 0) |
           (is_none ? 32 : 0);
    step.bits = bits;
    shared.steps[step_count % kStepSlots] = step;
    shared.exchange.step_full[step_count % kStepSlots].arrive();
    ++step_count;
  }

  CUTE_DEVICE void publish_step(BwdSteps const& steps, int tile, bool is_first) {
    if constexpr (Traits::kSplit == BwdSplit::kKeys) {
      publish({0, tile, int(steps.tile(p)), steps.m, is_first, steps.is_last(),
               steps.is_masked<Traits>()});
    }
  }

  // Loads in the order in which the consumers wait.
  CUTE_DEVICE void load_tile(BwdWork const& work, uint32_t tile) {
    BwdSteps steps(work);
    publish_step(steps, tile, true);
    int const buffer = key_buffer<Traits>(tile);
    if constexpr (Traits::kSplit == BwdSplit::kKeys) {
      shared.exchange.k_empty[buffer].wait(key_phase<Traits>(tile) ^ 1);
    }
    load_keys(work, p.k, shared.k_full[buffer], shared.k[buffer], work.k_row, 0,
              padded_columns(Traits::kHeadDim));
    load_q(steps);
    if constexpr (Traits::kSplit == BwdSplit::kKeys) {
      shared.exchange.v_empty.wait(tile % 2 ^ 1);
    }
    load_keys(work, p.v, shared.v_full, shared.v, work.k_row, 0,
              padded_columns(Traits::kHeadDimV));
    load_dout(steps);
    if constexpr (Traits::kSplit == BwdSplit::kProducts) {
      load_other_keys(work);
    }
    for (steps.next(); steps.valid(); steps.next()) {
      publish_step(steps, tile, false);
      load_q(steps);
      load_dout(steps);
    }
  }

  // Loads `columns` columns of the keys from `row` on, slice by slice.
  CUTE_DEVICE void load_keys(BwdWork const& work, CUtensorMap const& map, Mbarrier& full,
                             Element* target, int row, int first_column, int columns) {
    full.arrive_and_expect_tx(Traits::kTileN * columns * sizeof(Element));
    CUTE_UNROLL
    for (int column = 0; column < columns; column += kSliceColumns) {
      load_box<Location>(
          map, mbarrier_word(full), kReadOnce, target + column * Traits::kTileN,
          {first_column + column, row, work.kv_head, Location{work.batch}, work.k_end});
    }
  }

  // Loads the columns of the other CTA's K that this CTA needs for its blocks of dQ.
  CUTE_DEVICE void load_other_keys(BwdWork const& work) {
    int const rank = cluster_rank();
    load_keys(work, p.k, shared.exchange.k_other_full, shared.exchange.k_other,
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
    BwdWork const& work = *steps.work;
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
