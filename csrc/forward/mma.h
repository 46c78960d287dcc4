// A consumer warpgroup: the two products and the softmax between them, for its 64 rows of a tile.
//
// With intra-warpgroup overlap (paper, section 3.2) the loop is skewed by one tile: S(n) is issued
// beside P(n+1) V(n+1), and written so that the softmax of S(n) runs beside the latter:
//
//   tensor cores   S(3) | S(2) PV(3) | S(1) PV(2) | S(0) PV(1) | PV(0)
//   softmax             3            2            1            0
//
// TRAP: the wait for PV has no dependence on the softmax, and ptxas (13.0) moves it up: behind a
// part of the row maximum at head dims 64 and 128, behind half of the exponentials at 256. What
// then lies beside the exponentials are the other warpgroups' products. Pinning the wait was not
// faster (README.md, "What was tried"). In FP8 the source waits behind the maxima: with a wait
// between exponentials and packing ptxas packs four of them by three instructions, else by two.
//
// With tile overlap the skew goes on from one tile of Q to the next: the first S of a tile is
// issued beside the last PV of the tile before, whose O is stored while that S is computed.
//
// With ping-pong (section 3.1) the two warpgroups take turns at issuing, so that one's softmax lies
// beside the other's products.
#pragma once

#include "device/gemm.h"
#include "forward/epilogue.h"
#include "forward/mask.h"
#include "forward/promoted_sums.h"
#include "forward/queries.h"
#include "forward/score.h"

namespace fa3 {

// The right to issue products, handed back and forth between two warpgroups.
template <bool kPingPong>
struct Turn {
  int warpgroup;

  CUTE_DEVICE NamedBarrier of(int wg) const {
    return wg == 0 ? NamedBarrier::kTurnFirst : NamedBarrier::kTurnSecond;
  }

  // Warpgroup 0 starts.
  CUTE_DEVICE void begin() const {
    if (kPingPong && warpgroup == 1) {
      named_arrive(of(0), 2 * kWarpgroupThreads);
    }
  }

  CUTE_DEVICE void wait() const {
    if constexpr (kPingPong) {
      named_sync(of(warpgroup), 2 * kWarpgroupThreads);
    }
  }

  CUTE_DEVICE void pass() const {
    if constexpr (kPingPong) {
      named_arrive(of(1 - warpgroup), 2 * kWarpgroupThreads);
    }
  }

  // Takes the last turn that was passed, so that no barrier is left half full.
  CUTE_DEVICE void end() const {
    if (kPingPong && warpgroup == 0) {
      named_sync(of(0), 2 * kWarpgroupThreads);
    }
  }
};

// A tile in a consumer warpgroup's hands.
template <class Traits>
struct FwdTile {
  FwdWork<Traits> work;
  int q_stage;
  RowLimits<Traits> limits;
  bool o_is_zero = true;  // nothing has been added to O yet
};

// Turn_ is called before the products of a step are issued and when they have been; there is
// another one in benchmarks/unspecialised.h.
template <class Traits, class Turn_ = Turn<Traits::Config::kPingPong>>
struct FwdConsumer {
  using Element = typename Traits::Element;
  using Config = typename Traits::Config;
  using MmaS = typename Traits::MmaS;
  using MmaO = typename Traits::MmaO;
  using Tile = FwdTile<Traits>;
  using Softmax = SoftmaxOf<Traits>;

  static constexpr bool kGeneral = Traits::kGeneral;

  FwdStorage<Traits>& shared;
  FwdDeviceParams const& p;
  int warpgroup;
  int thread;  // in the warpgroup
  Turn_ turn;
  RingState<Traits::kQStages> q_ring;
  RingState<Traits::kStages> k_ring;
  RingState<Traits::kStages> v_ring;
  RingState<Traits::kScaleStages> scale_ring;  // FP8: of K tiles
  HeldQueries<Traits> queries;
  PromotedSums<Traits> sums;

  CUTE_DEVICE FwdConsumer(FwdStorage<Traits>& shared_, FwdDeviceParams const& p_, int warpgroup_,
                          int thread_, Turn_ const& turn_)
      : shared(shared_),
        p(p_),
        warpgroup(warpgroup_),
        thread(thread_),
        turn(turn_),
        sums(shared_, warpgroup_, thread_) {}

