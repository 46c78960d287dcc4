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
// faster (README.md, "What was tried").
//
// With ping-pong (section 3.1) the two warpgroups take turns at issuing, so that one's softmax lies
// beside the other's products.
#pragma once

#include "device/gemm.h"
#include "forward/mask.h"
#include "forward/softmax.h"
#include "forward/storage.h"
#include "forward/work.h"

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

template <class Traits>
struct FwdConsumer {
  using Element = typename Traits::Element;
  using Config = typename Traits::Config;
  using MmaS = typename Traits::MmaS;
  using MmaO = typename Traits::MmaO;

  FwdStorage<Traits>& shared;
  FwdDeviceParams const& p;
  int warpgroup;
  int thread;  // in the warpgroup
  Turn<Config::kPingPong> turn;
  RingState<Traits::kQStages> q_ring;
  RingState<Traits::kStages> k_ring;
  RingState<Traits::kStages> v_ring;

  CUTE_DEVICE FwdConsumer(FwdStorage<Traits>& shared_, FwdDeviceParams const& p_, int warpgroup_,
                          int thread_)
      : shared(shared_), p(p_), warpgroup(warpgroup_), thread(thread_), turn{warpgroup_} {}

  // Adds up O over all K tiles of the tile; leaves the softmax state for the epilogue.
  template <class FragmentO>
  CUTE_DEVICE void run(FwdWork const& work, FragmentO& tOrO, OnlineSoftmax<Config>& softmax) {
    int const position_begin = work.position_begin + warpgroup * p.positions_per_warpgroup;
    RowLimits const limits = RowLimits::of_tile<Traits>(p, position_begin, thread);
    auto tSrS =
        cute::partition_fragment_C(MmaS{}, cute::Shape<cute::_64, typename Traits::TileN>{});
    auto tOrP = cute::make_tensor<Element>(operand_a_layout(tSrS.layout()));  // ((2,2,2),1,N/16)

    shared.q_full[q_ring.stage][warpgroup].wait(q_ring.phase);
    int n = work.keys.end - 1;
    if (n < 0) {
      cute::clear(tOrO);
      return;
    }
    bool o_is_zero = true;
    if constexpr (Config::kIntraOverlap) {
      first(n, limits, n >= work.keys.free_end, tSrS, tOrP, softmax);
      --n;
    }
    CUTE_NO_UNROLL
    for (; n >= work.keys.free_end; --n) {
      step<true>(n, limits, tSrS, tOrP, tOrO, softmax, o_is_zero);
      o_is_zero = false;
    }
    CUTE_NO_UNROLL
    for (; n >= 0; --n) {
      step<false>(n, limits, tSrS, tOrP, tOrO, softmax, o_is_zero);
      o_is_zero = false;
    }
    if constexpr (Config::kIntraOverlap) {
      last(tOrP, tOrO, o_is_zero);
    }
  }

 private:
  // S and P of the first tile.
  template <class FragmentS, class FragmentP>
  CUTE_DEVICE void first(int n, RowLimits const& limits, bool masked, FragmentS& tSrS,
                         FragmentP& tOrP, OnlineSoftmax<Config>& softmax) {
    shared.k_full[k_ring.stage].wait(k_ring.phase);
    turn.wait();
    issue_scores(tSrS);
    turn.pass();
    wait_gemm<0>(tSrS);
    release(shared.k_empty, k_ring);
    if (masked) {
      limits.template apply<Traits::kTileN>(tSrS, n);
    }
    softmax.template update<true>(tSrS);
    convert_fragment<Element>(tSrS, tOrP);
  }

  template <bool kMasked, class FragmentS, class FragmentP, class FragmentO>
  CUTE_DEVICE void step(int n, RowLimits const& limits, FragmentS& tSrS, FragmentP& tOrP,
                        FragmentO& tOrO, OnlineSoftmax<Config>& softmax, bool o_is_zero) {
    if constexpr (Config::kIntraOverlap) {
      overlapped_step<kMasked>(n, limits, tSrS, tOrP, tOrO, softmax, o_is_zero);
    } else {
      serial_step<kMasked>(n, limits, tSrS, tOrP, tOrO, softmax, o_is_zero);
    }
  }

