// Consumers that split the keys: a warpgroup computes the five products, and the scores between
// them, for its 64 keys.
//
// A step is a tile of queries. The warpgroups alternate on the tensor cores: issuing products
// blocks a warp until they run, so a warpgroup cannot feed them and work on scores at once.
//
//   tensor cores   of 0: dV dQ dK S dP | of 1: dV dQ dK S dP | of 0 ...
//   warpgroup 0    issues, stages dQ   | P, dS of next step  | issues
//   warpgroup 1    P, dS               | issues, stages dQ   | P, dS of next step
//
// dQ needs dS of all keys. When warpgroup 1 issues, dS of the step is complete. When warpgroup 0
// issues, only dS of the step before is, so its dQ is one step late, and follows once more at the
// end.
//
// TRAP: no product may be outstanding where the loop closes, or be issued under a condition: ptxas
// (13.0) then serialises every product.
#pragma once

#include "backward/epilogue.h"
#include "backward/products.h"
#include "backward/step_ring.h"

namespace fa3 {

template <class Traits>
struct KeysConsumer : BwdProducts<Traits> {
  using Base = BwdProducts<Traits>;
  using Element = typename Traits::Element;
  using Base::dout_stage, Base::p, Base::q_stage, Base::shared, Base::thread;

  int const warpgroup;
  int const first_key;  // in the tile
  KeyMask<Traits> mask;
  uint32_t count = 0;  // steps done, of all tiles: gives the stages of all rings, in one register

  CUTE_DEVICE KeysConsumer(BwdStorage<Traits>& shared_, BwdDeviceParams const& p_, int warpgroup_,
                           int thread_)
      : Base(shared_, p_, thread_),
        warpgroup(warpgroup_),
        first_key(warpgroup_ * kWarpgroupRows),
        mask(p_, shared_, first_key, thread_) {}

  CUTE_DEVICE void run() {
    auto tSrS = Base::scores_fragment();
    auto tPrDp = Base::scores_fragment();
    auto tVrP = Base::operand_fragment();
    auto tKrDs = Base::operand_fragment();
    auto tKrDk = Base::template gradient_fragment<Traits::kHeadDim>();
    auto tVrDv = Base::template gradient_fragment<Traits::kHeadDimV>();

    if (wait_for_step(shared, 0) & BwdStep::kNone) {
      return;
    }
    cute::clear(tKrDk);
    cute::clear(tVrDv);
    mask.start(work(0));
    if (warpgroup == 1) {
      pass_tensor_cores();
    }
    first_products(tSrS, tPrDp);
    transform(tSrS, tPrDp, tVrP, tKrDs);
    for (;;) {
      uint32_t const next = wait_for_step(shared, count + 1);
      if (next & BwdStep::kNone) {
        break;
      }
      products(next, tSrS, tPrDp, tVrP, tKrDs, tVrDv, tKrDk);
      // WHY read again: a register less over the products.
      bool const starts_tile = step(count).flags & BwdStep::kIsFirst;
      if (starts_tile) {
        stage_gradient<Traits::kHeadDimV>(0, tVrDv, 1.f);
        mask.start(work(count));
      }
      transform(tSrS, tPrDp, tVrP, tKrDs);
      if (starts_tile) {
        stage_gradient<Traits::kHeadDim>(1, tKrDk, p.softmax_scale);
      }
    }
    last_products(tVrP, tKrDs, tVrDv, tKrDk);
    stage_gradient<Traits::kHeadDimV>(0, tVrDv, 1.f);
    stage_gradient<Traits::kHeadDim>(1, tKrDk, p.softmax_scale);
    last_dq();
  }

 private:
  CUTE_DEVICE BwdStep const& step(uint32_t n) const { return step_slot(shared, n); }

  CUTE_DEVICE BwdWork const& work(uint32_t n) const { return work_slot(shared, step(n).tile); }

  CUTE_DEVICE void wait_for_tensor_cores() const {
    named_sync(turn_of(warpgroup), 2 * kWarpgroupThreads);
  }