  // All tiles of this CTA; packed, there may be none.
  CUTE_DEVICE void run() {
    auto tSrS =
        cute::partition_fragment_C(MmaS{}, cute::Shape<cute::_64, typename Traits::TileN>{});
    auto tOrP = cute::make_tensor<Element>(Traits::operand_p_layout(tSrS.layout()));
    auto tOrO =
        cute::partition_fragment_C(MmaO{}, cute::Shape<cute::_64, typename Traits::HeadDimV>{});
    Softmax softmax(p.scale_log2, p.lazy_rescale_log2, p.zero);

    turn.begin();
    Tile tile = take_tile();
    if constexpr (Config::kTileOverlap) {
      if (tile.work.valid()) {
        visit_tiles(tile, tSrS, tOrP, tOrO, softmax);
      }
    } else {
      for (; tile.work.valid(); tile = take_tile()) {
        begin(tile, tSrS, tOrP, softmax);
        visit_keys(tile, tSrS, tOrP, tOrO, softmax);
        end(tile, tOrP, tOrO, softmax);
      }
    }
    turn.end();
    if (Config::kStageOutput && !Traits::kSendsResults && thread == 0) {
      cute::tma_store_wait<0>();  // shared memory is given away
    }
  }

  // The next tile, as soon as its Q is there. Its limits are still missing.
  CUTE_DEVICE Tile take_tile() {
    int const q_stage = q_ring.stage;
    shared.q_full[q_stage][warpgroup].wait(q_ring.phase);
    q_ring.advance();
    return Tile{shared.work[q_stage][warpgroup], q_stage};
  }

  // With overlap of tiles: the first one and all after it.
  template <class FragmentS, class FragmentP, class FragmentO>
  CUTE_DEVICE void visit_tiles(Tile tile, FragmentS& tSrS, FragmentP& tOrP, FragmentO& tOrO,
                               Softmax& softmax) {
    begin(tile, tSrS, tOrP, softmax);
    while (true) {
      visit_keys(tile, tSrS, tOrP, tOrO, softmax);
      Tile next = take_tile();
      if (!next.work.valid()) {
        break;
      }
      change_tile(tile, next, tSrS, tOrP, tOrO, softmax);
      tile = next;
    }
    end(tile, tOrP, tOrO, softmax);
  }

  // With overlap in the warpgroup: S and P of the tile's last K tile, which is the first visited.
  template <class FragmentS, class FragmentP>
  CUTE_DEVICE void begin(Tile& tile, FragmentS& tSrS, FragmentP& tOrP, Softmax& softmax) {
    if constexpr (Config::kIntraOverlap) {
      leave_out_keys(tile.work.hidden.first);
      leave_out_values(tile.work.hidden.first);
      shared.k_full[k_ring.stage].wait(k_ring.phase);
      load_queries(tile);
      turn.wait();
      issue_scores(tile, tSrS);
      turn.pass();
      wait_gemm<0>(tSrS);
      release(shared.k_empty, k_ring);
      first_probabilities(tile, tSrS, tOrP, softmax);
    } else {
      if constexpr (Traits::kFp8) {
        // The scales of Q come with the first K tile.
        shared.k_full[k_ring.stage].wait(k_ring.phase);
      }
      start_rows(tile, softmax);
    }
  }

  // All K tiles that begin() and end() leave.
  template <class FragmentS, class FragmentP, class FragmentO>
  CUTE_DEVICE void visit_keys(Tile& tile, FragmentS& tSrS, FragmentP& tOrP, FragmentO& tOrO,
                              Softmax& softmax) {
    BlockRange const& keys = tile.work.keys;
    int n = keys.end - (Config::kIntraOverlap ? 2 : 1);
    int const free_begin = kGeneral ? keys.free_begin : 0;
    CUTE_NO_UNROLL
    for (; n >= max_of(keys.free_end, free_begin); --n) {
      step<Hidden::kEnd>(n, tile, tSrS, tOrP, tOrO, softmax);
    }
    CUTE_NO_UNROLL
    for (; n >= free_begin; --n) {
      step<Hidden::kNothing>(n, tile, tSrS, tOrP, tOrO, softmax);
    }
    if constexpr (kGeneral) {
      CUTE_NO_UNROLL
      for (; n >= keys.begin; --n) {
        step<Hidden::kBothEnds>(n, tile, tSrS, tOrP, tOrO, softmax);
      }
    }
  }

