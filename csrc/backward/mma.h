// A consumer warpgroup: the five products and what is between them, for its 64 keys.
//
// A step is a tile of queries. The warpgroups take turns on the tensor cores: issuing products
// blocks a warp until they run, so a warpgroup cannot feed them and work on scores at once.
//
//   tensor cores   turn of 0: dV dQ dK S dP | turn of 1: dV dQ dK S dP | turn of 0 ...
//   warpgroup 0    issues, dQ out           | P, dS of the next step   | issues
//   warpgroup 1    P, dS                    | issues, dQ out           | P, dS of the next step
//
// dQ needs dS of all keys. Warpgroup 1 finds them when its turn comes; warpgroup 0 finds those of
// the step before, so its dQ is one step late, and comes once more at the end.
//
// TRAP: nothing may be outstanding where the loop closes, or be issued under a condition: ptxas
// (13.0) then serialises every product.
#pragma once

#include "backward/epilogue.h"
#include "backward/mask.h"
#include "core/softmax_math.h"
#include "device/gemm.h"

namespace fa3 {

template <class Traits>
struct BwdConsumer {
  using Element = typename Traits::Element;
  using MmaS = typename Traits::MmaS;
  using MmaDkv = typename Traits::MmaDkv;
  using MmaDq = typename Traits::MmaDq;

  BwdStorage<Traits>& shared;
  BwdDeviceParams const& p;
  int warpgroup;
  int thread;  // in the warpgroup
  KeyLimits limits;
  uint32_t count = 0;  // steps done: where all rings stand, in one register

  CUTE_DEVICE BwdConsumer(BwdStorage<Traits>& shared_, BwdDeviceParams const& p_, int warpgroup_,
                          int thread_)
      : shared(shared_), p(p_), warpgroup(warpgroup_), thread(thread_) {}

  CUTE_DEVICE void run() {
    auto tSrS =
        cute::partition_fragment_C(MmaS{}, cute::Shape<cute::_64, typename Traits::TileM>{});
    auto tPrDp = cute::make_fragment_like(tSrS);
    auto tVrP = cute::make_tensor<Element>(operand_a_layout(tSrS.layout()));  // ((2,2,2),1,M/16)
    auto tKrDs = cute::make_tensor<Element>(tVrP.layout());
    auto tKrDk =
        cute::partition_fragment_C(MmaDkv{}, cute::Shape<cute::_64, typename Traits::HeadDim>{});
    auto tVrDv = cute::make_fragment_like(tKrDk);
    limits = KeyLimits::of_warpgroup<Traits>(p, first_key(), thread);

    BwdSteps steps(shared.work);
    if (warpgroup == 1) {
      give_turn();
    }
    first_products(tSrS, tPrDp);
    transform(steps, tSrS, tPrDp, tVrP, tKrDs);
    bool is_first = true;
    for (steps.next(); steps.valid(); steps.next()) {
      products(is_first, tSrS, tPrDp, tVrP, tKrDs, tVrDv, tKrDk);
      transform(steps, tSrS, tPrDp, tVrP, tKrDs);
      is_first = false;
    }
    last_products(is_first, tVrP, tKrDs, tVrDv, tKrDk);
    store_gradients<Traits>(shared, p, warpgroup, thread, tKrDk, tVrDv);
  }

 private:
  CUTE_DEVICE static int stage(uint32_t step) { return step % Traits::kStages; }
  CUTE_DEVICE static uint32_t phase(uint32_t step) { return step / Traits::kStages % 2; }

  CUTE_DEVICE int first_key() const { return shared.work.key_begin + warpgroup * kWarpgroupRows; }

  CUTE_DEVICE void take_turn() const {
    named_sync(warpgroup == 0 ? NamedBarrier::kTurnFirst : NamedBarrier::kTurnSecond,
               2 * kWarpgroupThreads);
  }

  CUTE_DEVICE void give_turn() const {
    named_arrive(warpgroup == 0 ? NamedBarrier::kTurnSecond : NamedBarrier::kTurnFirst,
                 2 * kWarpgroupThreads);
  }

  // The step whose dQ is next; -1: none yet.
  CUTE_DEVICE int dq_step() const { return int(count) - (warpgroup == 0 ? 1 : 0); }

  template <class FragmentS>
  CUTE_DEVICE void first_products(FragmentS& tSrS, FragmentS& tPrDp) {
    shared.k_full.wait(0);
    shared.v_full.wait(0);
    take_turn();
    issue_scores(tSrS, 0);
    issue_dp(tPrDp, 0);
    give_turn();
  }

  // A turn on the tensor cores: the gradients of a step, S and dP of the next. dQ is staged while
  // dK runs.
  template <class FragmentS, class FragmentD, class FragmentDs>
  CUTE_DEVICE void products(bool is_first, FragmentS& tSrS, FragmentS& tPrDp,
                            FragmentDs const& tVrP, FragmentDs const& tKrDs, FragmentD& tVrDv,
                            FragmentD& tKrDk) {
    take_turn();
    issue_gradients(is_first, tVrP, tKrDs, tVrDv, tKrDk);
    issue_scores(tSrS, count + 1);
    wait_gemm<1>(tKrDk);
    release_stage();
    issue_dp(tPrDp, count + 1);
    give_turn();
    ++count;
  }

