// Shared by all consumer warpgroups of the backward: how each of the five products reads its
// operands, and the arithmetic on scores. Scores are S^T and dP^T, with keys as rows.
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
  using MmaDq = typename Traits::MmaDq;

  BwdStorage<Traits>& shared;
  BwdDeviceParams const& p;
  int thread;  // in the warpgroup

  CUTE_DEVICE BwdProducts(BwdStorage<Traits>& shared_, BwdDeviceParams const& p_, int thread_)
      : shared(shared_), p(p_), thread(thread_) {}

  // Stages of the rings at a step, counted over all heads.
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

  // The accumulator of dK or dV. Q and K may have another head dim than V, so it is a template
  // argument.
  template <int kDim>
  CUTE_DEVICE static auto gradient_fragment() {
    return cute::partition_fragment_C(typename Traits::template MmaDkv<kDim>{},
                                      cute::Shape<cute::_64, cute::Int<kDim>>{});
  }

  CUTE_DEVICE static auto dq_fragment() {
    return cute::partition_fragment_C(MmaDq{},
                                      cute::Shape<cute::_64, typename Traits::DqColumns>{});
  }

  // S^T = K Q^T or dP^T = V dO^T, 64 keys from `first_key` of the tile.
  template <int kDim, int kSlice = kSliceColumns, class Fragment>
  CUTE_DEVICE void issue_scores_gemm(Element* keys, int first_key, Element* queries,
                                     Fragment& acc) {
    auto sA = cute::make_tensor(
        cute::make_smem_ptr(keys + first_key * kSlice),
        typename Traits::template SmemLayoutKeyRows<kDim, kSlice>{});  // (64, dim)
    auto sB = cute::make_tensor(cute::make_smem_ptr(queries),
                                typename Traits::template SmemLayoutQ<kDim>{});  // (M, dim)
    auto mma = MmaS{}.get_slice(0);
    auto a = mma.partition_fragment_A(sA);  // (MMA, 1, dim / 16)
    auto b = mma.partition_fragment_B(sB);  // (MMA, 1, dim / 16)
    issue_gemm<kDim / 16>(MmaS{}, a, b, acc, true);
  }

  // dV += P^T dO or dK += dS^T Q.
  template <int kDim, class FragmentA, class FragmentD>
  CUTE_DEVICE void issue_gradient_gemm(FragmentA const& a, Element* queries, FragmentD& acc,
                                       bool is_first) {
    auto sB = cute::make_tensor(cute::make_smem_ptr(queries),
                                typename Traits::template SmemLayoutQt<kDim>{});  // (columns, M)
    auto split = typename Traits::template MmaQt<kDim>{}.get_slice(0);
    auto b = split.partition_fragment_B(sB);  // (MMA, 1, M / 16)
    issue_gemm<Traits::kTileM / 16>(typename Traits::template MmaDkv<kDim>{}, a, b, acc, is_first);
  }

  // A block of dQ = dS K or dQ += dS K: 64 rows of dS, columns of K.
  template <class Fragment>
  CUTE_DEVICE void issue_dq_gemm(Element* ds, int first_row, Element* keys, int first_column,
                                 Fragment& tQrDq, bool is_first = true) {
    constexpr bool kIsHalfSlice = Traits::kDq.columns < Traits::kKeySlice;
    auto sDs = cute::make_tensor(cute::make_smem_ptr(ds + first_row * kSliceColumns),
                                 typename Traits::SmemLayoutDsRows{});  // (64, N)
    int const in_slice = kIsHalfSlice ? first_column % Traits::kKeySlice : 0;
    auto sKt = cute::make_tensor(
        cute::make_smem_ptr(keys + (first_column - in_slice) * Traits::kTileN + in_slice),
        typename Traits::SmemLayoutKt{});  // (columns of dQ, N)
    auto mma = MmaDq{}.get_slice(0);
    auto tQrDs = mma.partition_fragment_A(sDs);  // (MMA, 1, N / 16)
    auto tQrK = typename Traits::MmaKt{}.get_slice(0).partition_fragment_B(sKt);  // as dS
    issue_gemm<Traits::kTileN / 16>(MmaDq{}, tQrDs, tQrK, tQrDq, is_first);
  }

  // S becomes the score that the softmax sees.
  template <class Fragment>
  CUTE_DEVICE void replace_scores(Fragment& acc, BwdScoresAt const& at) const {
    float const factors[2] = {Traits::Score::factor(p), Traits::Score::factor(p)};
    Traits::Score::forward(acc, factors, at);
  }

  // S becomes P = exp2(S * scale_log2 - LSE), times 2^factor_log2.
  template <class Fragment>
  CUTE_DEVICE void probabilities(Fragment& acc, uint32_t step, float factor_log2 = 0.f) {
    auto scores = rows_view(acc);  // (2, (2, J))
    float2 const* const lse = row_values(shared.lse_log2[q_stage(step)]);
    CUTE_UNROLL
    for (int j = 0; j < Traits::kTileM / 8; ++j) {
      float2 const pair = make_float2(lse[4 * j].x - factor_log2, lse[4 * j].y - factor_log2);
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

  // With Score::kHasSlope, where S is t: P and the factor of dP - delta in dS, P times the slope,
  // for two scores of a row.
  struct Factors {
    float2 p;
    float2 ds_factor;
  };

  CUTE_DEVICE Factors sloped_factors(float s0, float s1, float2 lse) const {
    float const x = exp2_approx(s0 * p.scale_log2 - lse.x);
    float const y = exp2_approx(s1 * p.scale_log2 - lse.y);
    return Factors{make_float2(x, y),
                   make_float2(x * Traits::Score::slope(s0), y * Traits::Score::slope(s1))};
  }

  // Stores dS, transposed, to shared memory: (M, N), keys contiguous.
  template <class Fragment>
  CUTE_DEVICE void stage_scores(Fragment& tKrDs, Element* ds, int first_key) {
    auto pairs = cute::recast<uint32_t>(tKrDs);
    CUTE_UNROLL
    for (int i = 0; i < Traits::kTileM / 16; ++i) {
      cute::SM90_U16x8_STSM_T::copy(pairs(4 * i), pairs(4 * i + 1), pairs(4 * i + 2),
                                    pairs(4 * i + 3), four_blocks(ds, first_key, i));
    }
    fence_shared_for_async_proxy();
  }

  // Reloads what this warp has stored.
  template <class Fragment>
  CUTE_DEVICE void reload_scores(Element* ds, int first_key, Fragment& tKrDs) const {
    auto pairs = cute::recast<uint32_t>(tKrDs);
    CUTE_UNROLL
    for (int i = 0; i < Traits::kTileM / 16; ++i) {
      cute::SM75_U16x8_LDSM_T::copy(four_blocks(ds, first_key, i), pairs(4 * i), pairs(4 * i + 1),
                                    pairs(4 * i + 2), pairs(4 * i + 3));
    }
  }

  // The address of this lane's row in four 8 x 8 blocks: 16 keys of the warp, the i-th 16 queries.
  CUTE_DEVICE cute::uint128_t& four_blocks(Element* ds, int first_key, int i) const {
    int const lane = thread % 32;
    int const row = lane / 16 * 8 + lane % 8;
    int const chunk = first_key / 8 + thread / 32 * 2 + lane / 8 % 2;
    char* const block =
        reinterpret_cast<char*>(ds) + chunk_offset_bytes<Traits::kTileM>(16 * i + row, chunk);
    return *reinterpret_cast<cute::uint128_t*>(block);
  }

  // One elected lane of each warp arrives.
  CUTE_DEVICE void arrive_from_warps(Mbarrier& barrier) const {
    __syncwarp();
    if (thread % 32 == 0) {
      barrier.arrive();
    }
  }

  // The values of this thread's first two columns; those of the next 8 columns are 4 pairs further
  // on.
  CUTE_DEVICE float2 const* row_values(float const* values) const {
    return reinterpret_cast<float2 const*>(values + fragment_column(thread));
  }
};

}  // namespace fa3
