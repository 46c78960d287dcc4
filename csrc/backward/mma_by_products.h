// Consumers that split the products, for head dims whose dK and dV do not fit into the registers of
// one warpgroup: all have the same 64 keys.
//
//   warpgroup 0, DvConsumer   S, P, dV        P to warpgroup 1 (`p_full`)
//   warpgroup 1, DkConsumer   dP, dS, dK      dS to warpgroup 2 (`ds_full`)
//   warpgroup 2, DqConsumer   dQ              added to global memory from registers (dq_consumer.h)
//
// With 64 keys a CTA would add more to dQ than L2 takes. So two CTAs of a cluster with neighbouring
// keys send each other dS, and each computes half of the columns of dQ, over the keys of both.
// Above head dim 256 they have the same keys, and half of all columns each: they send each other S
// and dP of their columns, and add them.
//
// TRAP: as in mma_by_keys.h, no GEMM may be outstanding where a loop closes.
//
// TRAP: LSE and delta are read with generic loads but overwritten through the async proxy. A stage
// is released only after values derived from them have been stored, which proves that the loads
// have completed.
#pragma once

#include "backward/epilogue.h"
#include "backward/products.h"

namespace fa3 {

// Warpgroup 0 computes 2^6 P, and hands it on for dS as float16, which has 11 bits from P = 2^-20
// on. WHY not as bfloat16: its 8 bits give gradients 1.2 times the error.
constexpr float kScaleOfPLog2 = 6.f;
constexpr float kInverseScaleOfP = 0x1p-6f;
using HandedP = cutlass::half_t;

// At most the largest float16. WHY: the LSE of another forward, such as one in FP8, may be too
// small, and P then large.
CUTE_DEVICE uint32_t pack_handed(float low, float high) {
  uint32_t packed = pack_two<HandedP>(low, high);
  asm("min.NaN.f16x2 %0, %0, %1;" : "+r"(packed) : "r"(0x7bff7bffu));
  return packed;
}

template <class Traits>
struct DvConsumer : BwdProducts<Traits> {
  using Base = BwdProducts<Traits>;
  using Element = typename Traits::Element;
  using Base::Base, Base::dout_stage, Base::p, Base::q_stage, Base::shared, Base::thread;

  CUTE_DEVICE void run() {
    auto tSrS = Base::scores_fragment();
    auto tVrP = Base::operand_fragment();
    auto tVrDv = Base::template gradient_fragment<Traits::kHeadDimV>();
    KeyMask<Traits> mask(p, shared, 0, thread);
    mask.start(shared.exchange.work);
    StepsOf<Traits> steps(shared.exchange.work);
    uint32_t count = 0;
    shared.k_full[0].wait(0);
    issue_scores(tSrS, count);
    wait_gemm<0>(tSrS);
    transform(steps, mask, count, tSrS, tVrP);
    for (steps.next(); steps.valid(); steps.next(), ++count) {
      if constexpr (Traits::kScoresFirst) {
        auto tVrNext = Base::operand_fragment();
        issue_scores(tSrS, count + 1);
        issue_dv(tVrP, tVrDv, count);
        wait_gemm<1>(tSrS);
        transform(steps, mask, count + 1, tSrS, tVrNext);
        wait_gemm<0>(tVrDv);
        Base::arrive_from_warps(shared.dout_empty[dout_stage(count)]);
        reload(shared.exchange.p[(count + 1) % kExchangeBuffers], tVrP);
      } else {
        issue_dv(tVrP, tVrDv, count);
        issue_scores(tSrS, count + 1);
        wait_gemm<1>(tVrDv);
        Base::arrive_from_warps(shared.dout_empty[dout_stage(count)]);
        wait_gemm<0>(tSrS);
        transform(steps, mask, count + 1, tSrS, tVrP);
      }
    }
    issue_dv(tVrP, tVrDv, count);
    wait_gemm<0>(tVrDv);
    named_sync(NamedBarrier::kKeysRead, Traits::kWarpgroups * kWarpgroupThreads);
    store_gradient<Traits, Traits::kHeadDimV>(p.dv, shared.v, shared.exchange.work, thread,
                                              kInverseScaleOfP, tVrDv);
    finish_stores(thread);
  }

 private:
  template <class Fragment>
  CUTE_DEVICE void issue_scores(Fragment& tSrS, uint32_t step) {
    Base::wait_for_q(step);
    Base::template issue_scores_gemm<Traits::kHeadDim, Traits::kKeySlice>(
        shared.k[0], 0, shared.q[q_stage(step)], tSrS);
  }

  template <class FragmentP, class Fragment>
  CUTE_DEVICE void issue_dv(FragmentP const& tVrP, Fragment& tVrDv, uint32_t step) {
    Base::wait_for_dout(step);
    Base::template issue_gradient_gemm<Traits::kHeadDimV>(tVrP, shared.dout[dout_stage(step)],
                                                          tVrDv, step == 0);
  }

