// Online softmax over the K tiles of a row, on fragments (paper, section 2.3 and algorithm 1). A
// thread has two rows. The row sum stays per thread until the end; the four lanes of a row share
// its maximum at every K tile.
#pragma once

#include "core/softmax_math.h"
#include "device/fragments.h"
#include "device/gemm.h"
#include "device/math.h"
#include "forward/traits.h"

namespace fa3 {

// The scale of a K tile with ScalesKind::kNone.
struct NoScale {};

template <class Traits>
struct OnlineSoftmax {
  static constexpr int kRows = 2;
  static constexpr FwdConfig k = Traits::k;

  float row_max[kRows];  // subtracted from scores: up to lazy_log2 below the true maximum
  float row_sum[kRows];
  float rescale[kRows];  // factor for O accumulated so far
  bool any_rescale;      // whether some row of this warp has rescale != 1
  int zero;              // 0, unknown to ptxas
  float scale_log2;
  float lazy_log2;  // how much a maximum may grow, in powers of two of P, before it is adopted
  float key_scale;  // ScalesKind::kHeads
  float value_scale;

  CUTE_DEVICE OnlineSoftmax(float scale_log2_, float lazy_log2_, int zero_)
      : zero(zero_),
        scale_log2(scale_log2_),
        lazy_log2(Traits::kHasRowOptions ? lazy_log2_ : k.lazy_log2(k.kind == kCausalKernel)) {}

  // Starts new rows.
  CUTE_DEVICE void reset() {
    any_rescale = false;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      row_max[r] = -INFINITY;
      row_sum[r] = 0.f;
    }
  }

