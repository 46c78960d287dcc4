// K and V loaded by TMA: one box for each slice of columns. Rows after the end of a
// sequence are filled with zeros (RowDims in launch/tensor_map.h). One thread runs this.
#pragma once

#include "device/barriers.h"
#include "device/row_copies.h"
#include "forward/work.h"

namespace fa3 {

CUTE_DEVICE uint64_t* mbarrier_word(Mbarrier& barrier) {
  return reinterpret_cast<uint64_t*>(&barrier);
}

// K and V are read by many CTAs, Q by one.
constexpr uint64_t kKeepInL2 = uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST);
constexpr uint64_t kUsualInL2 = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
constexpr uint64_t kReadOnce = uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST);

template <class Traits>
struct TmaKeys {
  // Arrivals at the barrier of a loaded stage.
  CUTE_DEVICE static constexpr int arrivals(FwdDeviceParams const&) { return 1; }

  // What a reader does after it has waited for a stage.
  CUTE_DEVICE static void after_wait(FwdDeviceParams const&) {}

  // The n-th kKeys keys of a tile's sequence and KV head, as (kKeys, kColumns) in slices.
  template <int kColumns, int kKeys>
  CUTE_DEVICE static void load(CUtensorMap const& map, Mbarrier& full,
                               typename Traits::ElementKv* target, FwdWork<Traits> const& work,
                               int n) {
    full.arrive_and_expect_tx(kKeys * kColumns * sizeof(typename Traits::ElementKv));
    CUTE_UNROLL
    for (int column = 0; column < kColumns; column += Traits::kSlice) {
      load_box<typename Traits::Location>(
          map, mbarrier_word(full), kKeepInL2, target + column * kKeys,
          {ColumnsOf<Traits>::first_column() + column, work.location.first_k() + n * kKeys,
           work.kv_head, work.location, work.location.end_k()});
    }
  }
};

}  // namespace fa3