  // S becomes P, the operand of dV. Warpgroup 1 gets the factors of dP - delta.
  template <class FragmentS, class FragmentP>
  CUTE_DEVICE void transform(StepsOf<Traits> const& steps, KeyMask<Traits> const& mask,
                             uint32_t step, FragmentS& tSrS, FragmentP& tVrP) {
    shared.exchange.complete(0, step, min_of(p.works, 0), thread, tSrS);
    BwdScoresAt const at{p, *steps.work, 0, steps.m * Traits::kTileM, steps.head, thread};
    Base::replace_scores(tSrS, at);
    mask.apply(tSrS, steps);
    if constexpr (Traits::Score::kHasSlope) {
      wait_for_buffer(step);
      sloped_probabilities(tSrS, tVrP, shared.exchange.p[step % kExchangeBuffers], step);
    } else {
      Base::probabilities(tSrS, step, kScaleOfPLog2);
      wait_for_buffer(step);
      store_for_dk(tSrS, shared.exchange.p[step % kExchangeBuffers]);
      convert_fragment<Element>(tSrS, tVrP);
    }
    Base::arrive_from_warps(shared.exchange.p_full[step % kExchangeBuffers]);
    Base::arrive_from_warps(shared.q_empty[q_stage(step)]);
  }

  using Buffer = uint4[Traits::kTileM / 16][kWarpgroupThreads];

  CUTE_DEVICE void wait_for_buffer(uint32_t step) const {
    shared.exchange.p_empty[step % kExchangeBuffers].wait(step / kExchangeBuffers % 2 ^ 1);
  }

