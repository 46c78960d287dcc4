// The score warpgroup: computes S = Q K^T of 64 rows, the softmax, and P for the output warpgroups.
#pragma once

#include "device/gemm.h"
#include "forward/cache/keys_pages.h"
#include "forward/mask.h"
#include "forward/results.h"
#include "forward/softmax.h"
#include "mla/storage.h"

namespace fa3 {

template <class Traits>
struct ScoreWarpgroup {
  using Element = typename Traits::Element;
  using Params = typename Traits::Params;
  using Work = FwdWork<Traits>;
  using Limits = RowLimits<Traits, ColumnComparison>;
  using FragmentS = decltype(cute::partition_fragment_C(
      typename Traits::MmaS{}, cute::Shape<cute::_64, cute::Int<Traits::kTileN>>{}));
  using FragmentP = decltype(cute::make_tensor<Element>(operand_a_layout(FragmentS{}.layout())));
  // ((2, 2, 2), 1, steps): four words per k-step.
  using FragmentQ = decltype(cute::make_tensor<Element>(
      cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1,
                               cute::Int<Traits::kHeldSteps>>>{}));

  MlaStorage<Traits>& shared;
  Params const& p;
  int thread;  // in the warpgroup
  HalfRing<Traits> left{true};
  HalfRing<Traits> right{false};
  RingState<Traits::kStages> rotary;
  RingState<Traits::kStages> p_ring;
  RingState<Traits::kTileStages> tiles;
  OnlineSoftmax<Traits> softmax;
  FragmentQ tSrQ;  // the first half of the latent columns
  FragmentS tSrS;

  CUTE_DEVICE ScoreWarpgroup(MlaStorage<Traits>& shared_, Params const& p_, int thread_)
      : shared(shared_), p(p_), thread(thread_), softmax(p_.scale_log2, p_.lazy_rescale_log2, 0) {}

  CUTE_DEVICE void run() {
    shared.half_full[left.stage].wait(left.phase);
    CUTE_NO_UNROLL
    while (work().valid()) {
      take_queries();
      visit_keys();
      tiles.advance();
      shared.half_full[left.stage].wait(left.phase);
    }
    publish();
  }

 private:
  CUTE_DEVICE Work const& work() const { return shared.work[tiles.stage]; }

  // Lets output warpgroup 0 issue the PV of the previous P.
  CUTE_DEVICE void allow_left() {
    if (Traits::kLeftWaits && thread == 0) {
      int const stage = p_ring.stage;
      shared.left_allowed[stage == 0 ? Traits::kStages - 1 : stage - 1].arrive();
    }
  }

  // Publishes P of a K tile, or that no tile is left.
  CUTE_DEVICE void publish() {
    __syncwarp();
    if (thread % 32 == 0) {
      shared.p_full[p_ring.stage].arrive();
    }
    p_ring.advance();
  }

  // Loads the first latent columns of Q from the ring into registers.
  CUTE_DEVICE void take_queries() {
    auto const* const rows = reinterpret_cast<char const*>(shared.halves[left.stage]);
    // WHY: without this, values derived from the thread index stay in registers across all tiles.
    int own = thread;
    asm volatile("" : "+r"(own));
    load_warpgroup_rows<kWarpgroupRows, Traits::kHeldSteps>(rows, 0, own,
                                                            cute::recast<uint32_t>(tSrQ));
    // All warps have read Q and have seen this phase of its barrier.
    sync_warpgroup(Traits::kOutputWarpgroups);
    if (thread == 0) {
      shared.half_empty[left.stage].arrive();
    }
    left.advance();
  }

  // Visits K tiles from last to first. WHY S of the next K tile is not issued before this softmax:
  // its keys may be late, and the stages that they need become free once this P has been used.
  CUTE_DEVICE void visit_keys() {
    softmax.reset();
    KeyRange<Traits> const keys = work().keys;
    int const first = keys.first();
    CUTE_NO_UNROLL
    for (int n = first; n >= keys.last(); keys.advance(n)) {
      uint2 const existing = existing_keys(keys.tile(n));
      compute_scores();
      if (n < first) {
        allow_left();
      }
      if (n == keys.last() && thread == 0) {
        shared.q_empty.arrive();
      }
      make_probabilities(keys.tile(n), n >= keys.free_end || n < keys.free_begin, existing);
      if (n == keys.last()) {
        end_rows();
      }
      publish();
    }
    allow_left();
  }