  // With overlap in the warpgroup: PV of the K tile visited last. Then O and LSE go out.
  template <class FragmentP, class FragmentO>
  CUTE_DEVICE void end(Tile const& tile, FragmentP& tOrP, FragmentO& tOrO, Softmax& softmax) {
    if constexpr (Config::kIntraOverlap) {
      turn.wait();
      issue_output(tile, tOrP, tOrO, [&] { turn.pass(); });
      wait_gemm<0>(tOrO);
      release(shared.v_empty, v_ring);
    }
    store(tile, tOrO, softmax);
  }

 private:
  // end() of one tile and begin() of the next.
  template <class FragmentS, class FragmentP, class FragmentO>
  CUTE_DEVICE void change_tile(Tile const& tile, Tile& next, FragmentS& tSrS, FragmentP& tOrP,
                               FragmentO& tOrO, Softmax& softmax) {
    // Read here, as in store().
    int const hidden = shared.work[tile.q_stage][warpgroup].hidden.last + next.work.hidden.first;
    leave_out_keys(hidden);
    shared.k_full[k_ring.stage].wait(k_ring.phase);
    load_queries(next);
    turn.wait();
    issue_scores(next, tSrS);
    issue_output(tile, tOrP, tOrO, [&] { turn.pass(); });
    wait_gemm<1>(tSrS);
    release(shared.k_empty, k_ring);
    wait_gemm<0>(tOrO);
    release(shared.v_empty, v_ring);
    leave_out_values(hidden);
    store(tile, tOrO, softmax);
    first_probabilities(next, tSrS, tOrP, softmax);
  }

  template <Hidden kHidden, class FragmentS, class FragmentP, class FragmentO>
  CUTE_DEVICE void step(int n, Tile& tile, FragmentS& tSrS, FragmentP& tOrP, FragmentO& tOrO,
                        Softmax& softmax) {
    if constexpr (Config::kIntraOverlap) {
      overlapped_step<kHidden>(n, tile, tSrS, tOrP, tOrO, softmax);
    } else {
      serial_step<kHidden>(n, tile, tSrS, tOrP, tOrO, softmax);
    }
    tile.o_is_zero = false;
  }

  // S and P of K tile n; O of the one before, n + 1.
  template <Hidden kHidden, class FragmentS, class FragmentP, class FragmentO>
  CUTE_DEVICE void overlapped_step(int n, Tile const& tile, FragmentS& tSrS, FragmentP& tOrP,
                                   FragmentO& tOrO, Softmax& softmax) {
    shared.k_full[k_ring.stage].wait(k_ring.phase);
    turn.wait();
    issue_scores(tile, tSrS);
    issue_output(tile, tOrP, tOrO, [&] { turn.pass(); });
    auto const& scale = take_scale();
    wait_gemm<1>(tSrS);
    release(shared.k_empty, k_ring);
    auto const wait_for_output = [&] {
      wait_gemm<0>(tOrO);
      release(shared.v_empty, v_ring);
    };
    if constexpr (Traits::kFp8) {
      exponentiate<kHidden>(n, tile, tSrS, softmax, scale, wait_for_output);
    } else {
      exponentiate<kHidden>(n, tile, tSrS, softmax, scale);
      wait_for_output();
    }
    to_probabilities(tSrS, tOrP);
    if constexpr (Traits::kHoldsSums) {
      sums.add(tOrO, softmax.rescale);
    } else {
      softmax.rescale_output(tOrO, scale);
    }
  }

