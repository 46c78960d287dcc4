// ValuesKind::kConverted: K and V are e4m3 in global memory, Q and the GEMMs have 16 bits. The
// producer loads K and V into the rings `k_raw` and `v_raw`; a warpgroup of its own converts them,
// exactly, into the rings that the GEMMs read. Scales enter in fp32: that of K with the softmax
// scale, that of V where O is divided (ScalesKind::kHeads); those of pages here, where elements are
// rounded once more, unless scales are powers of two.
#pragma once

#include "device/math.h"
#include "forward/storage.h"

namespace fa3 {

// Four elements become two words of 16-bit ones: exactly, or times a factor.
struct NoFactor {
  template <class Element>
  CUTE_DEVICE void convert(uint32_t packed, uint32_t& low, uint32_t& high) const {
    convert_four_e4m3<Element>(packed, low, high);
  }
};

struct Factor {
  float value;

  template <class Element>
  CUTE_DEVICE void convert(uint32_t packed, uint32_t& low, uint32_t& high) const {
    scale_four_e4m3<Element>(packed, value, low, high);
  }
};

// The factor of a key in a K tile, and of a slice of its columns as loaded.
struct Unscaled {
  CUTE_DEVICE NoFactor of(int, int) const { return {}; }
};

struct ScaledByPage {
  float const* scales;  // one for each box of a K tile, or for each key
  FastDiv keys_of_scale;

  CUTE_DEVICE Factor of(int key, int) const { return {scales[keys_of_scale.div(key)]}; }
};

// 16 elements of e4m3 of a key become two chunks of 8 elements.
template <class Element>
struct ConvertedChunks {
  uint4 halves[2];

  template <class Factor>
  CUTE_DEVICE ConvertedChunks(uint4 raw, Factor factor) {
    uint32_t const words[4] = {raw.x, raw.y, raw.z, raw.w};
    uint32_t wide[8];
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      factor.template convert<Element>(words[i], wide[2 * i], wide[2 * i + 1]);
    }
    halves[0] = make_uint4(wide[0], wide[1], wide[2], wide[3]);
    halves[1] = make_uint4(wide[4], wide[5], wide[6], wide[7]);
  }
};

// Converts a K tile (keys, columns) from slices of kRawSlice e4m3 columns to slices of 64 16-bit
// columns; both are swizzled. In one step kThreads convert kRows rows of a slice: each thread reads
// a chunk of 16 bytes, and kAtOnce of them ahead.
template <class Element, int kKeys, int kRawSlice, int kRawColumns,
          int kThreads = kWarpgroupThreads, int kMostAtOnce = 4>
struct TileConverter {
  static constexpr int kChunks = kRawSlice / 16;
  static constexpr int kRows = kThreads / kChunks;
  static constexpr int kSteps = kKeys / kRows;
  static constexpr int kSlices = kRawColumns / kRawSlice;
  static constexpr int kAtOnce = min_of(kMostAtOnce, kSteps);
  static_assert(kKeys % kRows == 0 && kSteps % kAtOnce == 0 && kRawColumns % kRawSlice == 0);

  int row;     // the key of this thread's first chunk
  int source;  // that chunk, in bytes
  int target;  // the one of the two chunks that is stored first
  int to_other;
  // WHY: eight neighbouring threads of a row of 128 columns store to two slices, whose chunks of
  // the same number share banks.
  bool second_first;

  CUTE_DEVICE explicit TileConverter(int thread) {
    row = thread / kChunks;
    int const chunk = thread % kChunks;
    source = row * kRawSlice + (chunk ^ (kChunks == 8 ? row % 8 : row / 2 % 4)) * 16;
    second_first = chunk >= 4;
    int const wide = 2 * chunk % 8 + second_first;
    target = (2 * chunk / 8 * kKeys + row) * 128 + (wide ^ row % 8) * 16;
    to_other = (target ^ 16) - target;
  }

