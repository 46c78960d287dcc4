// ValuesKind::kTransposed: 8-bit operands of wgmma have to be contiguous along the summed
// dimension. For V that is the keys, but TMA loads rows of head_dim values. So two warps of the
// producer warpgroup transpose each K tile of V in shared memory, part by part, from the ring
// `v_raw` into `v`.
//
// A unit is 16 keys and 16 columns, read as two matrices of 8 keys x 8 pairs of columns. ldmatrix
// transposes them: a thread has the pairs (d, d + 1) of keys k, k + 1 from one and of keys k + 8, k
// + 9 from the other. Two byte permutes turn them into these four keys of d, and of d + 1.
//
// In every 16 keys the order is then k, k + 1, k + 8, k + 9 (k = 0, 2, 4, 6). In that order a
// thread's scores are the operand P of PV without a permutation (Fp8Softmax::pack).
//
// Even columns go to the first 8 rows of every 16, odd columns to the others: 8 consecutive rows
// are 8 different banks for stmatrix. For four columns of the accumulator a thread then has four
// consecutive columns of O (output_fp8.h).
#pragma once

#include "forward/fp8/compact_ring.h"
#include "forward/storage.h"

namespace fa3 {

// Tiles of rows in slices of kChunks chunks of 16 bytes, with the swizzle of that width. The
// swizzle of a row depends only on its last bits, which are the lane's own, so a lane moves between
// chunks and rows by constants.
template <int kRows, int kChunks>
struct SwizzledTile {
  static_assert(kChunks == 4 || kChunks == 8);
  static constexpr int kRowBytes = kChunks * 16;

  CUTE_DEVICE static int first(int row, int chunk) {
    int const swizzle = kChunks == 8 ? row % 8 : row / 2 % 4;
    return row * kRowBytes + (chunk ^ swizzle) * 16;
  }

  // The offset `rows` rows (a multiple of 8) and `chunk` chunks after `first`, which has none of
  // the bits of `chunk`.
  CUTE_DEVICE static int moved(int first, int rows, int chunk) {
    return (first ^ chunk % kChunks * 16) + (chunk / kChunks * kRows + rows) * kRowBytes;
  }
};

template <class Traits>
struct ValueTransposer {
  using Source = SwizzledTile<Traits::kValueKeys, Traits::kSlice / 16>;
  using Target = SwizzledTile<Traits::kHeadDimV, Traits::kNarrowV ? 4 : 8>;
  // A unit of this loop: 16 keys, 32 columns. A warp has every second group of 16 keys, and
  // processes the units of a part one or two at a time (24 to 56 registers): the next ones are read
  // before these are written.
  static constexpr int kGroups = Traits::kValueKeys / 16 / kTransposingWarps;
  static constexpr int kUnits = kGroups * (Traits::kHeadDimV / 32);
  static constexpr int kAtOnce = Traits::kHeadDimV > 128 ? 1 : 2;
  static_assert(kUnits % kAtOnce == 0);
  static_assert(Traits::kHeadDimV % 32 == 0);
  static_assert(Traits::kValueParts == 1 || Traits::kTileN == 128, "the keys of a slice");

  static constexpr int kRawStages = Traits::k.raw.stages;
  // Where registers are short, `target` and `raw_ring` are recomputed from the lane and from
  // `v_ring`.
  static constexpr bool kIsTight = Traits::kIsTight;
  static_assert(!kIsTight || Traits::kStages % kRawStages == 0);

  struct Registers {
    uint32_t pairs[kAtOnce][4];
  };

  FwdStorage<Traits>& shared;
  int source;  // offset of this lane's first row, in bytes
  int target;
  CompactRing<Traits::kQStages> q_ring;
  CompactRing<kRawStages> raw_ring;
  CompactRing<Traits::kStages> v_ring;

  CUTE_DEVICE ValueTransposer(FwdStorage<Traits>& shared_, int warp, int lane)
      : shared(shared_),
        source(Source::first(warp * 16 + lane % 16, lane / 16)),
        target(Target::first(lane, warp)) {}