  // S, P and O of K tile n. S and P need not live at the same time, so that tiles may be larger;
  // only other warpgroups' products lie beside the softmax.
  template <Hidden kHidden, class FragmentS, class FragmentP, class FragmentO>
  CUTE_DEVICE void serial_step(int n, Tile const& tile, FragmentS& tSrS, FragmentP& tOrP,
                               FragmentO& tOrO, Softmax& softmax) {
    shared.k_full[k_ring.stage].wait(k_ring.phase);
    turn.wait();
    issue_scores(tile, tSrS);
    auto const& scale = take_scale();
    wait_gemm<0>(tSrS);
    turn.pass();
    release(shared.k_empty, k_ring);
    exponentiate<kHidden>(n, tile, tSrS, softmax, scale);
    to_probabilities(tSrS, tOrP);
    softmax.rescale_output(tOrO, scale);
    if constexpr (Traits::kFp8) {
      softmax.add_to_sums(tSrS, scale);
    }
    if constexpr (Config::kPromote) {
      add_output(tile, tOrP, tOrO);
    } else {
      issue_output(tile, tOrP, tOrO);
      wait_gemm<0>(tOrO);
    }
    release(shared.v_empty, v_ring);
  }

  // S to probabilities, in the registers of S. FP8: hook as in Fp8Softmax::update().
  template <Hidden kHidden, class FragmentS, class AnyScale, class... Hook>
  CUTE_DEVICE void exponentiate(int n, Tile const& tile, FragmentS& tSrS, Softmax& softmax,
                                AnyScale const& scale, Hook const&... hook) {
    transform_scores<Traits>(p, tSrS, softmax, scale);
    if constexpr (kHidden != Hidden::kNothing) {
      tile.limits.template apply<kHidden>(tSrS, n);
    }
    softmax.template update<kHidden != Hidden::kNothing>(tSrS, scale, hook...);
  }

  CUTE_DEVICE void start_rows(Tile& tile, Softmax& softmax) {
    tile.limits = RowLimits<Traits>::of_tile(p, tile.work, thread);
    if constexpr (Traits::kFp8) {
      float scales[2];
      read_query_scales(shared.q_scales[tile.q_stage][warpgroup], thread, scales);
      softmax.reset(scales);
    } else {
      softmax.reset();
    }
  }

  // Of the next K tile, which has come. FP8; else nothing. With a softcap in place: there are not
  // registers for all of it from the scores to the sums.
  CUTE_DEVICE decltype(auto) take_scale() {
    if constexpr (Traits::kFp8) {
      using Scale =
          cute::conditional_t<Config::kMask == MaskKind::kSoftcap, KeyScale const&, KeyScale>;
      int const stage = scale_ring.stage;
      scale_ring.advance();
      return static_cast<Scale>(shared.scales[stage]);
    } else {
      return NoScale{};
    }
  }

  template <class FragmentS, class FragmentP>
  CUTE_DEVICE static void to_probabilities(FragmentS const& tSrS, FragmentP& tOrP) {
    if constexpr (Traits::kFp8) {
      pack_probabilities(tSrS, tOrP);
    } else {
      convert_fragment<Element>(tSrS, tOrP);
    }
  }

  template <class FragmentS, class FragmentP>
  CUTE_DEVICE void first_probabilities(Tile& tile, FragmentS& tSrS, FragmentP& tOrP,
                                       Softmax& softmax) {
    start_rows(tile, softmax);
    int const n = tile.work.keys.end - 1;
    auto const& scale = take_scale();
    if constexpr (Traits::kSkipsHidden) {
      bool const is_hidden = tile.limits.hides_all(n);
      if (is_hidden) {
        softmax.skip();
      } else {
        exponentiate<Hidden::kEnd>(n, tile, tSrS, softmax, scale);
      }
      to_probabilities(tSrS, tOrP);
      hide_probabilities(tOrP, is_hidden);
    } else {
      transform_scores<Traits>(p, tSrS, softmax, scale);
      BlockRange const& keys = tile.work.keys;
      if (n >= keys.free_end || (kGeneral && n < keys.free_begin)) {
        tile.limits.template apply<kGeneral ? Hidden::kBothEnds : Hidden::kEnd>(tSrS, n);
      }
      softmax.template update<true>(tSrS, scale);
      to_probabilities(tSrS, tOrP);
    }
    if constexpr (Traits::kHoldsSums) {
      sums.begin();
    }
  }

