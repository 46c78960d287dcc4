// A consumer warpgroup: the five products and what is between them, for its 64 keys.
//
// A step is a tile of queries. Its second half issues S of the next step before it stores dQ, so
// that the tensor cores have work meanwhile; S has its registers back by then, and dQ and the next
// dP take turns in the same ones:
//
//   tensor cores   S0 | dP0     dV0 | dK0 dQ0 S1 | dP1     dV1 | dK1 dQ1 S2 | ...
//   this thread         P0    dS0         dQ0      P1    dS1         dQ1
//
// dQ needs dS of all keys: the warpgroups meet in shared memory, once a step (`ds_full`).
//
// TRAP: nothing may be outstanding where the loop closes, or be issued under a condition: ptxas
// (13.0) then serialises every product. And there is no register for the exact P beside the rounded
// one: D x M of 128 x 64 and 64 x 128 then need a few more than 240.
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
    auto tKrDs = cute::make_tensor<Element>(operand_a_layout(tSrS.layout()));  // ((2,2,2),1,M/16)
    auto tKrDk =
        cute::partition_fragment_C(MmaDkv{}, cute::Shape<cute::_64, typename Traits::HeadDim>{});
    auto tVrDv = cute::make_fragment_like(tKrDk);
    limits = KeyLimits::of_warpgroup<Traits>(p, first_key(), thread);

    BwdSteps steps(shared.work);
    shared.k_full.wait(0);
    issue_scores(tSrS, 0);
    shared.v_full.wait(0);
    first_half(steps, true, tSrS, tVrDv, tKrDs);
    bool is_first = true;
    for (steps.next(); steps.valid(); steps.next()) {
      second_half<true>(is_first, tSrS, tKrDk, tKrDs);
      first_half(steps, false, tSrS, tVrDv, tKrDs);
      is_first = false;
    }
    second_half<false>(is_first, tSrS, tKrDk, tKrDs);
    store_gradients<Traits>(shared, p, warpgroup, thread, tKrDk, tVrDv);
  }

 private:
  CUTE_DEVICE static int stage(uint32_t step) { return step % Traits::kStages; }
  CUTE_DEVICE static uint32_t phase(uint32_t step) { return step / Traits::kStages % 2; }

  CUTE_DEVICE int first_key() const { return shared.work.key_begin + warpgroup * kWarpgroupRows; }

  // Finds S issued; ends with dS in registers and in shared memory, and dV complete.
  template <class FragmentS, class FragmentD, class FragmentDs>
  CUTE_DEVICE void first_half(BwdSteps const& steps, bool is_first, FragmentS& tSrS,
                              FragmentD& tVrDv, FragmentDs& tKrDs) {
    auto tPrDp = cute::make_fragment_like(tSrS);
    auto tVrP = cute::make_tensor<Element>(tKrDs.layout());  // ((2,2,2),1,M/16)

    shared.dout_full[stage(count)].wait(phase(count));
    issue_query_gemm(shared.v, shared.dout[stage(count)], tPrDp);
    wait_gemm<1>(tSrS);
    if (steps.is_masked()) {
      limits.apply(tSrS, steps.m * Traits::kTileM);
    }
    probabilities(tSrS);
    convert_fragment<Element>(tSrS, tVrP);
    issue_keys_gemm(tVrP, shared.dout[stage(count)], tVrDv, is_first);
    wait_gemm<1>(tPrDp);
    multiply_scores(tVrP, tPrDp);
    convert_fragment<Element>(tPrDp, tKrDs);
    stage_scores(tKrDs);
    wait_gemm<0>(tVrDv);
  }

  // Ends with dK complete and dQ staged, and with S of the next step issued, if there is one.
  template <bool kHasNext, class FragmentS, class FragmentD, class FragmentDs>
  CUTE_DEVICE void second_half(bool is_first, FragmentS& tSrS, FragmentD& tKrDk,
                               FragmentDs const& tKrDs) {
    auto tQrDq =
        cute::partition_fragment_C(MmaDq{}, cute::Shape<cute::_64, typename Traits::DqColumns>{});

    issue_keys_gemm(tKrDs, shared.q[stage(count)], tKrDk, is_first);
    shared.ds_full[count % kDsBuffers].wait(count / kDsBuffers % 2);
    issue_dq(tQrDq);
    if constexpr (kHasNext) {
      issue_scores(tSrS, count + 1);
    }
    wait_gemm<kHasNext ? 1 : 0>(tQrDq);
    cute::warpgroup_fence_operand(tKrDk);
    release_stage();
    stage_dq(tQrDq);
    ++count;
  }

  // S^T = K Q^T of a step.
  template <class Fragment>
  CUTE_DEVICE void issue_scores(Fragment& tSrS, uint32_t step) {
    shared.q_full[stage(step)].wait(phase(step));
    issue_query_gemm(shared.k, shared.q[stage(step)], tSrS);
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

  // This warpgroup's block of dQ = dS K.
  template <class Fragment>
  CUTE_DEVICE void issue_dq(Fragment& tQrDq) {
    constexpr DqLayout kDq = Traits::kDq;
    int const row = kDq.first_row(warpgroup);
    int const column = kDq.first_column(warpgroup);
    auto sDs =
        cute::make_tensor(cute::make_smem_ptr(shared.ds[count % kDsBuffers] + row * kSliceColumns),
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

  // dP becomes dS = P * (dP - delta), without the scale. P is the rounded one: with the exact one
  // in registers too, there are not enough of them.
  template <class FragmentP, class Fragment>
  CUTE_DEVICE void multiply_scores(FragmentP const& tVrP, Fragment& tPrDp) {
    auto pairs = cute::recast<uint32_t>(tVrP);
    auto gradient = rows_view(tPrDp);  // (2, (2, J))
    float2 const* const delta = row_values(shared.delta[stage(count)]);
    CUTE_UNROLL
    for (int j = 0; j < Traits::kTileM / 8; ++j) {
      float2 const pair = delta[4 * j];
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        float2 const probability = unpack_two<Element>(pairs(2 * j + r));
        gradient(r, 2 * j) = probability.x * (gradient(r, 2 * j) - pair.x);
        gradient(r, 2 * j + 1) = probability.y * (gradient(r, 2 * j + 1) - pair.y);
      }
    }
  }

  // Of this thread's first two columns; those of the next 8 columns come 4 pairs later.
  CUTE_DEVICE float2 const* row_values(float const* values) const {
    return reinterpret_cast<float2 const*>(values + fragment_column(thread));
  }

  // dS, transposed, to where all warpgroups read it: (M, N), keys contiguous. A store takes four 8
  // x 8 blocks: 16 keys of the warp, 16 queries; a lane gives the address of one query of one
  // block.
  template <class Fragment>
  CUTE_DEVICE void stage_scores(Fragment& tKrDs) {
    auto pairs = cute::recast<uint32_t>(tKrDs);
    char* const target = reinterpret_cast<char*>(shared.ds[count % kDsBuffers]);
    int const lane = thread % 32;
    int const row = lane / 16 * 8 + lane % 8;
    int const chunk = warpgroup * 8 + thread / 32 * 2 + lane / 8 % 2;
    CUTE_UNROLL
    for (int i = 0; i < Traits::kTileM / 16; ++i) {
      char* const block = target + chunk_offset_bytes<Traits::kTileM>(16 * i + row, chunk);
      cute::SM90_U16x8_STSM_T::copy(pairs(4 * i), pairs(4 * i + 1), pairs(4 * i + 2),
                                    pairs(4 * i + 3), *reinterpret_cast<cute::uint128_t*>(block));
    }
    arrive_from_warps(shared.ds_full[count % kDsBuffers]);
  }

  // dQ to the store warp, in the order of core/dq_layout.h.
  template <class Fragment>
  CUTE_DEVICE void stage_dq(Fragment const& tQrDq) {
    shared.dq_empty[warpgroup].wait(count % 2 ^ 1);
    float4* const target = reinterpret_cast<float4*>(shared.dq[warpgroup]) + thread;
    CUTE_UNROLL
    for (int j = 0; j < Traits::kDq.columns / 8; ++j) {
      target[j * kWarpgroupThreads] =
          make_float4(tQrDq(4 * j), tQrDq(4 * j + 1), tQrDq(4 * j + 2), tQrDq(4 * j + 3));
    }
    arrive_from_warps(shared.dq_staged[warpgroup]);
  }

  // After stores that the copy engine or the tensor cores read: each warp speaks for itself.
  CUTE_DEVICE void arrive_from_warps(Mbarrier& barrier) {
    fence_shared_for_async_proxy();
    __syncwarp();
    if (thread % 32 == 0) {
      barrier.arrive();
    }
  }

  // One thread speaks for the warpgroup: its products are complete for all its warps at once, and
  // `ds_full` has shown that all of them have read LSE and delta.
  CUTE_DEVICE void release_stage() {
    if (thread == 0) {
      shared.q_empty[stage(count)].arrive();
      shared.dout_empty[stage(count)].arrive();
    }
  }
};

}  // namespace fa3
