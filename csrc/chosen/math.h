// The two math warpgroups. Each tile of 64 keys:
//
// - Warpgroup 0 computes S = Q K^T and P, and gives P to warpgroup 1 in float32.
// - Warpgroup 1 computes dP = dO V^T, then dS = P (dP - delta).
// - Each adds half of the columns of dQ, and computes half of the columns of dK and dV.
//
// P and dS go through shared memory in 16 bits: the first operand of dQ += dS K, and transposed of
// dK = dS^T Q and dV = P^T dO, which are added to float32 sums in global memory, row by row. dQ
// stays in registers. The next tile of keys is loaded during dK and dV, which do not read it.
//
// TRAP: no product is outstanding where a loop closes, else ptxas serialises them.
#pragma once

#include "chosen/traits.h"

namespace fa3 {

// The index of four values of a thread in a row of sums, which has 64 columns a slice: columns 2 t,
// 2 t + 1, 2 t + 8 and 2 t + 9 of group `group` of 16, which lane t of a quad holds.
CUTE_HOST_DEVICE constexpr int sum_index(int slice, int group, int lane_of_quad) {
  return slice * kSlice + group * 16 + lane_of_quad * 4;
}

template <class Traits, int kNumber>
struct ChosenMath {
  using Element = typename Traits::Element;
  template <int kSlices>
  using SumsOf =
      decltype(cute::partition_fragment_C(typename Traits::template MmaDq<kSlice * kSlices>{},
                                          cute::Shape<cute::_64, cute::Int<kSlice * kSlices>>{}));
  using Sums = SumsOf<1>;
  static constexpr int kFirstDq = kNumber == 0 ? 0 : Traits::kOwnDq;
  static constexpr int kDqSlices =
      kNumber == 0 ? Traits::kOwnDq : Traits::kSlicesQ - Traits::kOwnDq;
  // In two parts, as a product has at most four slices.
  static constexpr int kDqPart = (kDqSlices + 1) / 2;
  static constexpr int kOtherDqPart = kDqSlices / 2;
  static constexpr int kFirstKeys = kNumber == 0 ? 0 : Traits::kOwnKeys;
  static constexpr int kEndKeys = kNumber == 0 ? Traits::kOwnKeys : Traits::kSlices;

  struct Dq {
    SumsOf<max_of(kDqPart, 1)> first;
    SumsOf<max_of(kOtherDqPart, 1)> second;
  };

  ChosenStorage<Traits>& shared;
  ChosenGradientParams const& p;
  ChosenWork work;
  int thread;  // its number in the warpgroup

  CUTE_DEVICE void run() {
    prepare_rows();
    Dq dq;
    cute::clear(dq.first);
    cute::clear(dq.second);
    ChosenList const list(p, work);
    shared.q_full.wait(0);
    CUTE_NO_UNROLL
    for (int tile = 0; tile < list.tiles(); ++tile) {
      int rows[2];
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        rows[r] = list.row_of(tile * kTileKeys + fragment_row(thread) + 8 * r);
      }
      if (kNumber == 1 && tile > 0) {
        sync_or_arrive(kScoresUnread);
      }
      shared.keys_full.wait(tile % 2);
      fence_shared_for_async_proxy();
      compute_scores(list, tile);
      fence_shared_for_async_proxy();
      named_sync(NamedBarrier(kScoresReady), kMathThreads);
      add_to_dq(dq);
      add_to_keys<kFirstKeys>(rows);
    }
    store_dq<kDqPart>(dq.first, kFirstDq);
    store_dq<kOtherDqPart>(dq.second, kFirstDq + kDqPart);
  }

 private:
  // 1 waits for kProbabilities, 0 for the other barriers.
  CUTE_DEVICE void sync_or_arrive(ChosenBarrier barrier) const {
    if ((barrier == kProbabilities) == (kNumber == 1)) {
      named_sync(NamedBarrier(barrier), kMathThreads);
    } else {
      named_arrive(NamedBarrier(barrier), kMathThreads);
    }
  }