  CUTE_DEVICE void pass_tensor_cores() const {
    named_arrive(turn_of(1 - warpgroup), 2 * kWarpgroupThreads);
  }

  CUTE_DEVICE static NamedBarrier turn_of(int warpgroup) {
    asm volatile("" : "+r"(warpgroup));  // WHY: a register less over the products
    return warpgroup == 0 ? NamedBarrier::kPingPongFirst : NamedBarrier::kPingPongSecond;
  }

  // The step whose dQ is computed next; -1: none yet.
  CUTE_DEVICE int dq_step() const { return int(count) - (warpgroup == 0 ? 1 : 0); }

  template <class FragmentS>
  CUTE_DEVICE void first_products(FragmentS& tSrS, FragmentS& tPrDp) {
    wait_for_tensor_cores();
    issue_scores(tSrS, 0, BwdStep::kIsFirst);
    issue_dp(tPrDp, 0, BwdStep::kIsFirst);
    pass_tensor_cores();
  }

  // Issues the gradients of a step, then S and dP of the next one, which has the flags `next`. dQ
  // is staged while dK runs. WHY the turn ends before dP: this warpgroup must wait for dK first.
  template <class FragmentS, class FragmentDv, class FragmentDk, class FragmentDs>
  CUTE_DEVICE void products(uint32_t next, FragmentS& tSrS, FragmentS& tPrDp,
                            FragmentDs const& tVrP, FragmentDs const& tKrDs, FragmentDv& tVrDv,
                            FragmentDk& tKrDk) {
    wait_for_tensor_cores();
    issue_gradients(next, tVrP, tKrDs, tVrDv, tKrDk);
    issue_scores(tSrS, count + 1, next);
    pass_tensor_cores();
    wait_gemm<1>(tKrDk);
    release_stage();
    issue_dp(tPrDp, count + 1, next);
    ++count;
  }

  template <class FragmentDv, class FragmentDk, class FragmentDs>
  CUTE_DEVICE void last_products(FragmentDs const& tVrP, FragmentDs const& tKrDs, FragmentDv& tVrDv,
                                 FragmentDk& tKrDk) {
    wait_for_tensor_cores();
    issue_gradients(step(count + 1).flags, tVrP, tKrDs, tVrDv, tKrDk);
    pass_tensor_cores();
    wait_gemm<0>(tKrDk);
    ++count;
  }

  CUTE_DEVICE void last_dq() {
    if (warpgroup == 0) {
      auto tQrDq = Base::dq_fragment();
      wait_for_tensor_cores();
      issue_dq(key_buffer<Traits>(step(dq_step()).tile), tQrDq);
      wait_gemm<0>(tQrDq);
      stage_dq(tQrDq);
    }
  }

  // At the end dV and dQ are complete, dQ is staged and dK is still running.
  template <class FragmentDv, class FragmentDk, class FragmentDs>
  CUTE_DEVICE void issue_gradients(uint32_t next, FragmentDs const& tVrP, FragmentDs const& tKrDs,
                                   FragmentDv& tVrDv, FragmentDk& tKrDk) {
    auto tQrDq = Base::dq_fragment();
    Base::template issue_gradient_gemm<Traits::kHeadDimV>(tVrP, shared.dout[dout_stage(count)],
                                                          tVrDv, false);
    issue_dq(dq_buffer(next), tQrDq);
    Base::template issue_gradient_gemm<Traits::kHeadDim>(tKrDs, shared.q[q_stage(count)], tKrDk,
                                                         false);
    wait_gemm<1>(tQrDq);
    cute::warpgroup_fence_operand(tVrDv);
    stage_dq(tQrDq);
    release_keys(next);
  }

  // The arithmetic between products: S and dP, which have been issued, become P and dS in
  // registers, and dS in shared memory. pass_tensor_cores() orders that dS before the products that
  // read it.
  template <class FragmentS, class FragmentDs>
  CUTE_DEVICE void transform(FragmentS& tSrS, FragmentS& tPrDp, FragmentDs& tVrP,
                             FragmentDs& tKrDs) {
    wait_gemm<1>(tSrS);
    if constexpr (Traits::Score::kHasSlope) {
      transform_with_slope(tSrS, tPrDp, tVrP, tKrDs);
    } else {
      transform_scores(tSrS, tPrDp, tVrP, tKrDs);
    }
    Base::stage_scores(tKrDs, shared.ds[count & 1], first_key);
  }