  // S becomes exp2((S - max) * scale_log2). After a masked K tile a row may still have seen no key.
  // hook: waits for GEMMs of the same warpgroup; called at the end. With k.tuning.late_wait that
  // wait comes after all exponentials of the thread's first row. ptxas (13.0) interleaves the rows,
  // so about three quarters of all exponentials come before it.
  template <bool kMasked, class Fragment, class Hook>
  CUTE_DEVICE void update(Fragment& acc, NoScale, Hook const& hook) {
    auto scores = rows_view(acc);  // (2, columns)
    update_max(scores);
    if (k.tuning.maxima_first && Traits::kIsMasked) {
      wait_for_both();
    }
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float const used = (kMasked ? finite_max(row_max[r]) : row_max[r]) * scale_log2;
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(scores); ++c) {
        scores(r, c) = exp2_approx(scores(r, c) * scale_log2 - used);
      }
      row_sum[r] = row_sum[r] * rescale[r] + sum_of_row(scores, r);
    }
    if (k.tuning.late_wait) {
      wait_after(row_sum[0], zero);
    }
    hook();
  }

  CUTE_DEVICE void scale_scores(float (&scales)[kRows], NoScale) const {
    CUTE_UNROLL
    for (int r = 0; r < kRows && Traits::kConverts; ++r) {
      scales[r] *= key_scale;
    }
  }

  // The sums are complete after update().
  template <class Fragment>
  CUTE_DEVICE void complete_sums(Fragment const&, NoScale) {}

  // Converts P, in the registers of S, to the operand of PV.
  template <class FragmentS, class FragmentP>
  CUTE_DEVICE static void pack(FragmentS const& acc, FragmentP& operand) {
    convert_fragment<typename Traits::Element>(acc, operand);
  }

  // The sums of whole rows. With Traits::kFolds before finish(), which expects them.
  CUTE_DEVICE void complete_rows() {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      row_sum[r] = quad_sum(row_sum[r]);
    }
  }

  // Multiplies O by the scale of V; finish() then does not. Folded parts and whole tiles both call
  // this, so that their O is rounded in the same way.
  template <class Fragment>
  CUTE_DEVICE void apply_value_scale(Fragment& acc) {
    if (Traits::kConverts) {
      rescale[0] = rescale[1] = value_scale;
      multiply_rows(acc, rescale);
      value_scale = 1.f;
    }
  }

  // Rescales the output accumulated before the last update().
  template <class Fragment>
  CUTE_DEVICE void rescale_output(Fragment& acc, NoScale) const {
    if (any_rescale) {
      multiply_rows(acc, rescale);
    }
  }

  // Completes the row sums and divides O by them. O of a row without a visible key is 0, whatever V
  // holds in the masked K tile. (Without a mask such rows have no keys at all: V is zeros.) A sink
  // is one more key of a row, with a value of 0, in units of the LSE; -inf: none.
  template <class Fragment>
  CUTE_DEVICE void finish(Fragment& acc, float const (&sinks)[kRows]) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      row_sum[r] = Traits::kFolds ? row_sum[r] : quad_sum(row_sum[r]);
      float sum = row_sum[r];
      if (Traits::kHasRowOptions) {
        sum += exp2_approx(sinks[r] * kLog2E - row_max[r] * scale_log2);
      }
      rescale[r] = inverse_sum(sum) * (Traits::kConverts ? value_scale : 1.f);
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

  // The LSE without a sink; natural logarithm. Converted scores: rounded as by PartCombiner.
  CUTE_DEVICE float lse(int r, float softmax_scale) const {
    return Traits::kConverts ? log_sum_exp(row_max[r] * scale_log2, row_sum[r], kLn2)
                             : log_sum_exp(row_max[r], row_sum[r], softmax_scale);
  }

  // With lazy_log2 = 0.
  CUTE_DEVICE float largest_logit(int r, float softmax_scale) const {
    return row_max[r] * (Traits::kConverts ? scale_log2 * kLn2 : softmax_scale);
  }

 private:
  // Makes the exponentials of row 0 depend on the maximum of row 1, without changing a value.
  CUTE_DEVICE void wait_for_both() {
    int const nothing = __float_as_int(row_max[1]) & zero;
    row_max[0] = __int_as_float(__float_as_int(row_max[0]) | nothing);
  }

  // Lazy: a maximum that has grown by less than a factor of 2^lazy_log2 in exp2 is not adopted. The
  // result is the same after the division by the row sum, and O is not rescaled.
  template <class Scores>
  CUTE_DEVICE void update_max(Scores const& scores) {
    bool grows = false;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float const old_max = row_max[r];
      float const new_max = quad_max(fmaxf(old_max, max_of_row(scores, r)));
      // False for a row that has seen no key: -inf - -inf is NaN.
      bool const row_grows =
          (new_max - old_max) * scale_log2 >
          (Traits::kHasRowOptions ? lazy_log2 : k.lazy_log2(k.kind == kCausalKernel));
      row_max[r] = row_grows ? new_max : old_max;
      rescale[r] = row_grows ? exp2_approx((old_max - new_max) * scale_log2) : 1.f;
      grows = grows || row_grows;
    }
    any_rescale = __any_sync(0xffffffffu, grows);
  }

  // Two chains instead of one: the few warps of a scheduler do not cover the latency of 32
  // dependent instructions (128 keys).
  template <class Scores>
  CUTE_DEVICE static float max_of_row(Scores const& scores, int r) {
    float even = scores(r, 0);
    float odd = scores(r, 1);
    CUTE_UNROLL
    for (int c = 2; c < cute::size<1>(scores); c += 2) {
      even = fmaxf(even, scores(r, c));
      odd = fmaxf(odd, scores(r, c + 1));
    }
    return fmaxf(even, odd);
  }

  template <class Scores>
  CUTE_DEVICE static float sum_of_row(Scores const& scores, int r) {
    float even = scores(r, 0);
    float odd = scores(r, 1);
    CUTE_UNROLL
    for (int c = 2; c < cute::size<1>(scores); c += 2) {
      even += scores(r, c);
      odd += scores(r, c + 1);
    }
    return even + odd;
  }
};

}  // namespace fa3