  // In the order of P as an operand.
  template <class FragmentS>
  CUTE_DEVICE void store_for_dk(FragmentS const& tSrS, Buffer& buffer) const {
    CUTE_UNROLL
    for (int i = 0; i < Traits::kTileM / 16; ++i) {
      uint32_t words[4];
      CUTE_UNROLL
      for (int n = 0; n < 4; ++n) {
        words[n] = pack_handed(tSrS(8 * i + 2 * n), tSrS(8 * i + 2 * n + 1));
      }
      buffer[i][thread] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  // Reloads P of the next step, which this thread has stored while P of this step was an operand.
  // WHY: with a copy in registers ptxas would merge the two and serialise the products.
  template <class FragmentP>
  CUTE_DEVICE void reload(Buffer const& buffer, FragmentP& tVrP) const {
    auto words = cute::recast<uint32_t>(tVrP);
    CUTE_UNROLL
    for (int i = 0; i < Traits::kTileM / 16; ++i) {
      uint4 const four = buffer[i][thread];
      uint32_t const handed[4] = {four.x, four.y, four.z, four.w};
      CUTE_UNROLL
      for (int n = 0; n < 4; ++n) {
        float2 const two = unpack_two<HandedP>(handed[n]);
        words(4 * i + n) = pack_two<Element>(two.x, two.y);
      }
    }
  }

  // Stores the factors of dS as they are computed: there are no registers for P and for them.
  template <class FragmentS, class FragmentP>
  CUTE_DEVICE void sloped_probabilities(FragmentS const& tSrS, FragmentP& tVrP, Buffer& buffer,
                                        uint32_t step) const {
    auto scores = rows_view(tSrS);  // (2, (2, J))
    auto p_pairs = cute::recast<uint32_t>(tVrP);
    float2 const* const lse = Base::row_values(shared.lse_log2[q_stage(step)]);
    CUTE_UNROLL
    for (int i = 0; i < Traits::kTileM / 16; ++i) {
      uint32_t words[4];
      CUTE_UNROLL
      for (int n = 0; n < 4; ++n) {
        int const j = 2 * i + n / 2;
        int const r = n % 2;
        float2 const own = lse[4 * j];
        auto const factors =
            Base::sloped_factors(scores(r, 2 * j), scores(r, 2 * j + 1),
                                 make_float2(own.x - kScaleOfPLog2, own.y - kScaleOfPLog2));
        p_pairs(4 * i + n) = pack_two<Element>(factors.p.x, factors.p.y);
        words[n] = pack_handed(factors.ds_factor.x, factors.ds_factor.y);
      }
      buffer[i][thread] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
};

template <class Traits>
struct DkConsumer : BwdProducts<Traits> {
  using Base = BwdProducts<Traits>;
  using Element = typename Traits::Element;
  using Base::Base, Base::dout_stage, Base::p, Base::q_stage, Base::shared, Base::thread;

  CUTE_DEVICE void run() {
    auto tPrDp = Base::scores_fragment();
    auto tKrDs = Base::operand_fragment();
    auto tKrDk = Base::template gradient_fragment<Traits::kHeadDim>();
    uint32_t const end = shared.exchange.work.steps();
    uint32_t count = 0;
    shared.v_full.wait(0);
    issue_dp(tPrDp, count);
    wait_gemm<0>(tPrDp);
    transform(count, tPrDp, tKrDs);
    for (; count + 1 < end; ++count) {
      if constexpr (Traits::kScoresFirst) {
        auto tKrNext = Base::operand_fragment();
        issue_dp(tPrDp, count + 1);
        issue_dk(tKrDs, tKrDk, count);
        wait_gemm<1>(tPrDp);
        transform(count + 1, tPrDp, tKrNext);
        wait_gemm<0>(tKrDk);
        Base::arrive_from_warps(shared.q_empty[q_stage(count)]);
        Base::reload_scores(shared.ds[(count + 1) % kExchangeBuffers], 0, tKrDs);
      } else {
        issue_dk(tKrDs, tKrDk, count);
        issue_dp(tPrDp, count + 1);
        wait_gemm<1>(tKrDk);
        Base::arrive_from_warps(shared.q_empty[q_stage(count)]);
        wait_gemm<0>(tPrDp);
        transform(count + 1, tPrDp, tKrDs);
      }
    }
    issue_dk(tKrDs, tKrDk, count);
    wait_gemm<0>(tKrDk);
    named_sync(NamedBarrier::kKeysRead, Traits::kWarpgroups * kWarpgroupThreads);
    store_gradient<Traits, Traits::kHeadDim>(p.dk, shared.k[0], shared.exchange.work, thread,
                                             p.softmax_scale, tKrDk);
    finish_stores(thread);
  }

 private:
  template <class Fragment>
  CUTE_DEVICE void issue_dp(Fragment& tPrDp, uint32_t step) {
    Base::wait_for_dout(step);
    Base::template issue_scores_gemm<Traits::kHeadDimV>(shared.v, 0, shared.dout[dout_stage(step)],
                                                        tPrDp);
  }

  template <class FragmentDs, class Fragment>
  CUTE_DEVICE void issue_dk(FragmentDs const& tKrDs, Fragment& tKrDk, uint32_t step) {
    Base::template issue_gradient_gemm<Traits::kHeadDim>(tKrDs, shared.q[q_stage(step)], tKrDk,
                                                         step == 0);
  }

  // dP becomes dS, for dK and for warpgroup 2. WHY it waits for Q here: dK reads Q, and a thread
  // must itself observe the barrier, although warpgroup 0 did so before it computed P.
  template <class FragmentS, class FragmentDs>
  CUTE_DEVICE void transform(uint32_t step, FragmentS& tPrDp, FragmentDs& tKrDs) {
    int const buffer = step % kExchangeBuffers;
    uint32_t const round = step / kExchangeBuffers % 2;
    shared.exchange.complete(1, step, min_of(p.works, 0), thread, tPrDp);
    shared.exchange.p_full[buffer].wait(round);
    multiply_scores(shared.exchange.p[buffer], tPrDp, tKrDs, step);
    Base::arrive_from_warps(shared.exchange.p_empty[buffer]);
    shared.exchange.ds_empty[buffer].wait(round ^ 1);
    Base::stage_scores(tKrDs, shared.ds[buffer], 0);
    Base::arrive_from_warps(shared.exchange.ds_full[buffer]);
    Base::arrive_from_warps(shared.dout_empty[dout_stage(step)]);
    Base::wait_for_q(step);
  }

  // dS = P * (dP - delta). P has the order of its fragment, which is also that of dS.
  template <class Fragment, class FragmentDs>
  CUTE_DEVICE void multiply_scores(uint4 const (&p_words)[Traits::kTileM / 16][kWarpgroupThreads],
                                   Fragment& tPrDp, FragmentDs& tKrDs, uint32_t step) {
    auto gradient = rows_view(tPrDp);  // (2, (2, J))
    auto pairs = cute::recast<uint32_t>(tKrDs);
    float2 const* const delta = Base::row_values(shared.delta[dout_stage(step)]);
    CUTE_UNROLL
    for (int i = 0; i < Traits::kTileM / 16; ++i) {
      uint4 const four = p_words[i][thread];
      uint32_t const words[4] = {four.x, four.y, four.z, four.w};
      CUTE_UNROLL
      for (int n = 0; n < 4; ++n) {
        int const j = 2 * i + n / 2;
        int const r = n % 2;
        constexpr float kScale = kInverseScaleOfP;
        float2 const probability = unpack_two<HandedP>(words[n]);
        float2 const pair = delta[4 * j];
        float const x = gradient(r, 2 * j) * kScale - pair.x * kScale;
        float const y = gradient(r, 2 * j + 1) * kScale - pair.y * kScale;
        pairs(4 * i + n) = pack_two<Element>(probability.x * x, probability.y * y);
      }
    }
  }
};

}  // namespace fa3
