// Online softmax for e4m3: as OnlineSoftmax (softmax.h), but P has to fit into e4m3, and scores and
// values have scales.
//
// Let s be the score in powers of two, including the scales of q and k, and t = s + log2(scale of
// V). P is 2^(t - max t + 8), in one exponential; the sum of a row takes P / scale of V. The 8
// moves P into the range of e4m3, which ends at 448 = 2^8.8, so O need not be rescaled before a
// maximum has grown by 2^0.8. Sums and O keep the factor 2^8 until the end.
//
// P of the maximum itself is exact. Where a grown maximum is not adopted, the dominant key may lose
// up to 2^-4 of its P, so that is done only in rows whose sum no single key dominates.
#pragma once

#include "core/softmax_math.h"
#include "device/fragments.h"
#include "device/gemm.h"
#include "device/math.h"
#include "forward/fp8/scales.h"

namespace fa3 {

// The largest scores of a thread's two rows, in powers of two. WHY not from the maxima that are
// subtracted: those have the scales of V, and may be below the true ones.
template <bool kIsWanted>
struct LargestScores {
  float most[2];

  CUTE_DEVICE void reset() { most[0] = most[1] = -INFINITY; }
  CUTE_DEVICE void add(int r, float score) { most[r] = fmaxf(most[r], score); }
  // The four lanes of a row share its maximum.
  CUTE_DEVICE void finish() {
    most[0] = quad_max(most[0]);
    most[1] = quad_max(most[1]);
  }
  CUTE_DEVICE float of(int r) const { return r == 0 ? most[0] : most[1]; }
};

template <>
struct LargestScores<false> {
  CUTE_DEVICE void reset() {}
  CUTE_DEVICE void add(int, float) {}
  CUTE_DEVICE void finish() {}
  CUTE_DEVICE float of(int) const { return -INFINITY; }
};

template <class Traits>
struct Fp8Softmax {
  static constexpr FwdConfig k = Traits::k;
  static constexpr int kRows = 2;
  static constexpr int kColumns = Traits::kTileN / 4;  // a thread has in a row
  static constexpr float kInverseOffset = 1.f / (1 << kOffsetLog2);
  // For a row whose largest P so far is 2^kOffsetLog2.
  static constexpr float kLeastLazySum = 8.f * (1 << kOffsetLog2);
  static constexpr bool kIsLazy = k.measured.lazy_rescale_log2 > 0.f;
  // Sums are added after rescale_output(). WHY: otherwise ptxas (13.0) interleaves them with the
  // exponentials, each waiting for one, and packs P after all of them (head dim 256 12 % slower;
  // H200, 2026-11-23). WHY not always: 2 to 7 % slower where GEMMs overlap the softmax of the
  // same warpgroup.
  static constexpr bool kSumsLast = !k.is_skewed();
  // scale_scores() has then applied the scales already.
  static constexpr bool kSoftcap = Traits::kKind.has_softcap();

  float row_max[kRows];  // the maximum of t, which is subtracted from t
  float row_sum[kRows];
  float rescale[kRows];
  float q_scale[kRows];  // scale of scores, in powers of two; with a softcap that of q
  bool any_rescale;
  float lazy_log2[kRows];    // a maximum that has not grown by more is not adopted
  float earlier_sum[kRows];  // without the last K tile
  LargestScores<Traits::kHasRowOptions> largest;
  float const scale_log2;

  CUTE_DEVICE Fp8Softmax(float scale_log2_, float, int) : scale_log2(scale_log2_) {}

  // scales: those of q.
  CUTE_DEVICE void reset(float const (&scales)[kRows]) {
    any_rescale = false;
    largest.reset();
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      lazy_log2[r] = 0.f;
      row_max[r] = -INFINITY;
      row_sum[r] = 0.f;
      q_scale[r] = at_least(kSoftcap ? scales[r] : scales[r] * scale_log2, kLeastScoreScale);
    }
  }

  // hook: called between the maxima and the exponentials.
  template <bool kMasked, class Fragment, class Hook>
  CUTE_DEVICE void update(Fragment& acc, KeyScale const& scale, Hook const& hook) {
    auto scores = rows_view(acc);  // (2, columns)
    update_max(scores, scale);
    hook();
    exponentiate<kMasked>(scores, scale);
    if (!kSumsLast) {
      add_to_sums(acc, scale);
    }
  }

  // Called after update() and rescale_output(). acc: P.
  template <class Fragment>
  CUTE_DEVICE void complete_sums(Fragment& acc, KeyScale const& scale) {
    if (kSumsLast) {
      add_to_sums(acc, scale);
    }
  }