  CUTE_DEVICE void compute_scores() {
    auto mma = typename Traits::MmaS{}.get_slice(0);
    typename Traits::MmaHeldS held;
    typename Traits::MmaS direct;
    constexpr int kHeldSteps = Traits::kHeldSteps;
    constexpr int kHalf = Traits::kOutputColumns;
    // (rows, columns), then (MMA, 1, steps)
    auto tSrD = mma.partition_fragment_A(tile<kWarpgroupRows, Traits::kSharedColumns>(shared.q));
    auto tSrL = mma.partition_fragment_B(tile<Traits::kTileN, kHalf>(shared.halves[left.stage]));
    auto tSrR = mma.partition_fragment_B(tile<Traits::kTileN, kHalf>(shared.halves[right.stage]));
    auto tSrP = mma.partition_fragment_B(
        tile<Traits::kTileN, Traits::kHeadDim>(shared.rotary[rotary.stage]));
    wait(shared.half_full, left);
    cute::warpgroup_fence_operand(tSrS);
    cute::warpgroup_arrive();
    held.accumulate_ = cute::GMMA::ScaleOut::Zero;
    CUTE_UNROLL
    for (int k = 0; k < kHeldSteps; ++k) {
      cute::gemm(held, tSrQ(cute::_, cute::_, k), tSrL(cute::_, cute::_, k), tSrS);
      held.accumulate_ = cute::GMMA::ScaleOut::One;
    }
    wait(shared.rotary_full, rotary);
    direct.accumulate_ = cute::GMMA::ScaleOut::One;
    CUTE_UNROLL
    for (int k = 0; k < Traits::kRotarySteps; ++k) {
      cute::gemm(direct, tSrD(cute::_, cute::_, kHeldSteps + k), tSrP(cute::_, cute::_, k), tSrS);
    }
    wait(shared.half_full, right);
    CUTE_UNROLL
    for (int k = 0; k < kHeldSteps; ++k) {
      cute::gemm(direct, tSrD(cute::_, cute::_, k), tSrR(cute::_, cute::_, k), tSrS);
    }
    cute::warpgroup_commit_batch();
    wait_gemm<0>(tSrS);
  }

  template <int kRows, int kColumns>
  CUTE_DEVICE static auto tile(Element* rows) {
    return cute::make_tensor(cute::make_smem_ptr(rows),
                             typename Traits::template RowMajor<kRows, kColumns>{});
  }

  template <class Barriers, class Ring>
  CUTE_DEVICE void wait(Barriers& full, Ring& ring) {
    full[ring.stage].wait(ring.phase);
    ring.advance();
    if (p.box_keys == 0) {  // gathered rows are not written by TMA
      fence_shared_for_async_proxy();
    }
  }

  // Computes P from S of K tile n and stores it over the rotary columns, which only this warpgroup
  // reads.
  CUTE_DEVICE void make_probabilities(int n, bool is_masked, uint2 existing) {
    bool const lacks_keys = (existing.x & existing.y) != ~0u;
    if (is_masked || lacks_keys) {
      clear_missing(n);
      mask(n);
      if (lacks_keys) {
        hide_missing(existing);
      }
      softmax.template update<true>(tSrS, NoScale{}, [] {});
    } else {
      softmax.template update<false>(tSrS, NoScale{}, [] {});
    }
    if (thread % 32 == 0) {
      shared.any_rescale[p_ring.stage][thread / 32] = softmax.any_rescale;
    }
    if (softmax.any_rescale && thread % 4 < 2) {
      bool const is_second = thread % 4 == 1;
      shared.rescale[p_ring.stage][fragment_row(thread) + 8 * is_second] =
          is_second ? softmax.rescale[1] : softmax.rescale[0];
    }
    store_probabilities();
    fence_shared_for_async_proxy();
  }

  CUTE_DEVICE void mask(int n) {
    Work const& tile = work();
    Limits limits = Limits::of_tile(p, tile, thread);
    limits.template apply<Masked::kBothEnds>(p, tSrS, n);
  }

