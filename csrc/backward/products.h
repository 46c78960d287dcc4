// What the consumer warpgroups of the backward have in common: how each of the five products reads
// its operands, and the arithmetic on scores. They come as S^T and dP^T, keys as rows.
#pragma once

#include "backward/mask.h"
#include "backward/storage.h"
#include "core/softmax_math.h"
#include "device/gemm.h"
#include "device/math.h"

namespace fa3 {

template <class Traits>
struct BwdProducts {
  using Element = typename Traits::Element;
  using MmaS = typename Traits::MmaS;
  using MmaDkv = typename Traits::MmaDkv;
  using MmaDq = typename Traits::MmaDq;

  BwdStorage<Traits>& shared;
  BwdDeviceParams const& p;
  int thread;  // in the warpgroup

  CUTE_DEVICE BwdProducts(BwdStorage<Traits>& shared_, BwdDeviceParams const& p_, int thread_)
      : shared(shared_), p(p_), thread(thread_) {}

  // Where the rings stand at a step, counted over all heads.
  CUTE_DEVICE static int q_stage(uint32_t step) { return step % Traits::kQStages; }
  CUTE_DEVICE static int dout_stage(uint32_t step) { return step % Traits::kDoutStages; }

  CUTE_DEVICE void wait_for_q(uint32_t step) const {
    shared.q_full[q_stage(step)].wait(step / Traits::kQStages % 2);
  }

  CUTE_DEVICE void wait_for_dout(uint32_t step) const {
    shared.dout_full[dout_stage(step)].wait(step / Traits::kDoutStages % 2);
  }

  CUTE_DEVICE static auto scores_fragment() {
    return cute::partition_fragment_C(MmaS{}, cute::Shape<cute::_64, typename Traits::TileM>{});
  }

  // P or dS as the first operand of dV or dK: ((2,2,2),1,M/16)
  CUTE_DEVICE static auto operand_fragment() {
    return cute::make_tensor<Element>(operand_a_layout(scores_fragment().layout()));
  }

  CUTE_DEVICE static auto gradient_fragment() {
    return cute::partition_fragment_C(MmaDkv{}, cute::Shape<cute::_64, typename Traits::HeadDim>{});
  }

  CUTE_DEVICE static auto dq_fragment() {
    return cute::partition_fragment_C(MmaDq{},
                                      cute::Shape<cute::_64, typename Traits::DqColumns>{});
  }

  // S^T = K Q^T or dP^T = V dO^T, 64 keys from `first_key` of the tile.
  template <class Fragment>
  CUTE_DEVICE void issue_scores_gemm(Element* keys, int first_key, Element* queries,
                                     Fragment& acc) {
    auto sA = cute::make_tensor(cute::make_smem_ptr(keys + first_key * kSliceColumns),
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
  CUTE_DEVICE void issue_gradient_gemm(FragmentA const& a, Element* queries, FragmentD& acc,
                                       bool is_first) {
    auto sB = cute::make_tensor(cute::make_smem_ptr(queries),
                                typename Traits::SmemLayoutQt{});             // (columns, M)
    auto b = typename Traits::MmaQt{}.get_slice(0).partition_fragment_B(sB);  // (MMA, 1, M / 16)
    issue_gemm<Traits::kTileM / 16>(MmaDkv{}, a, b, acc, is_first);
  }

  // A block of dQ = dS K or dQ += dS K: 64 rows of dS, columns of K.
  template <class Fragment>
  CUTE_DEVICE void issue_dq_gemm(Element* ds, int first_row, Element* keys, int first_column,
                                 Fragment& tQrDq, bool is_first = true) {
    auto sDs = cute::make_tensor(cute::make_smem_ptr(ds + first_row * kSliceColumns),
                                 typename Traits::SmemLayoutDsRows{});  // (64, N)
    auto sKt = cute::make_tensor(cute::make_smem_ptr(keys + first_column * Traits::kTileN),
                                 typename Traits::SmemLayoutKt{});  // (columns of dQ, N)
    auto mma = MmaDq{}.get_slice(0);
    auto tQrDs = mma.partition_fragment_A(sDs);  // (MMA, 1, N / 16)
    auto tQrK = mma.partition_fragment_B(sKt);   // (MMA, 1, N / 16)
    issue_gemm<Traits::kTileN / 16>(MmaDq{}, tQrDs, tQrK, tQrDq, is_first);
  }

  // S becomes P = exp2(S * scale_log2 - LSE).
  template <class Fragment>
  CUTE_DEVICE void probabilities(Fragment& acc, uint32_t step) {
    auto scores = rows_view(acc);  // (2, (2, J))
    float2 const* const lse = row_values(shared.lse_log2[q_stage(step)]);
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
  template <class FragmentP, class Fragment>
  CUTE_DEVICE void multiply_scores(FragmentP const& acc, Fragment& tPrDp, uint32_t step) {
    auto probability = rows_view(acc);  // (2, (2, J))
    auto gradient = rows_view(tPrDp);   // (2, (2, J))
    float2 const* const delta = row_values(shared.delta[dout_stage(step)]);
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

  // dS, transposed, to shared memory: (M, N), keys contiguous. A store takes four 8 x 8 blocks: 16
  // keys of the warp, 16 queries; a lane gives the address of one query of one block.
  template <class Fragment>
  CUTE_DEVICE void stage_scores(Fragment& tKrDs, Element* ds, int first_key) {
    auto pairs = cute::recast<uint32_t>(tKrDs);
    char* const target = reinterpret_cast<char*>(ds);
    int const lane = thread % 32;
    int const row = lane / 16 * 8 + lane % 8;
    int const chunk = first_key / 8 + thread / 32 * 2 + lane / 8 % 2;
    CUTE_UNROLL
    for (int i = 0; i < Traits::kTileM / 16; ++i) {
      char* const block = target + chunk_offset_bytes<Traits::kTileM>(16 * i + row, chunk);
      cute::SM90_U16x8_STSM_T::copy(pairs(4 * i), pairs(4 * i + 1), pairs(4 * i + 2),
                                    pairs(4 * i + 3), *reinterpret_cast<cute::uint128_t*>(block));
    }
    fence_shared_for_async_proxy();
  }

  // Each warp speaks for itself.
  CUTE_DEVICE void arrive_from_warps(Mbarrier& barrier) const {
    __syncwarp();
    if (thread % 32 == 0) {
      barrier.arrive();
    }
  }

  // Of this thread's first two columns; those of the next 8 columns come 4 pairs later.
  CUTE_DEVICE float2 const* row_values(float const* values) const {
    return reinterpret_cast<float2 const*>(values + fragment_column(thread));
  }
};

}  // namespace fa3