  CUTE_DEVICE void run() {
    while (true) {
      shared.tile_known[q_ring.stage()].wait(q_ring.phase());
      FwdWork<Traits> const& work = shared.work[q_ring.stage()][0];
      if (!work.valid()) {
        return;
      }
      // WHY read once: when the last of V has been used, `work` may be overwritten.
      int tiles = work.all_key_count();
      CUTE_NO_UNROLL
      for (; tiles > 0; --tiles) {
        transpose_tile();
      }
      q_ring.advance();
    }
  }

 private:
  CUTE_DEVICE void transpose_tile() {
    CUTE_UNROLL
    for (int part = 0; part < Traits::kValueParts; ++part) {
      transpose_part(part);
    }
    fence_shared_for_async_proxy();
    __syncwarp();
    if (is_first_lane()) {
      shared.v_full[v_ring.stage()].arrive();
    }
    if (!kIsTight) {
      raw_ring.advance();
    }
    v_ring.advance();
  }

  CUTE_DEVICE void transpose_part(int part) {
    auto const raw = kIsTight ? CompactRing<kRawStages>{v_ring.index % (2 * kRawStages)} : raw_ring;
    int const raw_stage = raw.stage() * Traits::kValueParts + part;
    shared.v_raw_full[raw_stage].wait(raw.phase());
    char const* const in = reinterpret_cast<char const*>(shared.v_raw[raw_stage]);
    char* const out = reinterpret_cast<char*>(shared.v[v_ring.stage()]);
    // WHY: ptxas would keep addresses derived from these over all tiles, in local memory.
    asm volatile("" : "+r"(source), "+r"(target));
    if (kIsTight) {
      target = Target::first(lane_of_warp(), source / (16 * Source::kRowBytes));
    }
    int const target_of_part = target ^ part * (2 * kGroups * 16);
    Registers units[2];
    read(in, 0, units[0]);
    if (part == 0) {
      shared.v_empty[v_ring.stage()].wait(v_ring.phase() ^ 1);
    }
    CUTE_UNROLL
    for (int unit = 0; unit < kUnits; unit += kAtOnce) {
      int const now = unit / kAtOnce % 2;
      if (unit + kAtOnce < kUnits) {
        read(in, unit + kAtOnce, units[1 - now]);
      }
      write(units[now], out, target_of_part, unit);
    }
    __syncwarp();
    if (is_first_lane()) {
      shared.v_raw_empty[raw_stage].arrive();
    }
  }

  CUTE_DEVICE void read(char const* in, int first_unit, Registers& to) const {
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      int const group = (first_unit + i) % kGroups;
      int const columns = (first_unit + i) / kGroups * 32;
      char const* const row = in + Source::moved(source, 32 * group, columns / 16);
      cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<cute::uint128_t const*>(row), to.pairs[i][0],
                                    to.pairs[i][1], to.pairs[i][2], to.pairs[i][3]);
    }
  }

  CUTE_DEVICE void write(Registers const& from, char* out, int first, int first_unit) const {
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      int const group = (first_unit + i) % kGroups;
      int const columns = (first_unit + i) / kGroups * 32;
      char* const row = out + Target::moved(first, columns, 2 * group);
      auto const& pairs = from.pairs[i];
      cute::SM90_U32x4_STSM_N::copy(even_bytes(pairs[0], pairs[1]), odd_bytes(pairs[0], pairs[1]),
                                    even_bytes(pairs[2], pairs[3]), odd_bytes(pairs[2], pairs[3]),
                                    *reinterpret_cast<cute::uint128_t*>(row));
    }
  }

  CUTE_DEVICE static uint32_t even_bytes(uint32_t a, uint32_t b) {
    return __byte_perm(a, b, 0x6420);
  }
  CUTE_DEVICE static uint32_t odd_bytes(uint32_t a, uint32_t b) {
    return __byte_perm(a, b, 0x7531);
  }
};

}  // namespace fa3