  // Packs P, in the registers of S, into the operand of PV (operand_a_layout_of_bytes).
  template <class FragmentS, class FragmentP>
  CUTE_DEVICE static void pack(FragmentS const& acc, FragmentP& operand) {
    auto fours = cute::recast<uint32_t>(operand);
    CUTE_UNROLL
    for (int i = 0; i < cute::size(fours); ++i) {
      int const row = i % 2;
      int const first = i / 2 * 8 + 2 * row;  // the first value in a pair of groups of 8 columns
      fours(i) = pack_four_e4m3(acc(first), acc(first + 1), acc(first + 4), acc(first + 5));
    }
  }

  // With a softcap: multiplies by the scales of q and k.
  CUTE_DEVICE void scale_scores(float (&scales)[kRows], KeyScale const& scale) const {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      scales[r] *= q_scale[r] * scale.k;
    }
  }

  // scale: that of the last K tile. INVARIANT: what happens to a row depends on no other row, so
  // that its bits are the same whichever rows share a warp.
  template <class Fragment>
  CUTE_DEVICE void rescale_output(Fragment& acc, KeyScale const& scale) {
    if (any_rescale) {
      multiply_rows(acc, rescale);
      CUTE_UNROLL
      for (int r = 0; r < kRows && kIsLazy; ++r) {
        bool const is_small = quad_sum(earlier_sum[r]) < kLeastLazySum * scale.over_v;
        if (rescale[r] != 1.f) {
          lazy_log2[r] = is_small ? 0.f : k.measured.lazy_rescale_log2;
        }
      }
    }
  }

  template <class Fragment>
  CUTE_DEVICE void finish(Fragment& acc, float const (&sinks)[kRows]) {
    largest.finish();
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      row_sum[r] = quad_sum(row_sum[r]) * kInverseOffset;
      float const sum = row_sum[r] + exp2_approx(sinks[r] * kLog2E - row_max[r]);
      rescale[r] = inverse_sum(sum) * kInverseOffset;
    }
    multiply_rows(acc, rescale);
    auto output = rows_view(acc);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (Traits::kIsMasked && row_sum[r] == 0.f) {
        cute::clear(output(r, cute::_));
      }
    }
  }

  // The LSE without a sink; natural logarithm.
  CUTE_DEVICE float lse(int r, float) const {
    return log_sum_exp(r == 0 ? row_max[0] : row_max[1], r == 0 ? row_sum[0] : row_sum[1],
                       1.f / kLog2E);
  }

  // After finish(). The scores have all their scales, and the softcap.
  CUTE_DEVICE float largest_logit(int r, float) const { return largest.of(r) * kLn2; }

 private:
  // Factor from scores to powers of two.
  CUTE_DEVICE float factor_of(int r, KeyScale const& scale) const {
    return kSoftcap ? scale_log2 : q_scale[r] * scale.k;
  }

  // WHY no branch around it for the usual case, that no maximum grows: a branch splits the softmax
  // in two, and ptxas (13.0) no longer interleaves the halves.
  template <class Scores>
  CUTE_DEVICE void update_max(Scores const& scores, KeyScale const& scale) {
    bool grows = false;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float const most = max_of_row(scores, r);
      float const factor = factor_of(r, scale);
      float const of_tile = fmaf(most, factor, scale.v_log2);
      largest.add(r, most * factor);
      float const old_max = row_max[r];
      float const new_max = quad_max(fmaxf(old_max, of_tile));
      bool const row_grows = new_max - old_max > (kIsLazy ? lazy_log2[r] : 0.f);
      row_max[r] = row_grows ? new_max : old_max;
      rescale[r] = row_grows ? exp2_approx(old_max - new_max) : 1.f;
      earlier_sum[r] = row_sum[r] * rescale[r];
      grows = grows || row_grows;
    }
    any_rescale = __any_sync(0xffffffffu, grows);
  }

  template <class Fragment>
  CUTE_DEVICE void add_to_sums(Fragment& acc, KeyScale const& scale) {
    auto probabilities = rows_view(acc);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float sums[2] = {earlier_sum[r], 0.f};
      CUTE_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        sums[c % 2] += probabilities(r, c) * scale.over_v;
      }
      row_sum[r] = sums[0] + sums[1];
    }
  }

  template <bool kMasked, class Scores>
  CUTE_DEVICE void exponentiate(Scores& scores, KeyScale const& scale) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float const used = kMasked ? finite_max(row_max[r]) : row_max[r];
      float const shift = scale.v_log2 + kOffsetLog2 - used;
      float const factor = factor_of(r, scale);
      CUTE_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        scores(r, c) = exp2_approx(scores(r, c) * factor + shift);
      }
    }
  }

  // In several chains: the few warps of a scheduler do not cover the latency of one.
  template <class Scores>
  CUTE_DEVICE static float max_of_row(Scores const& scores, int r) {
    constexpr int kChains = 4;
    float largest[kChains];
    CUTE_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      float& chain = largest[c % kChains];
      chain = c < kChains ? scores(r, c) : fmaxf(chain, scores(r, c));
    }
    return fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
  }
};

}  // namespace fa3
