// Online softmax of FP8: as OnlineSoftmax (softmax.h), but P has to fit into e4m3, scores have
// scales, and so have the values that P is multiplied with.
//
// By block (kByBlock): with s the score in powers of two, all scales in it, and t = s + log2(scale
// of V), P is 2^(t - max t + 8), in one exponential; the sum of a row takes P over the scale of V.
// Else all keys of a sequence have one scale, that of K goes with that of q, that of V comes last,
// and t is s. The 8 brings P into the range of e4m3, which ends at 448 = 2^8.8, so O need not be
// rescaled before a maximum has grown by 2^0.8.
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

template <class Traits, bool kByBlock>
struct Fp8Softmax {
  using Config = typename Traits::Config;
  using Scales = cute::conditional_t<kByBlock, KeyScales, OneScale>;

  static constexpr int kRows = 2;
  static constexpr int kColumns = Traits::kTileN / 4;  // of a thread
  static constexpr int kBlockColumns = kByBlock ? kScaleBlockKeys / 4 : kColumns;
  static constexpr int kBlocks = kColumns / kBlockColumns;
  static constexpr float kOfSum = 1.f / (1 << kOffsetLog2);
  // Then scores have their scales already (score.h).
  static constexpr bool kSoftcap = Config::kMask == MaskKind::kSoftcap;

  float row_max[kRows];  // of t: what is subtracted
  float row_sum[kRows];
  float rescale[kRows];
  float q_scale[kRows];  // of scores, in powers of two; with a softcap: of q and k alone
  bool any_rescale;
  float const scale_log2;

  CUTE_DEVICE Fp8Softmax(float scale_log2_, float, int) : scale_log2(scale_log2_) {}

  // scales: of q; where all keys have one, of q times k.
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
    exponentiate<kMasked>(scores, scales);
  }

  // Before a softcap: the scales of q and k.
  template <class Fragment>
  CUTE_DEVICE void apply_scales(Fragment& acc, Scales const& scales) const {
    auto scores = rows_view(acc);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTE_UNROLL
      for (int b = 0; b < kBlocks; ++b) {
        float const factor = q_scale[r] * scales.of_scores(b).k;
        CUTE_UNROLL
        for (int c = b * kBlockColumns; c < (b + 1) * kBlockColumns; ++c) {
          scores(r, c) *= factor;
        }
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
  CUTE_DEVICE void finish(Fragment& acc, float const (&sinks)[kRows], float v_scale) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      row_sum[r] = quad_sum(row_sum[r]) * (kByBlock ? 1.f : kOfSum);
      float const sum = row_sum[r] + exp2_approx(sinks[r] * kLog2E - row_max[r]);
      rescale[r] = inverse_sum(sum) * kOfSum * v_scale;
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
  CUTE_DEVICE float factor_of(int r, ScoreScale const& scale) const {
    return kSoftcap ? scale_log2 : q_scale[r] * scale.k;
  }

  // WHY with no way around it for the usual case, that none grows: a branch cuts the softmax in
  // two, and ptxas (13.0) no longer runs the one part beside the other.
  template <class Scores>
  CUTE_DEVICE void update_max(Scores const& scores, Scales const& scales) {
    float largest[kRows] = {row_max[0], row_max[1]};
    CUTE_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      ScoreScale const scale = scales.of_scores(b);
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        float const of_block = max_of_block(scores, r, b);
        largest[r] = fmaxf(largest[r], of_block * factor_of(r, scale) + scale.v_log2);
      }
    }
    bool grows = false;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float const old_max = row_max[r];
      float const new_max = quad_max(largest[r]);
      bool const row_grows = new_max - old_max > Config::kLazyRescaleLog2;
      row_max[r] = row_grows ? new_max : old_max;
      rescale[r] = row_grows ? exp2_approx(old_max - new_max) : 1.f;
      grows = grows || row_grows;
    }
    any_rescale = __any_sync(0xffffffffu, grows);
  }

  template <bool kMasked, class Scores>
  CUTE_DEVICE void exponentiate(Scores& scores, Scales const& scales) {
    float used[kRows];
    float sums[kRows][2];
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      used[r] = (kMasked ? finite_max(row_max[r]) : row_max[r]) - kOffsetLog2;
      sums[r][0] = row_sum[r] * rescale[r];
      sums[r][1] = 0.f;
    }
    CUTE_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      ScoreScale const scale = scales.of_scores(b);
      float const over_v = scales.over_v(b);
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        float const factor = factor_of(r, scale);
        float const shift = scale.v_log2 - used[r];
        CUTE_UNROLL
        for (int c = b * kBlockColumns; c < (b + 1) * kBlockColumns; ++c) {
          scores(r, c) = exp2_approx(scores(r, c) * factor + shift);
          sums[r][c % 2] += scores(r, c) * over_v;
        }
      }
    }
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      row_sum[r] = sums[r][0] + sums[r][1];
    }
  }

  // In several chains: the latency of one is not hidden by the few warps of a scheduler.
  template <class Scores>
  CUTE_DEVICE static float max_of_block(Scores const& scores, int r, int b) {
    constexpr int kChains = kByBlock ? 2 : 4;
    float largest[kChains];
    CUTE_UNROLL
    for (int c = 0; c < kBlockColumns; ++c) {
      float const score = scores(r, b * kBlockColumns + c);
      float& chain = largest[c % kChains];
      chain = c < kChains ? score : fmaxf(chain, score);
    }
    CUTE_UNROLL
    for (int i = 1; i < kChains; ++i) {
      largest[0] = fmaxf(largest[0], largest[i]);
    }
    return largest[0];
  }
};

}  // namespace fa3
