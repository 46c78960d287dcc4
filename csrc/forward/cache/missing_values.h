// On a cache: clears the rows of V in shared memory that belong to no key of the sequence. Boxes
// load whatever the cache holds there, and 0 * NaN is NaN. Only the first K tile that a tile visits
// can have rows after the last key, and only the last one rows before the first key.
//
// WHY not gathered by the producer warp, as rows that do not exist are elsewhere: that takes 2.4 us
// a tile. One sequence of 993, 16353 keys: 9.6 -> 7.8, 31.1 -> 28.2 us (H100, 2026-11-26).
#pragma once

#include "forward/storage.h"

namespace fa3 {

// A consumer warpgroup clears for itself, before its product: each of several writes the same
// zeros, and the stage is filled again after all of them have read it.
template <class Traits>
struct MissingValues {
  static constexpr int kKeys = Traits::kTileN;
  static constexpr int kRowChunks = 8;  // chunks of 16 bytes in a row of a slice

  FwdStorage<Traits>& shared;
  CacheDeviceParams const& p;
  int warpgroup;
  int thread;

  // n: the K tile, whose V is the next one of the ring.
  CUTE_DEVICE void clear_after_end(CacheLocation const& at, int n,
                                   RingState<Traits::kStages> const& ring) const {
    int const end = at.slot + at.len.k - n * kKeys;
    if (end < kKeys) {
      clear(max_of(end, 0), kKeys, ring);
    }
  }

  CUTE_DEVICE void clear_before_begin(CacheLocation const& at, int n,
                                      RingState<Traits::kStages> const& ring) const {
    int const begin = at.slot - n * kKeys;
    if (begin > 0) {
      clear(0, min_of(begin, kKeys), ring);
    }
  }

 private:
  // Rows [begin, end). Gathered rows are zeros already.
  CUTE_DEVICE void clear(int begin, int end, RingState<Traits::kStages> const& ring) const {
    static_assert(Traits::kSlice * sizeof(typename Traits::Element) == 16 * kRowChunks);
    if (p.box_keys == 0) {
      return;
    }
    shared.v_full[ring.stage].wait(ring.phase);
    uint4* const chunks = reinterpret_cast<uint4*>(shared.v[ring.stage]);
    CUTE_NO_UNROLL
    for (int i = begin * kRowChunks + thread; i < end * kRowChunks; i += kWarpgroupThreads) {
      CUTE_UNROLL
      for (int slice = 0; slice < Traits::kColumnsV / Traits::kSlice; ++slice) {
        chunks[slice * kKeys * kRowChunks + i] = make_uint4(0, 0, 0, 0);
      }
    }
    fence_shared_for_async_proxy();
    sync_warpgroup(warpgroup);
  }
};

}  // namespace fa3
