// The load warp: for each tile of keys, K and V once, then Q with its LSE and dO with its delta for
// each step, as far ahead as the buffers allow. One thread of it runs this.
#pragma once

#include "backward/epilogue.h"
#include "backward/step_ring.h"
#include "device/bulk_copy.h"
#include "device/cluster.h"
#include "device/row_copies.h"

namespace fa3 {

template <class Traits>
struct BwdProducer {
  using Element = typename Traits::Element;
  using Location = typename Traits::Location;

  using Steps = StepsOf<Traits>;

  static constexpr uint64_t kReadOnce = uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST);  // K, V
  static constexpr uint64_t kKeepInL2 =
      uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST);  // Q, dO: read by every CTA of the head

  BwdStorage<Traits>& shared;
  typename Traits::Params const& p;
  uint32_t count = 0;  // steps loaded

  CUTE_DEVICE BwdProducer(BwdStorage<Traits>& shared_, typename Traits::Params const& p_)
      : shared(shared_), p(p_) {}

  // INVARIANT: whatever this kernel reads or writes in global memory comes after the wait for
  // earlier launches: after this one, since all others wait for a step or for loads from here, or
  // after that of draw_number() or grant_turns(). Lists of a mask are older: the launch before this
  // one has waited for theirs.
  CUTE_DEVICE void run() {
    wait_for_earlier_launches();
    if constexpr (Traits::kSplit == BwdSplit::kKeys) {
      load_all_tiles();
    } else {
      load_only_tile();
    }
    allow_later_launches();
  }

 private:
  CUTE_DEVICE void load_only_tile() {
    BwdWorkOf<Traits> const work = shared.exchange.work;  // a copy, as below
    Steps steps(work);
    load_k(work, 0);
    load_q(steps);
    load_v(work);
    load_dout(steps);
    if constexpr (!Traits::kSplitsColumns) {
      load_other_keys(work);
    }
    ++count;
    for (steps.next(); steps.valid(); steps.next(), ++count) {
      load_q(steps);
      load_dout(steps);
    }
  }

  CUTE_DEVICE void load_all_tiles() {
    StepPublisher<Traits> publisher{shared};
    BwdWorkOf<Traits> work = next_work_with_steps(int(blockIdx.x));
    for (int tile = 0; work.has_keys(); ++tile) {
      work_slot(shared, tile) = work;
      // WHY a copy: nothing then waits for shared memory between two loads. General kernels have no
      // registers for it.
      if constexpr (Traits::kHasLists) {
        load_tile(publisher, work, tile);
      } else {
        load_tile(publisher, kServesPacked<Traits> ? work_slot(shared, tile) : work, tile);
      }
      work = next_work_with_steps(-1);
    }
    publisher.publish_end(count);
  }

  // The next tile of keys that has queries, or a work without keys. Where no query sees the keys,
  // it writes their zeros. WHY by ticket: tiles take different times. number: of the tile, if
  // known.
  CUTE_DEVICE BwdWorkOf<Traits> next_work_with_steps(int number) {
    for (;; number = -1) {
      if (p.is_deterministic) {
        number = draw_number(p);
      } else if (number < 0) {
        number = int(gridDim.x) + draw_number(p);
      }
      BwdWorkOf<Traits> const work = work_of_number<Traits>(p, number, 0);
      if (!work.has_keys() || work.has_steps()) {
        return work;
      }
      wait_for_q_stage();
      store_zeros<Traits>(shared.q[count % Traits::kQStages], work, p);
    }
  }

  // Loads in the order in which the consumers wait. A step is published before its loads wait for
  // buffers: K of the next tile may be loaded only while the consumers are in the step before.
  CUTE_DEVICE void load_tile(StepPublisher<Traits>& publisher, BwdWorkOf<Traits> const& work,
                             int tile) {
    Steps steps(work);
    publisher.publish(count, steps, tile, int(steps.tile(p)), true);
    shared.exchange.k_empty[key_buffer<Traits>(tile)].wait(key_phase<Traits>(tile) ^ 1);
    load_k(work, key_buffer<Traits>(tile));
    load_q(steps);
    shared.exchange.v_empty.wait(tile % 2 ^ 1);
    load_v(work);
    load_dout(steps);
    ++count;
    for (steps.next(); steps.valid(); steps.next(), ++count) {
      publisher.publish(count, steps, tile, int(steps.tile(p)), false);
      load_q(steps);
      load_dout(steps);
    }
  }

  CUTE_DEVICE void load_k(BwdWork const& work, int buffer) {
    load_keys<Traits::kKeySlice>(work, p.k, shared.k_full[buffer], shared.k[buffer], work.k_row,
                                 Traits::first_column(), Traits::k.key_columns());
  }

  CUTE_DEVICE void load_v(BwdWork const& work) {
    load_keys(work, p.v, shared.v_full, shared.v, work.k_row, Traits::first_column(),
              padded_columns(Traits::kHeadDimV));
  }

  // Loads `columns` columns of the keys from `row` on, slice by slice.
  template <int kSlice = kSliceColumns>
  CUTE_DEVICE void load_keys(BwdWork const& work, CUtensorMap const& map, Mbarrier& full,
                             Element* target, int row, int first_column, int columns) {
    full.arrive_and_expect_tx(Traits::kTileN * columns * sizeof(Element));
    CUTE_UNROLL
    for (int column = 0; column < columns; column += kSlice) {
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

  CUTE_DEVICE void wait_for_q_stage() {
    shared.q_empty[count % Traits::kQStages].wait(count / Traits::kQStages % 2 ^ 1);
  }

  CUTE_DEVICE void load_q(Steps const& steps) {
    int const i = count % Traits::kQStages;
    wait_for_q_stage();
    load_queries<Traits::kHeadDim>(p.q, shared.q_full[i], shared.q[i], steps);
    load_row_values(p.lse_log2, shared.q_full[i], shared.lse_log2[i], steps);
  }

  CUTE_DEVICE void load_dout(Steps const& steps) {
    int const i = count % Traits::kDoutStages;
    shared.dout_empty[i].wait(count / Traits::kDoutStages % 2 ^ 1);
    load_queries<Traits::kHeadDimV>(p.dout, shared.dout_full[i], shared.dout[i], steps);
    load_row_values(p.delta, shared.dout_full[i], shared.delta[i], steps);
  }

  static constexpr uint32_t kRowValueBytes = Traits::kTileM * sizeof(float);

  // Loads a tile of queries. The expected bytes include those of load_row_values().
  template <int kDim>
  CUTE_DEVICE void load_queries(CUtensorMap const& map, Mbarrier& full, Element* target,
                                Steps const& steps) {
    full.arrive_and_expect_tx(Traits::kTileM * padded_columns(kDim) * sizeof(Element) +
                              kRowValueBytes);
    BwdWork const& work = *steps.work;
    int const row = (kServesPacked<Traits> ? work.q_row : 0) + steps.m * Traits::kTileM;
    CUTE_UNROLL
    for (int column = 0; column < kDim; column += kSliceColumns) {
      load_box<Location>(
          map, mbarrier_word(full), kKeepInL2, target + column * Traits::kTileM,
          {Traits::first_column() + column, row, steps.head, Location{work.batch}, work.q_end});
    }
  }

  CUTE_DEVICE void load_row_values(float const* values, Mbarrier& full, float* target,
                                   Steps const& steps) {
    bulk_load(target, values + steps.tile(p) * Traits::kTileM, kRowValueBytes, full);
  }
};

}  // namespace fa3