  template <class FragmentS, class FragmentDs>
  CUTE_DEVICE void transform_scores(FragmentS& tSrS, FragmentS& tPrDp, FragmentDs& tVrP,
                                    FragmentDs& tKrDs) {
    Base::replace_scores(tSrS, scores_at());
    mask_scores(tSrS);
    Base::probabilities(tSrS, count);
    convert_fragment<Element>(tSrS, tVrP);
    wait_gemm<0>(tPrDp);
    release_values();
    Base::multiply_scores(tSrS, tPrDp, count);
    convert_fragment<Element>(tPrDp, tKrDs);
  }

  template <class FragmentS, class FragmentDs>
  CUTE_DEVICE void transform_with_slope(FragmentS& tSrS, FragmentS& tPrDp, FragmentDs& tVrP,
                                        FragmentDs& tKrDs) {
    wait_gemm<0>(tPrDp);
    release_values();
    Base::replace_scores(tSrS, scores_at());
    mask_scores(tSrS);
    sloped_scores(tSrS, tPrDp, tVrP, tKrDs);
  }

  // Computes P and dS together: there are not enough registers for P, dP and the slopes at the same
  // time.
  template <class FragmentS, class FragmentDs>
  CUTE_DEVICE void sloped_scores(FragmentS const& tSrS, FragmentS const& tPrDp, FragmentDs& tVrP,
                                 FragmentDs& tKrDs) {
    auto scores = rows_view(tSrS);     // (2, (2, J))
    auto gradient = rows_view(tPrDp);  // (2, (2, J))
    auto p_pairs = cute::recast<uint32_t>(tVrP);
    auto ds_pairs = cute::recast<uint32_t>(tKrDs);
    float2 const* const lse = Base::row_values(shared.lse_log2[q_stage(count)]);
    float2 const* const delta = Base::row_values(shared.delta[dout_stage(count)]);
    CUTE_UNROLL
    for (int i = 0; i < Traits::kTileM / 8; ++i) {
      // WHY: with lists ptxas (13.0) spills if the first pair is the first.
      int const j = Traits::kHasLists ? Traits::kTileM / 8 - 1 - i : i;
      float2 const pair = delta[4 * j];
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        auto const [p, ds_factor] =
            Base::sloped_factors(scores(r, 2 * j), scores(r, 2 * j + 1), lse[4 * j]);
        p_pairs(2 * j + r) = pack_two<Element>(p.x, p.y);
        ds_pairs(2 * j + r) = pack_two<Element>(ds_factor.x * (gradient(r, 2 * j) - pair.x),
                                                ds_factor.y * (gradient(r, 2 * j + 1) - pair.y));
      }
    }
  }

  // Where the scores of the step lie. The index of its queries in the workspaces tells their head.
  CUTE_DEVICE BwdScoresAt scores_at() const {
    BwdStep const& at = step(count);
    BwdWork const& tile = work(count);
    int const head = (at.rows - tile.tile_base - at.m) / p.m_tiles;
    return {p, tile, first_key, at.m * Traits::kTileM, head, thread};
  }

  template <class Fragment>
  CUTE_DEVICE void mask_scores(Fragment& tSrS) {
    if (step(count).flags & BwdStep::kIsMasked) {
      mask.apply(tSrS, work(count), step(count));
    }
  }

  // flags: of step n.
  template <class Fragment>
  CUTE_DEVICE void issue_scores(Fragment& tSrS, uint32_t n, uint32_t flags) {
    Base::wait_for_q(n);
    if (flags & BwdStep::kIsFirst) {
      uint32_t const tile = step(n).tile;
      shared.k_full[key_buffer<Traits>(tile)].wait(key_phase<Traits>(tile));
    }
    Base::template issue_scores_gemm<Traits::kHeadDim, Traits::kKeySlice>(
        shared.k[flags & BwdStep::kBuffer ? 1 : 0], first_key, shared.q[q_stage(n)], tSrS);
  }