  template <class FragmentO>
  CUTE_DEVICE void store(Tile const& tile, FragmentO& tOrO, Softmax& softmax) {
    // Read here, not before: the loops have no registers for it. Its memory is given away once O is
    // staged; of FP8 below.
    FwdWork<Traits> const& work = shared.work[tile.q_stage][warpgroup];
    float sinks[2];
    read_sinks<Traits>(p, work, thread, sinks);
    if constexpr (Traits::kHoldsSums) {
      sums.end(tOrO);
    }
    softmax.finish(tOrO, sinks);
    if constexpr (!Traits::kFp8) {
      store_rows<Traits>(p, work.rows, thread, softmax, sinks);
      stage_output(shared, tile.q_stage, warpgroup, thread, tOrO);
    } else {
      if constexpr (Traits::kSendsResults) {
        stage_results(shared, p, tile.q_stage, warpgroup, thread, softmax, sinks, tOrO);
      } else {
        take_output_out(work, tOrO);
        store_lse<Traits>(p, work.rows, thread, softmax, sinks);
      }
      __syncwarp();
      if (thread % 32 == 0) {
        shared.q_empty[tile.q_stage][warpgroup].arrive();
      }
    }
  }

  // FP8.
  template <class FragmentO>
  CUTE_DEVICE void take_output_out(FwdWork<Traits> const& work, FragmentO const& tOrO) {
    if constexpr (Config::kStageOutput) {
      send_output(shared, p, work, warpgroup, thread, tOrO);
    } else if (p.out_is_half) {
      write_output<Traits, cutlass::half_t>(p, work, thread, tOrO);
    } else {
      write_output<Traits, cutlass::bfloat16_t>(p, work, thread, tOrO);
    }
  }

  // Buffer `number` of shared memory as an operand. FP8: by a descriptor of the first one, which is
  // made once; what is left is one instruction. WHY not all: loops of bf16 at head dim 64 get
  // another order, 1 to 3 % slower (timed with one more change; README.md, FP8).
  template <class Layout, int kElements, class Partition>
  CUTE_DEVICE static auto operand(Element (*buffers)[kElements], int number,
                                  Partition const& partition) {
    auto const of = [&](Element* buffer) {
      return partition(cute::make_tensor(cute::make_smem_ptr(buffer), Layout{}));
    };
    if constexpr (Traits::kFp8) {
      auto const first = of(buffers[0]);
      return cute::make_tensor(first.data() + number * (kElements * int(sizeof(Element)) / 16),
                               first.layout());
    } else {
      return of(buffers[number]);
    }
  }

  CUTE_DEVICE int query_buffer(Tile const& tile) const {
    return tile.q_stage * Traits::kWarpgroups + warpgroup;
  }

  CUTE_DEVICE void load_queries(Tile const& tile) {
    if constexpr (Traits::kQuerySteps > 0) {
      queries.load(shared.q[tile.q_stage][warpgroup], thread);
    }
  }

  template <class FragmentS>
  CUTE_DEVICE void issue_scores(Tile const& tile, FragmentS& tSrS) {
    auto mma = MmaS{}.get_slice(0);
    int const q_buffer = query_buffer(tile);
    using LayoutQ = typename Traits::SmemLayoutQ;  // (64, columns)
    using LayoutK = typename Traits::SmemLayoutK;  // (N, columns)
    // Both (MMA, 1, columns / 16).
    auto tSrQ = operand<LayoutQ>(shared.q[0], q_buffer,
                                 [&](auto const& sQ) { return mma.partition_fragment_A(sQ); });
    auto tSrK = operand<LayoutK>(shared.k, k_ring.stage,
                                 [&](auto const& sK) { return mma.partition_fragment_B(sK); });
    if constexpr (Traits::kQuerySteps > 0) {
      issue_gemm_of_both<Traits::kScoreSteps>(typename Traits::MmaHeldS{}, queries.operand(),
                                              MmaS{}, tSrQ, tSrK, tSrS);
    } else {
      issue_gemm<Traits::kScoreSteps>(MmaS{}, tSrQ, tSrK, tSrS, true);
    }
  }

