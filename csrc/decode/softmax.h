// Online softmax of S^T (paper, section 2.3). A column is a row of Q, and its keys are spread over
// eight lanes of each of eight warps. A row has one maximum per K tile, over all its keys; its sum
// stays per thread until the end of the tile.
#pragma once

#include "core/softmax_math.h"
#include "decode/storage.h"
#include "device/math.h"

namespace fa3 {

// Synchronises both consumer warpgroups.
CUTE_DEVICE void sync_consumers() {
  named_sync(NamedBarrier::kWarpgroupFirst, 2 * kWarpgroupThreads);
}

// Coordinates of a consumer thread in S^T. Its keys are first_key() and first_key() + 8 of a K
// tile; row_of() gives the row of Q of each of its columns.
struct DecodeThread {
  int warp;  // 0 to 7
  int lane;
  int key_warp;  // 0 to 7, or to 3 where two warps have the same keys

  CUTE_DEVICE int first_key() const { return key_warp * 16 + lane / 4; }
  CUTE_DEVICE int row_of(int column) const { return column / 2 * 8 + lane % 4 * 2 + column % 2; }
};

// Maps floats to integers in the same order.
CUTE_DEVICE int ordered_int(float x) {
  int const bits = __float_as_int(x);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

CUTE_DEVICE float ordered_float(int x) { return __int_as_float(x ^ ((x >> 31) & 0x7fffffff)); }

// Coordinates of element i of a thread's S^T or O^T: a pair of columns of its first key or row,
// then of its second.
CUTE_DEVICE constexpr int column_of_element(int i) { return i / 4 * 2 + i % 2; }
CUTE_DEVICE constexpr int half_of_element(int i) { return i / 2 % 2; }

template <class Traits, int kRows>
struct DecodeSoftmax {
  static constexpr int kColumns = kRows / 4;  // per thread
  // With e4m3, P is fp16 scaled up to 2^15, so that small values keep their bits.
  static constexpr float kOffsetLog2 = Traits::kConverts ? 15.f : 0.f;

  DecodeStorage<Traits>& shared;
  DecodeThread at;
  float scale_log2;
  // Which P and which maxima this warpgroup uses. On a latent cache each warpgroup has its own,
  // otherwise both share the first.
  int buffer;
  float most[kColumns];  // largest scores so far
  float sum[kColumns];   // sums over this thread's keys

  CUTE_DEVICE DecodeSoftmax(DecodeStorage<Traits>& shared_, DecodeThread at_, float scale_log2_)
      : shared(shared_),
        at(at_),
        scale_log2(scale_log2_),
        buffer(Traits::kIsLatent ? at_.warp / kWarpgroupWarps : 0) {
    CUTE_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      most[c] = -INFINITY;
      sum[c] = 0.f;
    }
  }

  // Raises the maxima of the K tile to those of this warp's keys.
  template <class Scores>
  CUTE_DEVICE void raise_maxima(Scores const& scores) const {
    float now[kColumns];
    CUTE_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      int const i = c / 2 * 4 + c % 2;
      now[c] = fmaxf(scores(i), scores(i + 2));
    }
    over_lanes<16, kColumns>(
        now, 0, [](float a, float b) { return fmaxf(a, b); },
        [&](int row, float x) { atomicMax(&maxima()[row], ordered_int(x)); });
  }

