// Online softmax of FP8: as OnlineSoftmax (softmax.h), but scores have a scale for each block of
// keys, and so have the values that P is multiplied with.
//
// P(key) * scale of V is made in one exponential: with s the score in powers of two, all scales in
// it, and t = s + log2(scale of V), P becomes 2^(t - max t + 8): the 8 brings it into the range of
// e4m3, which ends at 448 = 2^8.8, so O need not be rescaled before a maximum has grown by 2^0.8.
// The sum of a row is that of 2^(s - max t): P over the scale of V.
#pragma once

#include "core/softmax_math.h"
#include "device/fragments.h"
#include "device/math.h"
#include "forward/scales.h"

namespace fa3 {

// P in registers, to the operand of PV (operand_a_layout_of_bytes).
template <class FragmentS, class FragmentP>
CUTE_DEVICE void pack_probabilities(FragmentS const& acc, FragmentP& operand) {
  auto fours = cute::recast<uint32_t>(operand);
  CUTE_UNROLL
  for (int i = 0; i < cute::size(fours); ++i) {
    int const row = i % 2;
    int const first = i / 2 * 8 + 2 * row;  // of a pair of groups of 8 columns
    fours(i) = pack_four_e4m3(acc(first), acc(first + 1), acc(first + 4), acc(first + 5));
  }
}

template <class Traits>
struct BlockSoftmax {
  using Config = typename Traits::Config;
  using Scales = KeyScales<Traits>;

  static constexpr int kRows = 2;
  static constexpr int kBlocks = Scales::kBlocks;
  static constexpr int kBlockColumns = kScaleBlockKeys / 4;  // of a thread
  static constexpr bool kMaximaFirst = true;
  // Then scores have their scales already (score.h).
  static constexpr bool kSoftcap = Config::kMask == MaskKind::kSoftcap;

  float row_max[kRows];  // of t: what is subtracted
  float row_sum[kRows];
  float rescale[kRows];
  float q_scale[kRows];  // of scores, in powers of two; with a softcap: of q alone
  bool any_rescale;
  float const scale_log2;

  CUTE_DEVICE BlockSoftmax(float scale_log2_, float, int) : scale_log2(scale_log2_) {}

  CUTE_DEVICE void reset(float const (&scales)[kRows]) {
    any_rescale = false;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      row_max[r] = -INFINITY;
      row_sum[r] = 0.f;
      q_scale[r] = kSoftcap ? scales[r] : scales[r] * scale_log2;
    }
  }

  template <bool kMasked, class Fragment>
  CUTE_DEVICE void update(Fragment& acc, Scales const& scales) {
    auto scores = rows_view(acc);  // (2, columns)
    update_max(scores, scales);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float const used = (kMasked ? finite_max(row_max[r]) : row_max[r]) - kOffsetLog2;
      float sums[2] = {row_sum[r] * rescale[r], 0.f};
      CUTE_UNROLL
      for (int b = 0; b < kBlocks; ++b) {
        float const factor = factor_of(r, b, scales);
        float const shift = scales.v_log2(b) - used;
        float const over_v = scales.over_v(b);
        CUTE_UNROLL
        for (int c = b * kBlockColumns; c < (b + 1) * kBlockColumns; ++c) {
          scores(r, c) = exp2_approx(scores(r, c) * factor + shift);
          sums[c % 2] += scores(r, c) * over_v;
        }
      }
      row_sum[r] = sums[0] + sums[1];
    }
  }

  // Before a softcap: the scales of q and k.
  template <class Fragment>
  CUTE_DEVICE void apply_scales(Fragment& acc, Scales const& scales) const {
    auto scores = rows_view(acc);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < kBlocks * kBlockColumns; ++c) {
        scores(r, c) *= q_scale[r] * scales.k(c / kBlockColumns);
      }
    }
  }

  template <class Fragment>
  CUTE_DEVICE void rescale_output(Fragment& acc) const {
    if (any_rescale) {
      multiply_rows(acc, rescale);
    }
  }

  template <class Fragment>
  CUTE_DEVICE void finish(Fragment& acc, float const (&sinks)[kRows]) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      row_sum[r] = quad_sum(row_sum[r]);
      float const sum = row_sum[r] + exp2_approx(sinks[r] * kLog2E - row_max[r]);
      rescale[r] = inverse_sum(sum) * (1.f / (1 << kOffsetLog2));
    }
    multiply_rows(acc, rescale);
    auto output = rows_view(acc);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (Config::kMask != MaskKind::kFull && row_sum[r] == 0.f) {
        cute::clear(output(r, cute::_));
      }
    }
  }

  // In natural logarithms, without a sink.
  CUTE_DEVICE float lse(int r, float) const {
    return log_sum_exp(row_max[r], row_sum[r], 1.f / kLog2E);
  }

 private:
  // Of the scores of a block, to powers of two.
  CUTE_DEVICE float factor_of(int r, int block, Scales const& scales) const {
    return kSoftcap ? scale_log2 : q_scale[r] * scales.k(block);
  }

  template <class Scores>
  CUTE_DEVICE void update_max(Scores const& scores, Scales const& scales) {
    bool grows = false;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float const old_max = row_max[r];
      float largest = old_max;
      CUTE_UNROLL
      for (int b = 0; b < kBlocks; ++b) {
        float const of_block = max_of_block(scores, r, b);
        largest = fmaxf(largest, of_block * factor_of(r, b, scales) + scales.v_log2(b));
      }
      float const new_max = quad_max(largest);
      bool const row_grows = new_max - old_max > Config::kLazyRescaleLog2;
      row_max[r] = row_grows ? new_max : old_max;
      rescale[r] = row_grows ? exp2_approx(old_max - new_max) : 1.f;
      grows = grows || row_grows;
    }
    any_rescale = __any_sync(0xffffffffu, grows);
  }

  template <class Scores>
  CUTE_DEVICE static float max_of_block(Scores const& scores, int r, int b) {
    float even = scores(r, b * kBlockColumns);
    float odd = scores(r, b * kBlockColumns + 1);
    CUTE_UNROLL
    for (int c = b * kBlockColumns + 2; c < (b + 1) * kBlockColumns; c += 2) {
      even = fmaxf(even, scores(r, c));
      odd = fmaxf(odd, scores(r, c + 1));
    }
    return fmaxf(even, odd);
  }
};

}  // namespace fa3