  // A bit for each key of a K tile, set if the query chose one there. All are set if queries do not
  // choose their keys. Two keys per lane; the loads overlap with S.
  CUTE_DEVICE uint2 existing_keys(int n) const {
    if (!p.is_chosen) {
      return make_uint2(~0u, ~0u);
    }
    // WHY: without this, values derived from the thread index stay in registers across all tiles.
    int own = thread;
    asm volatile("" : "+r"(own));
    KeySource const from = KeySource::of(work());
    int const slot = n * Traits::kTileN + own % 32;
    auto const exist = [&](int at) {
      int const id = PagedKeys<Traits>::entry_of(p, from, at);
      return __ballot_sync(kWholeWarp, uint32_t(id) < uint32_t(p.entries));
    };
    return make_uint2(exist(slot), exist(slot + 32));
  }

  CUTE_DEVICE void hide_missing(uint2 existing) {
    static_assert(Traits::kTileN == 64);
    int own = thread;
    asm volatile("" : "+r"(own));  // as above
    int const first = fragment_column(own);
    uint32_t const words[] = {existing.x >> first, existing.y >> first};
    CUTE_UNROLL
    for (int i = 0; i < cute::size(tSrS); ++i) {
      int const column = i / 4 * 8 + i % 2;  // from `first`
      tSrS(i) = (words[column / 32] >> column % 32 & 1) != 0 ? tSrS(i) : -INFINITY;
    }
  }

  // Zeroes the latent columns of missing keys of the last S: their P is 0, but 0 * NaN is NaN.
  CUTE_DEVICE void clear_missing(int n) {
    CacheLocation const& at = work().location;
    int const first = at.first_slot() - n * Traits::kTileN;
    int const end = at.end_k() - n * Traits::kTileN;
    if (first <= 0 && end >= Traits::kTileN) {
      return;
    }
    clear_rows(shared.halves[left.previous()], first, end);
    clear_rows(shared.halves[right.previous()], first, end);
  }

  // Zeroes the rows before `first` and from `end` on.
  CUTE_DEVICE void clear_rows(Element* buffer, int first, int end) const {
    constexpr int kChunks = Traits::kOutputColumns * int(sizeof(Element)) / 16;  // per row
    CUTE_NO_UNROLL
    for (int i = thread; i < Traits::kTileN * kChunks; i += kWarpgroupThreads) {
      int const row = i / kChunks;
      if (row < first || row >= end) {
        int const offset = chunk_offset_bytes<Traits::kTileN>(row, i % kChunks);
        *reinterpret_cast<uint4*>(reinterpret_cast<char*>(buffer) + offset) =
            make_uint4(0, 0, 0, 0);
      }
    }
  }

  CUTE_DEVICE void store_probabilities() {
    FragmentP tOrP;
    convert_fragment<Element>(tSrS, tOrP);
    auto const words = cute::recast<uint32_t>(tOrP);
    auto* const rows = reinterpret_cast<char*>(shared.rotary[p_ring.stage]);
    store_warpgroup_rows<kWarpgroupRows, Traits::kTileN / 16>(words, rows, 0, thread);
  }

  // Publishes the ends of the rows. A sink enters once, here or when parts are combined.
  CUTE_DEVICE void end_rows() {
    Work const& tile = work();
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      int const row = fragment_row(thread) + 8 * r;
      float const sum = quad_sum(softmax.row_sum[r]);
      float sink = -INFINITY;
      if (p.sinks != nullptr && tile.location.has_sink()) {
        sink = p.sinks[tile.rows.head + p.pack.mod(row)];
      }
      float const most = finite_max(softmax.row_max[r]);
      float const sink_weight = exp2_approx(sink * kLog2E - most * softmax.scale_log2);
      float const lse = log_sum_exp(softmax.row_max[r], sum, p.softmax_scale);
      if (thread % 4 == 0) {
        shared.ends[tiles.stage][row] =
            RowEnd{sum == 0.f ? 0.f : inverse_sum(sum + sink_weight), with_sink(lse, sink)};
        raise_largest(p, tile.rows, row, softmax.largest_logit(r, p.softmax_scale));
      }
    }
  }
};

}  // namespace fa3