  // Replaces S of a K tile by P, in fp32, once all warps have raised the maxima. Rescales O of the
  // earlier K tiles, also by `factor`. P of a column without a visible key so far is 0.
  template <class Scores, class Sums, int kParts>
  CUTE_DEVICE void update(Scores& scores, Sums (&output)[kParts], float factor) {
    CUTE_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      float const next = ordered_float(maxima()[at.row_of(c)]);
      float const used = finite_max(next) * scale_log2 - kOffsetLog2;
      float const shrink = exp2_approx((most[c] - finite_max(next)) * scale_log2);
      most[c] = next;
      int const i = c / 2 * 4 + c % 2;
      scores(i) = exp2_approx(fmaf(scores(i), scale_log2, -used));
      scores(i + 2) = exp2_approx(fmaf(scores(i + 2), scale_log2, -used));
      sum[c] = sum[c] * shrink + scores(i) + scores(i + 2);
      CUTE_UNROLL
      for (int part = 0; part < kParts; ++part) {
        output[part](i) *= shrink * factor;
        output[part](i + 2) *= shrink * factor;
      }
    }
  }

  // Stores P in shared memory, in blocks of 8 rows and 8 keys.
  template <class Scores>
  CUTE_DEVICE void store(Scores const& scores) const {
    using Element = typename Traits::Element;
    int const blocks = at.first_key() / 8 * (kRows / 8);
    char* const target = reinterpret_cast<char*>(shared.p[buffer]) + blocks * 128 + at.lane * 4;
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); i += 2) {
      int const block = half_of_element(i) * (kRows / 8) + i / 4;
      *reinterpret_cast<uint32_t*>(target + block * 128) =
          pack_two<Element>(scores(i), scores(i + 1));
    }
  }

  // Adds up the sums over a warp's keys in a fixed order and stores them in shared memory.
  CUTE_DEVICE void store_sums() {
    over_lanes<16, kColumns>(
        sum, 0, [](float a, float b) { return a + b; },
        [&](int row, float x) { shared.sums[at.warp][row] = x; });
  }

  CUTE_DEVICE int* maxima() const { return shared.most + buffer * kRows; }

  // Makes the sums and O of both warpgroups refer to their common maximum.
  template <class Sums, int kBlocks>
  CUTE_DEVICE void refer_to_common(Sums (&output)[kBlocks]) {
    CUTE_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      int const row = at.row_of(c);
      float const common =
          fmaxf(ordered_float(shared.most[row]), ordered_float(shared.most[kRows + row]));
      float const factor = exp2_approx((most[c] - finite_max(common)) * scale_log2);
      sum[c] *= factor;
      int const i = c / 2 * 4 + c % 2;
      CUTE_UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        CUTE_UNROLL
        for (int j = i; j <= i + 2; j += 2) {
          output[block](j) = factor == 0.f ? 0.f : output[block](j) * factor;
        }
      }
    }
  }

 private:
  // Reduces the values of the eight lanes that share columns, in place. Each step halves the
  // columns that a lane holds, until few are left; one lane then calls visit(row, value) for each.
  template <int kDistance, int kLeft, class Combine, class Visit>
  CUTE_DEVICE void over_lanes(float (&x)[kColumns], int first, Combine const& combine,
                              Visit const& visit) const {
    bool const is_upper = (at.lane & kDistance) != 0;
    if constexpr (kDistance < 4) {
      constexpr int kSame = kColumns >= 8 ? 0 : kColumns == 4 ? 4 : 12;  // lanes with equal x
      if ((at.lane & kSame) == 0) {
        CUTE_UNROLL
        for (int c = 0; c < kLeft; ++c) {
          visit(at.row_of(first + c), x[c]);
        }
      }
    } else if constexpr (kLeft > 1) {
      constexpr int kHalf = kLeft / 2;
      CUTE_UNROLL
      for (int c = 0; c < kHalf; ++c) {
        float const given = is_upper ? x[c] : x[c + kHalf];
        float const kept = is_upper ? x[c + kHalf] : x[c];
        x[c] = combine(kept, __shfl_xor_sync(0xffffffffu, given, kDistance));
      }
      over_lanes<kDistance / 2, kHalf>(x, first + (is_upper ? kHalf : 0), combine, visit);
    } else {
      x[0] = combine(x[0], __shfl_xor_sync(0xffffffffu, x[0], kDistance));
      over_lanes<kDistance / 2, 1>(x, first, combine, visit);
    }
  }
};

}  // namespace fa3