  template <class Fragment>
  CUTE_DEVICE void issue_dp(Fragment& tPrDp, uint32_t n, uint32_t flags) {
    if (flags & BwdStep::kIsFirst) {
      shared.v_full.wait(step(n).tile % 2);
    }
    Base::wait_for_dout(n);
    Base::template issue_scores_gemm<Traits::kHeadDimV>(shared.v, first_key,
                                                        shared.dout[dout_stage(n)], tPrDp);
  }

  // buffer: of K. At dq_step() -1 the result means nothing and is dropped. WHY the product is
  // issued all the same: ptxas serialises products under a condition.
  template <class Fragment>
  CUTE_DEVICE void issue_dq(int buffer, Fragment& tQrDq) {
    constexpr DqLayout kDq = Traits::kDq;
    Base::issue_dq_gemm(shared.ds[dq_step() & 1], kDq.first_row(warpgroup), shared.k[buffer],
                        kDq.first_column(warpgroup), tQrDq);
  }

  CUTE_DEVICE int dq_buffer(uint32_t next) const {
    return next & (warpgroup == 0 ? BwdStep::kBufferTwoBefore : BwdStep::kBufferBefore) ? 1 : 0;
  }

  // Stages dQ for the store warp, in the order of config/dq_layout.h.
  template <class Fragment>
  CUTE_DEVICE void stage_dq(Fragment const& tQrDq) {
    if (dq_step() < 0) {
      return;
    }
    float4* const target = reinterpret_cast<float4*>(empty_staging(dq_step())) + thread;
    CUTE_UNROLL
    for (int j = 0; j < Traits::kDq.columns / 8; ++j) {
      target[j * kWarpgroupThreads] =
          make_float4(tQrDq(4 * j), tQrDq(4 * j + 1), tQrDq(4 * j + 2), tQrDq(4 * j + 3));
    }
    fence_shared_for_async_proxy();
    pass_staging();
  }

  // Stages dV (index 0) or dK (1), rounded, for the store warp, and zeroes it.
  template <int kDim, class Fragment>
  CUTE_DEVICE void stage_gradient(int index, Fragment& acc, float scale) {
    // WHY: addresses derived from the thread's number would otherwise stay in registers over all
    // steps.
    int own = thread;
    asm volatile("" : "+r"(own));
    round_to_shared<Element, kWarpgroupRows, kDim>(empty_staging(dq_step() + index), 0, own, scale,
                                                   acc);
    cute::clear(acc);
    pass_staging();
  }

  // staged: how often the buffer has been filled before; steps suffice, since a tile of keys adds
  // two, dV and dK.
  CUTE_DEVICE char* empty_staging(int staged) {
    shared.exchange.staging_empty[warpgroup].wait(staged & 1 ^ 1);
    return shared.exchange.staging[warpgroup];
  }

  CUTE_DEVICE void pass_staging() { Base::arrive_from_warps(shared.exchange.staged[warpgroup]); }

  // One elected thread arrives: the products are complete for all warps of the warpgroup at once,
  // and all of them had read LSE and delta when they issued these products.
  CUTE_DEVICE void release_stage() {
    if (thread == 0) {
      shared.q_empty[q_stage(count)].arrive();
      shared.dout_empty[dout_stage(count)].arrive();
    }
  }

  // Releases K of a tile of keys when its last dQ is complete. next: as in products().
  CUTE_DEVICE void release_keys(uint32_t next) {
    bool const ended = next & (warpgroup == 0 ? BwdStep::kFollowsFirst : BwdStep::kIsFirst);
    if (thread == 0 && ended) {
      shared.exchange.k_empty[dq_buffer(next)].arrive();
    }
  }

  // Releases V of a tile of keys when its last dP is complete.
  CUTE_DEVICE void release_values() {
    if (thread == 0 && step(count).flags & BwdStep::kIsLast) {
      shared.exchange.v_empty.arrive();
    }
  }
};

}  // namespace fa3
