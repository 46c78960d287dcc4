// Conversion of an e4m3 latent cache. Each output warpgroup converts its half of a K tile, times
// the scales of the keys, into the ring of 16-bit halves that S and its own PV read. This overlaps
// with S and the softmax of other warpgroups.
#pragma once

#include "forward/cache/keys_converted.h"
#include "mla/storage.h"

namespace fa3 {

// The scale of a key for each slice of 128 columns of a half.
struct ScaledByKey {
  float2 const* scales;

  CUTE_DEVICE Factor of(int key, int slice) const {
    return {slice == 0 ? scales[key].x : scales[key].y};
  }
};

// The first left stage of a tile holds Q instead of keys and needs no conversion.
template <class Traits, bool kIsUsed = Traits::kConverts>
struct HalfConverter {
  static constexpr int kStages = Traits::kStages;
  static_assert(kStages == 2 && Traits::kRightStages == 2 && Traits::kRawStages == 2);

  MlaStorage<Traits>& shared;
  int half;
  int thread;
  uint32_t filled = 0;    // stages, including those of Q; like the next four, it only grows
  uint32_t released = 0;  // stages
  uint32_t converted = 0;
  uint32_t tile = 0;
  uint32_t stored = 0;  // tiles
  int left = 0;         // K tiles of the current tile still to convert

  CUTE_DEVICE void start() { fill(); }

  // Call when the oldest stage has been read.
  CUTE_DEVICE void release() {
    ++released;
    fill();
  }

  // Call when the results of the oldest tile have been stored.
  CUTE_DEVICE void end_tile() {
    ++stored;
    fill();
  }

 private:
  CUTE_DEVICE void fill() {
    CUTE_NO_UNROLL
    while (filled - released < kStages) {
      bool const holds_queries = left == 0 && half == 0;
      if (left == 0 && !find_tile()) {
        return;
      }
      if (!holds_queries) {
        convert();
      }
      ++filled;
    }
  }

  // Returns false if no tile is left, or if the next one is published only after this warpgroup
  // stores an earlier one.
  CUTE_DEVICE bool find_tile() {
    if (tile - stored == Traits::kTileStages) {
      return false;
    }
    int const stage = tile % Traits::kTileStages;
    shared.work_full[stage].wait(tile / Traits::kTileStages % 2);
    auto const& work = shared.work[stage];
    if (!work.valid()) {
      return false;
    }
    left = work.keys.count();
    ++tile;
    return true;
  }

  CUTE_DEVICE void convert() {
    int const stage = half * kStages + filled % kStages;
    shared.raw_full[half].wait(converted % 2);
    shared.half_empty[stage].wait(filled / kStages % 2 ^ 1);
    // WHY: without this, values derived from the thread index stay in registers across all tiles.
    int own = thread;
    asm volatile("" : "+r"(own));
    TileConverter<typename Traits::Element, Traits::kTileN, Traits::kSliceV, Traits::kOutputColumns,
                  kWarpgroupThreads, 2>(own)
        .run(reinterpret_cast<char const*>(shared.raw[half]),
             reinterpret_cast<char*>(shared.halves[stage]), ScaledByKey{shared.scales[half]});
    fence_shared_for_async_proxy();
    __syncwarp();
    if (thread % 32 == 0) {
      shared.raw_empty[half].arrive();
      shared.half_full[stage].arrive();
    }
    ++converted;
    --left;
  }
};

// A 16-bit cache needs no conversion.
template <class Traits>
struct HalfConverter<Traits, false> {
  CUTE_DEVICE HalfConverter(MlaStorage<Traits>&, int, int) {}
  CUTE_DEVICE void start() {}
  CUTE_DEVICE void release() {}
  CUTE_DEVICE void end_tile() {}
};

}  // namespace fa3