  template <class Scale>
  CUTE_DEVICE void run(char const* from, char* to, Scale const& scale) const {
    CUTE_UNROLL
    for (int slice = 0; slice < kSlices; ++slice) {
      convert_slice(from + source + slice * kKeys * kRawSlice,
                    to + target + slice * kKeys * kRawSlice * 2, scale, slice);
    }
  }

 private:
  template <class Scale>
  CUTE_DEVICE void convert_slice(char const* from, char* to, Scale const& scale, int slice) const {
    CUTE_NO_UNROLL
    for (int step = 0; step < kSteps; step += kAtOnce) {
      uint4 raw[kAtOnce];
      CUTE_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        raw[i] = *reinterpret_cast<uint4 const*>(from + (step + i) * kRows * kRawSlice);
      }
      CUTE_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        ConvertedChunks<Element> const wide(raw[i], scale.of(row + (step + i) * kRows, slice));
        char* const at = to + (step + i) * kRows * 128;
        *reinterpret_cast<uint4*>(at) = second_first ? wide.halves[1] : wide.halves[0];
        *reinterpret_cast<uint4*>(at + to_other) = second_first ? wide.halves[0] : wide.halves[1];
      }
    }
  }
};

// The converting warpgroup. K of the next K tile comes before V of this one, as the producer loads
// them.
template <class Traits>
struct KeyConverter {
  template <int kRawColumns>
  using OfTile =
      TileConverter<typename Traits::Element, Traits::kTileN, Traits::kRawSlice, kRawColumns>;

  FwdStorage<Traits>& shared;
  CacheDeviceParams const& p;
  OfTile<Traits::kRawColumns> of_keys;
  OfTile<Traits::kRawColumnsV> of_values;
  RingState<Traits::kKeyStages> k_raw;
  RingState<Traits::kValueStages> v_raw;
  RingState<Traits::kStages> k;
  RingState<Traits::kStages> v;

  CUTE_DEVICE KeyConverter(FwdStorage<Traits>& shared_, CacheDeviceParams const& p_, int thread)
      : shared(shared_), p(p_), of_keys(thread), of_values(thread) {}

  CUTE_DEVICE void run() {
    bool has_keys = convert_keys();
    CUTE_NO_UNROLL
    while (has_keys) {
      has_keys = convert_keys();
      convert_values();
    }
  }

 private:
  // False: there are no more K tiles.
  CUTE_DEVICE bool convert_keys() {
    int const stage = k_raw.stage;
    shared.k_raw_full[stage].wait(k_raw.phase);
    if (shared.keys_end[stage]) {
      return false;
    }
    shared.k_empty[k.stage].wait(k.phase ^ 1);
    convert(of_keys, shared.k_raw[stage], shared.k[k.stage], shared.k_scales[stage]);
    pass_on(shared.k_raw_empty[stage], shared.k_full[k.stage]);
    k_raw.advance();
    k.advance();
    return true;
  }

  CUTE_DEVICE void convert_values() {
    int const stage = v_raw.stage;
    shared.v_raw_full[stage].wait(v_raw.phase);
    shared.v_empty[v.stage].wait(v.phase ^ 1);
    convert(of_values, shared.v_raw[stage], shared.v[v.stage], shared.v_scales[stage]);
    pass_on(shared.v_raw_empty[stage], shared.v_full[v.stage]);
    v_raw.advance();
    v.advance();
  }

  // page_scales: those of the stage, if there are any.
  template <class Converter>
  CUTE_DEVICE void convert(Converter const& converter, void const* raw, void* wide,
                           float const* page_scales) const {
    char const* const from = static_cast<char const*>(raw);
    char* const to = static_cast<char*>(wide);
    if (p.has_page_scales()) {
      converter.run(from, to, ScaledByPage{page_scales, p.keys_of_scale});
    } else {
      converter.run(from, to, Unscaled{});
    }
  }

  CUTE_DEVICE static void pass_on(Mbarrier& raw_empty, Mbarrier& full) {
    fence_shared_for_async_proxy();
    __syncwarp();
    if (is_first_lane()) {
      raw_empty.arrive();
      full.arrive();
    }
  }
};

}  // namespace fa3