  template <class FragmentP, class FragmentO, class Hook = NoHook>
  CUTE_DEVICE void issue_output(Tile const& tile, FragmentP& tOrP, FragmentO& tOrO,
                                Hook hook = {}) {
    shared.v_full[v_ring.stage].wait(v_ring.phase);
    auto mma = typename Traits::MmaV{}.get_slice(0);
    using LayoutV = typename Traits::SmemLayoutV;  // (columns, N)
    auto tOrV = operand<LayoutV>(shared.v, v_ring.stage, [&](auto const& sV) {
      return mma.partition_fragment_B(sV);  // (MMA, 1, N / 16)
    });
    issue_gemm<Traits::kOutputSteps, Config::kTurnLead>(
        MmaO{}, tOrP, tOrV, tOrO, Traits::kHoldsSums || tile.o_is_zero, hook);
  }

  // kPromote without overlap: the sum of a K tile, from zero, some columns at a time; then O gets
  // it in fp32.
  template <class FragmentP, class FragmentO>
  CUTE_DEVICE void add_output(Tile const& tile, FragmentP& tOrP, FragmentO& tOrO) {
    using Mma = typename Traits::MmaPart;
    using Columns = cute::Int<Traits::kPartColumns>;
    shared.v_full[v_ring.stage].wait(v_ring.phase);
    auto sV = cute::make_tensor(cute::make_smem_ptr(shared.v[v_ring.stage]),
                                typename Traits::SmemLayoutV{});  // (columns, N)
    if (tile.o_is_zero) {
      cute::clear(tOrO);
    }
    CUTE_UNROLL
    for (int part = 0; part < Traits::kHeadDimV / Traits::kPartColumns; ++part) {
      auto sPart = cute::local_tile(sV, cute::Shape<Columns, typename Traits::KeysV>{},
                                    cute::make_coord(part, 0));
      auto tPrV = Mma{}.get_slice(0).partition_fragment_B(sPart);  // (MMA, 1, N / 32)
      auto tPrO = cute::partition_fragment_C(Mma{}, cute::Shape<cute::_64, Columns>{});
      issue_gemm<Traits::kOutputSteps>(Mma{}, tOrP, tPrV, tPrO, true);
      wait_gemm<0>(tPrO);
      CUTE_UNROLL
      for (int i = 0; i < cute::size(tPrO); ++i) {
        tOrO(part * int(cute::size(tPrO)) + i) += tPrO(i);
      }
    }
  }

  // Goes past K tiles of which none of this warpgroup's rows sees a key.
  CUTE_DEVICE void leave_out_keys(int count) {
    if constexpr (Traits::kHiddenAtMost > 0) {
      CUTE_NO_UNROLL
      for (; count > 0; --count) {
        leave_out(shared.k_full, shared.k_empty, k_ring);
        scale_ring.advance();
      }
    }
  }

  CUTE_DEVICE void leave_out_values(int count) {
    if constexpr (Traits::kHiddenAtMost > 0) {
      CUTE_NO_UNROLL
      for (; count > 0; --count) {
        leave_out(shared.v_full, shared.v_empty, v_ring);
      }
    }
  }

  // TRAP: without a product nothing keeps the warps together. One that comes late would find the
  // stage filled again, and wait for a phase that is long over.
  CUTE_DEVICE void leave_out(Mbarrier (&full)[Traits::kStages], Mbarrier (&empty)[Traits::kStages],
                             RingState<Traits::kStages>& ring) {
    full[ring.stage].wait(ring.phase);
    meet_in_warpgroup(warpgroup);
    release(empty, ring);
  }

  // One thread speaks for the warpgroup: a product is complete for all its warps at once.
  CUTE_DEVICE void release(Mbarrier (&empty)[Traits::kStages], RingState<Traits::kStages>& ring) {
    if (thread == 0) {
      empty[ring.stage].arrive();
    }
    ring.advance();
  }
};

}  // namespace fa3