  template <class FragmentD, class FragmentDs>
  CUTE_DEVICE void last_products(bool is_first, FragmentDs const& tVrP, FragmentDs const& tKrDs,
                                 FragmentD& tVrDv, FragmentD& tKrDk) {
    take_turn();
    issue_gradients(is_first, tVrP, tKrDs, tVrDv, tKrDk);
    give_turn();
    wait_gemm<0>(tKrDk);
    ++count;
    if (warpgroup == 0) {
      auto tQrDq = dq_fragment();
      take_turn();
      issue_dq(tQrDq);
      wait_gemm<0>(tQrDq);
      stage_dq(tQrDq);
    }
  }

  // Ends with dV and dQ complete, dQ staged, dK issued.
  template <class FragmentD, class FragmentDs>
  CUTE_DEVICE void issue_gradients(bool is_first, FragmentDs const& tVrP, FragmentDs const& tKrDs,
                                   FragmentD& tVrDv, FragmentD& tKrDk) {
    auto tQrDq = dq_fragment();
    issue_keys_gemm(tVrP, shared.dout[stage(count)], tVrDv, is_first);
    issue_dq(tQrDq);
    issue_keys_gemm(tKrDs, shared.q[stage(count)], tKrDk, is_first);
    wait_gemm<1>(tQrDq);
    cute::warpgroup_fence_operand(tVrDv);
    stage_dq(tQrDq);
  }

  // The work of the threads: S and dP, issued, become P and dS in registers, and dS in shared
  // memory.
  template <class FragmentS, class FragmentDs>
  CUTE_DEVICE void transform(BwdSteps const& steps, FragmentS& tSrS, FragmentS& tPrDp,
                             FragmentDs& tVrP, FragmentDs& tKrDs) {
    wait_gemm<1>(tSrS);
    if (steps.is_masked()) {
      limits.apply(tSrS, steps.m * Traits::kTileM);
    }
    probabilities(tSrS);
    convert_fragment<Element>(tSrS, tVrP);
    wait_gemm<0>(tPrDp);
    multiply_scores(tSrS, tPrDp);
    convert_fragment<Element>(tPrDp, tKrDs);
    stage_scores(tKrDs);
  }

  // S^T = K Q^T of a step.
  template <class Fragment>
  CUTE_DEVICE void issue_scores(Fragment& tSrS, uint32_t step) {
    shared.q_full[stage(step)].wait(phase(step));
    issue_query_gemm(shared.k, shared.q[stage(step)], tSrS);
  }

  // dP^T = V dO^T of a step.
  template <class Fragment>
  CUTE_DEVICE void issue_dp(Fragment& tPrDp, uint32_t step) {
    shared.dout_full[stage(step)].wait(phase(step));
    issue_query_gemm(shared.v, shared.dout[stage(step)], tPrDp);
  }

  // 64 rows of K or V times Q^T or dO^T.
  template <class Fragment>
  CUTE_DEVICE void issue_query_gemm(Element* keys, Element* queries, Fragment& acc) {
    auto sA =
        cute::make_tensor(cute::make_smem_ptr(keys + warpgroup * kWarpgroupRows * kSliceColumns),
                          typename Traits::SmemLayoutKRows{});  // (64, head dim)
    auto sB = cute::make_tensor(cute::make_smem_ptr(queries),
                                typename Traits::SmemLayoutQ{});  // (M, head dim)
    auto mma = MmaS{}.get_slice(0);
    auto a = mma.partition_fragment_A(sA);  // (MMA, 1, head dim / 16)
    auto b = mma.partition_fragment_B(sB);  // (MMA, 1, head dim / 16)
    issue_gemm<Traits::kHeadDim / 16>(MmaS{}, a, b, acc, true);
  }

  // dV += P^T dO or dK += dS^T Q.
  template <class FragmentA, class FragmentD>
  CUTE_DEVICE void issue_keys_gemm(FragmentA const& a, Element* queries, FragmentD& acc,
                                   bool is_first) {
    auto sB = cute::make_tensor(cute::make_smem_ptr(queries),
                                typename Traits::SmemLayoutQt{});  // (head dim, M)
    auto b = MmaDkv{}.get_slice(0).partition_fragment_B(sB);       // (MMA, 1, M / 16)
    issue_gemm<Traits::kTileM / 16>(MmaDkv{}, a, b, acc, is_first);
  }

  CUTE_DEVICE static auto dq_fragment() {
    return cute::partition_fragment_C(MmaDq{},
                                      cute::Shape<cute::_64, typename Traits::DqColumns>{});
  }

