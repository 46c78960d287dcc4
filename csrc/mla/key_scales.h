// The producer warp that reads the scales of the keys of an e4m3 latent cache.
#pragma once

#include "forward/cache/keys_pages.h"
#include "mla/storage.h"

namespace fa3 {

// A lane handles two keys of each K tile. It prefetches the scales of the next K tile, and the page
// ids of the one after that.
template <class Traits>
struct KeyScales {
  using Work = FwdWork<Traits>;
  using Keys = PagedKeys<Traits>;
  static constexpr int kKeys = Traits::kTileN / 32;  // per lane

  struct Ids {
    int page[kKeys];
  };

  struct Scales {
    float4 by_key[kKeys];  // one scale per 128 columns
  };

  MlaStorage<Traits>& shared;
  typename Traits::Params const& p;

  CUTE_DEVICE void run() {
    RingState<Traits::kTileStages> tiles;
    uint32_t phase = 1;
    CUTE_NO_UNROLL
    while (true) {
      shared.work_full[tiles.stage].wait(tiles.phase);
      Work const& work = shared.work[tiles.stage];
      if (!work.valid()) {
        return;
      }
      publish_keys(KeySource::of(work), work.keys.visits(), phase);
      tiles.advance();
    }
  }

 private:
  // Visits the K tiles from last to first.
  CUTE_DEVICE void publish_keys(KeySource const& from, KeyRange<Traits> const keys,
                                uint32_t& phase) {
    int at = keys.tile(keys.first()) * Traits::kTileN + lane_of_warp();
    Scales scales = scales_at(from, at, ids_at(from, at));
    Ids ids = ids_at(from, at - Traits::kTileN);
    CUTE_NO_UNROLL
    for (int n = keys.first(); n >= keys.last(); keys.advance(n)) {
      at -= Traits::kTileN;
      Scales const next = scales_at(from, at, ids);
      ids = ids_at(from, at - Traits::kTileN);
      publish(scales, phase);
      phase ^= 1;
      scales = next;
    }
  }

  // Page ids, or the invalid id p.entries where there is no key. `at` may be negative.
  CUTE_DEVICE Ids ids_at(KeySource const& from, int at) const {
    Ids ids;
    CUTE_UNROLL
    for (int i = 0; i < kKeys; ++i) {
      int const slot = at + 32 * i;
      ids.page[i] = from.has(slot) ? Keys::entry_of(p, from, slot) : p.entries;
    }
    return ids;
  }

  // Four scales per key, 0 where there is no key. They are equal if the key has only one scale.
  CUTE_DEVICE Scales scales_at(KeySource const& from, int at, Ids const& ids) const {
    ScaleView const& view = p.key_scale;
    Scales scales;
    CUTE_UNROLL
    for (int i = 0; i < kKeys; ++i) {
      float4& own = scales.by_key[i];
      own =
          view.data == nullptr ? make_float4(1.f, 1.f, 1.f, 1.f) : make_float4(0.f, 0.f, 0.f, 0.f);
      if (view.data != nullptr && uint32_t(ids.page[i]) < uint32_t(p.entries)) {
        float const* const scale = view.data + ids.page[i] * view.batch_stride +
                                   Keys::row_of(p, from, at + 32 * i) * view.head_stride;
        own = make_float4(scale[0], scale[view.block_stride], scale[2 * view.block_stride],
                          scale[3 * view.block_stride]);
      }
    }
    return scales;
  }

  CUTE_DEVICE void publish(Scales const& scales, uint32_t phase) {
    CUTE_UNROLL
    for (int half = 0; half < Traits::kRawStages; ++half) {
      shared.raw_empty[half].wait(phase);
      CUTE_UNROLL
      for (int i = 0; i < kKeys; ++i) {
        float4 const& own = scales.by_key[i];
        shared.scales[half][32 * i + lane_of_warp()] =
            half == 0 ? make_float2(own.x, own.y) : make_float2(own.z, own.w);
      }
      __syncwarp();
      if (is_first_lane()) {
        shared.raw_full[half].arrive();
      }
    }
  }
};

}  // namespace fa3