  // ------------------------------------------------------------------------------------------ rows
  // LSE and delta of the heads; a warp has eight of them. P of a missing head is zero.
  CUTE_DEVICE void prepare_rows() {
    int const first = (kNumber * 4 + thread / 32) * 8;
    CUTE_NO_UNROLL
    for (int row = first; row < first + 8; ++row) {
      bool const exists = row < work.heads;
      int const head = work.head + (exists ? row : 0);
      float const dot = exists ? dot_of(head) : 0.f;
      int64_t const at = int64_t(head) * p.queries + work.query;
      float const lse = exists ? p.lse[at] : -INFINITY;
      bool const is_none = lse == -INFINITY;
      float const delta = dot - (exists && p.dlse != nullptr ? p.dlse[at] : 0.f);
      if (is_first_lane()) {
        shared.lse_log2[row] = is_none ? INFINITY : lse * kLog2E;
        shared.delta[row] = is_none ? 0.f : delta;
        if (exists) {
          p.delta[at] = delta;
        }
      }
    }
    named_sync(NamedBarrier(kRowsReady), kMathThreads);
  }

  // The sum of dO * O over a row.
  CUTE_DEVICE float dot_of(int head) const {
    auto const* const o = reinterpret_cast<uint4 const*>(row_at<Element>(p.out, work.query, head));
    auto const* const dout =
        reinterpret_cast<uint4 const*>(row_at<Element>(p.dout, work.query, head));
    float sum = 0.f;
    for (int chunk = lane_of_warp(); chunk < Traits::kSlicesV * 8; chunk += 32) {
      uint4 const a = o[chunk];
      uint4 const b = dout[chunk];
      sum += dot_of(a.x, b.x) + dot_of(a.y, b.y) + dot_of(a.z, b.z) + dot_of(a.w, b.w);
    }
    return sum_over_lanes<32>(sum);
  }

  CUTE_DEVICE static float dot_of(uint32_t a, uint32_t b) {
    float2 const x = unpack_two<Element>(a);
    float2 const y = unpack_two<Element>(b);
    return x.x * y.x + x.y * y.y;
  }

  // ---------------------------------------------------------------------------------------- scores
  CUTE_DEVICE void compute_scores(ChosenList const& list, int tile) {
    Sums sums;
    constexpr int kColumns = kSlice * (kNumber == 0 ? Traits::kSlicesQ : Traits::kSlicesV);
    using Layout = typename Traits::template Tile<kColumns>;
    Element* const keys = shared.keys + (kNumber == 0 ? 0 : Traits::kSlicesK * kSliceElements);
    auto mma = typename Traits::MmaScores{}.get_slice(0);
    auto a = mma.partition_fragment_A(
        cute::make_tensor(cute::make_smem_ptr(kNumber == 0 ? shared.q : shared.dout), Layout{}));
    auto b = mma.partition_fragment_B(cute::make_tensor(cute::make_smem_ptr(keys), Layout{}));
    issue_gemm<kColumns / 16>(typename Traits::MmaScores{}, a, b, sums, true);
    if constexpr (kNumber == 0) {
      uint64_t const exist = existing_keys(list, tile);
      wait_gemm<0>(sums);
      probabilities(sums, exist);
      if (tile > 0) {
        sync_or_arrive(kScoresUnread);
      }
      CUTE_UNROLL
      for (int j = 0; j < kTileKeys / 8; ++j) {
        shared.exchange[j][thread] =
            make_float4(sums(4 * j), sums(4 * j + 1), sums(4 * j + 2), sums(4 * j + 3));
      }
      sync_or_arrive(kProbabilities);
      sync_or_arrive(kExchanged);
    } else {
      wait_gemm<0>(sums);
      sync_or_arrive(kProbabilities);
      multiply(sums);
      sync_or_arrive(kExchanged);
      named_sync(NamedBarrier(kReadByAll), kWarpgroupThreads);
    }
    store_scores(sums, shared.scores[kNumber]);
  }

  // A bit for each key of a tile. Whole warps call this.
  CUTE_DEVICE uint64_t existing_keys(ChosenList const& list, int tile) const {
    int const slot = tile * kTileKeys + lane_of_warp();
    uint32_t const low = __ballot_sync(kWholeWarp, list.row_of(slot) >= 0);
    uint32_t const high = __ballot_sync(kWholeWarp, list.row_of(slot + 32) >= 0);
    return uint64_t(high) << 32 | low;
  }