  // This warpgroup's block of dQ = dS K. (Of dq_step() -1 the values mean nothing, and are dropped:
  // the product stands there for ptxas.)
  template <class Fragment>
  CUTE_DEVICE void issue_dq(Fragment& tQrDq) {
    constexpr DqLayout kDq = Traits::kDq;
    int const row = kDq.first_row(warpgroup);
    int const column = kDq.first_column(warpgroup);
    auto sDs =
        cute::make_tensor(cute::make_smem_ptr(shared.ds[dq_step() & 1] + row * kSliceColumns),
                          typename Traits::SmemLayoutDsRows{});  // (64, N)
    auto sKt = cute::make_tensor(cute::make_smem_ptr(shared.k + column * Traits::kTileN),
                                 typename Traits::SmemLayoutKt{});  // (columns, N)
    auto mma = MmaDq{}.get_slice(0);
    auto tQrDs = mma.partition_fragment_A(sDs);  // (MMA, 1, N / 16)
    auto tQrK = mma.partition_fragment_B(sKt);   // (MMA, 1, N / 16)
    issue_gemm<Traits::kTileN / 16>(MmaDq{}, tQrDs, tQrK, tQrDq, true);
  }

  // S becomes P = exp2(S * scale_log2 - LSE).
  template <class Fragment>
  CUTE_DEVICE void probabilities(Fragment& acc) {
    auto scores = rows_view(acc);  // (2, (2, J))
    float2 const* const lse = row_values(shared.lse_log2[stage(count)]);
    CUTE_UNROLL
    for (int j = 0; j < Traits::kTileM / 8; ++j) {
      float2 const pair = lse[4 * j];
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        scores(r, 2 * j) = exp2_approx(scores(r, 2 * j) * p.scale_log2 - pair.x);
        scores(r, 2 * j + 1) = exp2_approx(scores(r, 2 * j + 1) * p.scale_log2 - pair.y);
      }
    }
  }

  // dP becomes dS = P * (dP - delta), without the scale.
  template <class Fragment>
  CUTE_DEVICE void multiply_scores(Fragment& acc, Fragment& tPrDp) {
    auto probability = rows_view(acc);  // (2, (2, J))
    auto gradient = rows_view(tPrDp);   // (2, (2, J))
    float2 const* const delta = row_values(shared.delta[stage(count)]);
    CUTE_UNROLL
    for (int j = 0; j < Traits::kTileM / 8; ++j) {
      float2 const pair = delta[4 * j];
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        gradient(r, 2 * j) = probability(r, 2 * j) * (gradient(r, 2 * j) - pair.x);
        gradient(r, 2 * j + 1) = probability(r, 2 * j + 1) * (gradient(r, 2 * j + 1) - pair.y);
      }
    }
  }

  // Of this thread's first two columns; those of the next 8 columns come 4 pairs later.
  CUTE_DEVICE float2 const* row_values(float const* values) const {
    return reinterpret_cast<float2 const*>(values + fragment_column(thread));
  }

  // dS, transposed, to where all warpgroups read it: (M, N), keys contiguous. A store takes four 8
  // x 8 blocks: 16 keys of the warp, 16 queries; a lane gives the address of one query of one
  // block. The change of turn orders these stores before the products that read them.
  template <class Fragment>
  CUTE_DEVICE void stage_scores(Fragment& tKrDs) {
    auto pairs = cute::recast<uint32_t>(tKrDs);
    char* const target = reinterpret_cast<char*>(shared.ds[count & 1]);
    int const lane = thread % 32;
    int const row = lane / 16 * 8 + lane % 8;
    int const chunk = warpgroup * 8 + thread / 32 * 2 + lane / 8 % 2;
    CUTE_UNROLL
    for (int i = 0; i < Traits::kTileM / 16; ++i) {
      char* const block = target + chunk_offset_bytes<Traits::kTileM>(16 * i + row, chunk);
      cute::SM90_U16x8_STSM_T::copy(pairs(4 * i), pairs(4 * i + 1), pairs(4 * i + 2),
                                    pairs(4 * i + 3), *reinterpret_cast<cute::uint128_t*>(block));
    }
    fence_shared_for_async_proxy();
  }

  // dQ to the store warp, in the order of core/dq_layout.h.
  template <class Fragment>
  CUTE_DEVICE void stage_dq(Fragment const& tQrDq) {
    if (dq_step() < 0) {
      return;
    }
    shared.dq_empty[warpgroup].wait(dq_step() % 2 ^ 1);
    float4* const target = reinterpret_cast<float4*>(shared.dq[warpgroup]) + thread;
    CUTE_UNROLL
    for (int j = 0; j < Traits::kDq.columns / 8; ++j) {
      target[j * kWarpgroupThreads] =
          make_float4(tQrDq(4 * j), tQrDq(4 * j + 1), tQrDq(4 * j + 2), tQrDq(4 * j + 3));
    }
    fence_shared_for_async_proxy();
    __syncwarp();
    if (thread % 32 == 0) {
      shared.dq_staged[warpgroup].arrive();
    }
  }

  // One thread speaks for the warpgroup: its products are complete for all its warps at once, and
  // all of them had read LSE and delta when they took the turn.
  CUTE_DEVICE void release_stage() {
    if (thread == 0) {
      shared.q_empty[stage(count)].arrive();
      shared.dout_empty[stage(count)].arrive();
    }
  }
};

}  // namespace fa3