  // S and P of tile n; O of the tile before, n + 1.
  template <bool kMasked, class FragmentS, class FragmentP, class FragmentO>
  CUTE_DEVICE void overlapped_step(int n, RowLimits const& limits, FragmentS& tSrS, FragmentP& tOrP,
                                   FragmentO& tOrO, OnlineSoftmax<Config>& softmax,
                                   bool o_is_zero) {
    shared.k_full[k_ring.stage].wait(k_ring.phase);
    turn.wait();
    issue_scores(tSrS);
    shared.v_full[v_ring.stage].wait(v_ring.phase);
    issue_output(tOrP, tOrO, o_is_zero, [&] { turn.pass(); });
    wait_gemm<1>(tSrS);
    release(shared.k_empty, k_ring);
    if constexpr (kMasked) {
      limits.template apply<Traits::kTileN>(tSrS, n);
    }
    softmax.template update<kMasked>(tSrS);
    wait_gemm<0>(tOrO);
    release(shared.v_empty, v_ring);
    convert_fragment<Element>(tSrS, tOrP);
    softmax.rescale_output(tOrO);
  }

  // S, P and O of tile n. S and P need not live at the same time, so that tiles may be larger; only
  // other warpgroups' products lie beside the softmax.
  template <bool kMasked, class FragmentS, class FragmentP, class FragmentO>
  CUTE_DEVICE void serial_step(int n, RowLimits const& limits, FragmentS& tSrS, FragmentP& tOrP,
                               FragmentO& tOrO, OnlineSoftmax<Config>& softmax, bool o_is_zero) {
    shared.k_full[k_ring.stage].wait(k_ring.phase);
    turn.wait();
    issue_scores(tSrS);
    wait_gemm<0>(tSrS);
    turn.pass();
    release(shared.k_empty, k_ring);
    if constexpr (kMasked) {
      limits.template apply<Traits::kTileN>(tSrS, n);
    }
    softmax.template update<kMasked>(tSrS);
    convert_fragment<Element>(tSrS, tOrP);
    softmax.rescale_output(tOrO);
    shared.v_full[v_ring.stage].wait(v_ring.phase);
    issue_output(tOrP, tOrO, o_is_zero);
    wait_gemm<0>(tOrO);
    release(shared.v_empty, v_ring);
  }

  // O of the last tile.
  template <class FragmentP, class FragmentO>
  CUTE_DEVICE void last(FragmentP& tOrP, FragmentO& tOrO, bool o_is_zero) {
    shared.v_full[v_ring.stage].wait(v_ring.phase);
    turn.wait();
    issue_output(tOrP, tOrO, o_is_zero, [&] { turn.pass(); });
    wait_gemm<0>(tOrO);
    release(shared.v_empty, v_ring);
  }

  template <class FragmentS>
  CUTE_DEVICE void issue_scores(FragmentS& tSrS) {
    auto sQ = cute::make_tensor(cute::make_smem_ptr(shared.q[q_ring.stage][warpgroup]),
                                typename Traits::SmemLayoutQ{});  // (64, D)
    auto sK = cute::make_tensor(cute::make_smem_ptr(shared.k[k_ring.stage]),
                                typename Traits::SmemLayoutK{});  // (N, D)
    auto mma = MmaS{}.get_slice(0);
    auto tSrQ = mma.partition_fragment_A(sQ);  // (MMA, 1, D / 16)
    auto tSrK = mma.partition_fragment_B(sK);  // (MMA, 1, D / 16)
    issue_gemm(MmaS{}, tSrQ, tSrK, tSrS, true);
  }

  template <class FragmentP, class FragmentO, class Hook = NoHook>
  CUTE_DEVICE void issue_output(FragmentP& tOrP, FragmentO& tOrO, bool o_is_zero, Hook hook = {}) {
    auto sV = cute::make_tensor(cute::make_smem_ptr(shared.v[v_ring.stage]),
                                typename Traits::SmemLayoutV{});  // (Dv, N)
    auto tOrV = MmaO{}.get_slice(0).partition_fragment_B(sV);     // (MMA, 1, N / 16)
    issue_gemm<Config::kTurnLead>(MmaO{}, tOrP, tOrV, tOrO, o_is_zero, hook);
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