  // S becomes P.
  CUTE_DEVICE void probabilities(Sums& sums, uint64_t exist) const {
    float const scale_log2 = p.scale * kLog2E;
    uint64_t const own = exist >> fragment_column(thread);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float const lse_log2 = shared.lse_log2[fragment_row(thread) + 8 * r];
      CUTE_UNROLL
      for (int j = 0; j < kTileKeys / 8; ++j) {
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) {
          float& x = sums(4 * j + 2 * r + c);
          x = (own >> (8 * j + c) & 1) != 0 ? exp2_approx(x * scale_log2 - lse_log2) : 0.f;
        }
      }
    }
  }

  // dP becomes dS, times the scale of scores.
  CUTE_DEVICE void multiply(Sums& sums) const {
    float const deltas[2] = {shared.delta[fragment_row(thread)],
                             shared.delta[fragment_row(thread) + 8]};
    CUTE_UNROLL
    for (int j = 0; j < kTileKeys / 8; ++j) {
      float4 const four = shared.exchange[j][thread];
      float const probability[] = {four.x, four.y, four.z, four.w};
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        sums(4 * j + i) = probability[i] * (sums(4 * j + i) - deltas[i / 2]) * p.scale;
      }
    }
  }

  CUTE_DEVICE void store_scores(Sums const& sums, Element* tile) const {
    uint32_t words[kTileKeys / 4];
    CUTE_UNROLL
    for (int i = 0; i < kTileKeys / 4; ++i) {
      words[i] = pack_two<Element>(sums(2 * i), sums(2 * i + 1));
    }
    store_warpgroup_rows<kHeadRows, kTileKeys / 16>([&](int i) { return words[i]; },
                                                    reinterpret_cast<char*>(tile), 0, thread);
  }

  // -------------------------------------------------------------------------------------- products
  // b: a tile whose rows are summed over.
  template <class Mma, class LayoutA, int kSlices>
  CUTE_DEVICE void issue(Element* a, Element* b, SumsOf<kSlices>& sums, bool is_first) const {
    using LayoutB = typename Traits::template Transposed<kSlice * kSlices>;
    auto mma = Mma{}.get_slice(0);
    auto tA = mma.partition_fragment_A(cute::make_tensor(cute::make_smem_ptr(a), LayoutA{}));
    auto tB = mma.partition_fragment_B(cute::make_tensor(cute::make_smem_ptr(b), LayoutB{}));
    issue_gemm<kTileKeys / 16>(Mma{}, tA, tB, sums, is_first);
  }

  template <int kSlices, class Fragment>
  CUTE_DEVICE void issue_dq(Fragment& sums, int first) const {
    if constexpr (kSlices > 0) {
      issue<typename Traits::template MmaDq<kSlice * kSlices>,
            typename Traits::template Tile<kTileKeys>, kSlices>(
          shared.scores[1], shared.keys + first * kSliceElements, sums, false);
    }
  }

  // dQ += dS K. The tile of keys is free afterwards.
  CUTE_DEVICE void add_to_dq(Dq& dq) {
    issue_dq<kDqPart>(dq.first, kFirstDq);
    issue_dq<kOtherDqPart>(dq.second, kFirstDq + kDqPart);
    wait_gemm<0>(dq.first);
    cute::warpgroup_fence_operand(dq.second);
    if (thread == 0) {
      shared.keys_empty.arrive();
    }
  }

  // dS^T Q + P^T dO of the columns of a slice.
  template <int kIndex>
  CUTE_DEVICE void add_to_keys(int const (&rows)[2]) const {
    using MmaKeys = typename Traits::template MmaKeys<kSlice>;
    using LayoutOfScores = typename Traits::template Transposed<kTileKeys>;
    constexpr bool kHasQ = kIndex < Traits::kSlicesQ;
    constexpr bool kHasDout = kIndex >= Traits::kSlicesK;
    Sums sums;
    if constexpr (kHasQ) {
      issue<MmaKeys, LayoutOfScores, 1>(shared.scores[1], shared.q + kIndex * kSliceElements, sums,
                                        true);
    }
    if constexpr (kHasDout) {
      issue<MmaKeys, LayoutOfScores, 1>(shared.scores[0],
                                        shared.dout + (kIndex - Traits::kSlicesK) * kSliceElements,
                                        sums, !kHasQ);
    }
    wait_gemm<0>(sums);
    add_rows<kIndex>(sums, rows);
    if constexpr (kIndex + 1 < kEndKeys) {
      add_to_keys<kIndex + 1>(rows);
    }
  }

  // Adds a slice to the rows of keys. Neighbouring quads exchange half of their values, so that
  // eight lanes add 128 bytes of a row.
  template <int kIndex>
  CUTE_DEVICE void add_rows(Sums const& sums, int const (&rows)[2]) const {
    bool const is_odd = (thread & 4) != 0;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      int const other = __shfl_xor_sync(kWholeWarp, rows[r], 4);
      CUTE_UNROLL
      for (int group = 0; group < kSlice / 16; group += 2) {
        float4 const low = four_of(sums, group, r);
        float4 const high = four_of(sums, group + 1, r);
        float4 const received = exchange_with_quad(select(is_odd, low, high));
        int const at = sum_index(kIndex, group, thread % 4) + (is_odd ? 16 : 0);
        add_to_row(is_odd ? other : rows[r], at, select(is_odd, received, low));
        add_to_row(is_odd ? rows[r] : other, at, select(is_odd, high, received));
      }
    }
  }

  CUTE_DEVICE static float4 four_of(Sums const& sums, int group, int r) {
    int const at = 8 * group + 2 * r;
    return make_float4(sums(at), sums(at + 1), sums(at + 4), sums(at + 5));
  }

  // WHY by value: `?:` of two float4 goes through local memory.
  CUTE_DEVICE static float4 select(bool first, float4 const& a, float4 const& b) {
    return make_float4(first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w);
  }

  CUTE_DEVICE static float4 exchange_with_quad(float4 const& x) {
    return make_float4(__shfl_xor_sync(kWholeWarp, x.x, 4), __shfl_xor_sync(kWholeWarp, x.y, 4),
                       __shfl_xor_sync(kWholeWarp, x.z, 4), __shfl_xor_sync(kWholeWarp, x.w, 4));
  }

  // Nothing for a row that does not exist.
  CUTE_DEVICE void add_to_row(int row, int at, float4 const& x) const {
    if (row >= 0) {
      float* const target =
          p.sums + (int64_t(row) * p.heads_k + work.head_k) * (Traits::kSlices * kSlice) + at;
      add_to_global(reinterpret_cast<float4*>(target), x);
    }
  }

  // Slices of dQ from `first` on.
  template <int kSlices, class Fragment>
  CUTE_DEVICE void store_dq(Fragment const& sums, int first) const {
    CUTE_UNROLL
    for (int i = 0; i < kSlices; ++i) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        int const head = fragment_row(thread) + 8 * r;
        if (head < work.heads) {
          store_row(sums, 4 * i * (kSlice / 8) + 2 * r, first + i, work.head + head);
        }
      }
    }
  }

  // A thread's columns of a slice of dQ, from element `at` of the sums on.
  template <class Fragment>
  CUTE_DEVICE void store_row(Fragment const& sums, int at, int slice, int head) const {
    bool const is_latent = slice >= Traits::kSlicesK;
    int const columns = kSlice * (is_latent ? Traits::kSlicesV : Traits::kSlicesK);
    int const column = kSlice * (is_latent ? slice - Traits::kSlicesK : slice);
    Element* const row = static_cast<Element*>(is_latent ? p.dq_latent : p.dq) +
                         (int64_t(work.query) * p.heads_q + head) * columns + column;
    CUTE_UNROLL
    for (int j = 0; j < kSlice / 8; ++j) {
      *reinterpret_cast<uint32_t*>(row + 8 * j + fragment_column(thread)) =
          pack_two<Element>(sums(at + 4 * j), sums(at + 4 * j + 1));
    }
  }
};

}  // namespace fa3
