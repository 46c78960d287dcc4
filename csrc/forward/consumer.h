// A consumer warpgroup computes S = Q K^T, the softmax and O = P V for its 64 rows of a tile. Both
// loops over K tiles (loop_skewed.h, loop_serial.h) are built from the functions of FwdConsumer.
#pragma once

#include "device/gemm.h"
#include "forward/cache/missing_values.h"
#include "forward/ping_pong.h"
#include "forward/slots.h"

namespace fa3 {

// The tile that a consumer warpgroup works on.
template <class Traits>
struct FwdTile {
  static constexpr bool kFolds = Traits::kFolds;

  FwdWork<Traits> work;
  int q_stage;
  typename FwdSlots<Traits>::Limits limits;
  bool o_is_zero = true;  // nothing has been added to O yet
};

// A buffer of shared memory as an operand of a GEMM, for 16-bit elements: one descriptor for
// each buffer. WHY not OffsetDescriptors: ptxas then orders the loops of bf16 at head dim 64
// differently, 1 to 3 % slower (timed together with one other change; docs/journal/fp8.md).
struct BufferDescriptors {
  template <class Layout, class Element, int kElements, class Partition>
  CUTE_DEVICE static auto operand(Element (*buffers)[kElements], int index,
                                  Partition const& partition) {
    return partition(cute::make_tensor(cute::make_smem_ptr(buffers[index]), Layout{}));
  }
};

// One descriptor for the first buffer, computed once; that of another buffer is one addition away.
struct OffsetDescriptors {
  template <class Layout, class Element, int kElements, class Partition>
  CUTE_DEVICE static auto operand(Element (*buffers)[kElements], int index,
                                  Partition const& partition) {
    auto const first = partition(cute::make_tensor(cute::make_smem_ptr(buffers[0]), Layout{}));
    return cute::make_tensor(first.data() + index * (kElements * int(sizeof(Element)) / 16),
                             first.layout());
  }
};

// Visits the K tiles from n down to `begin`, the first one of the range or of a part of it: first
// those masked at the end of the range, then the free ones, then those masked at its beginning.
template <class Loop, class Tile>
CUTE_DEVICE void visit_keys(Loop& loop, Tile& tile, int n, int begin) {
  constexpr bool kHasBegin = Loop::Limits::kHasBegin;
  auto const& keys = tile.work.keys;
  int const free_begin = !kHasBegin     ? (Tile::kFolds ? begin : 0)
                         : Tile::kFolds ? max_of(keys.free_begin, begin)
                                        : keys.free_begin;
  CUTE_NO_UNROLL
  for (; n >= max_of(keys.free_end, free_begin); keys.advance(n)) {
    loop.template step<Masked::kEnd>(n, tile);
  }
  CUTE_NO_UNROLL
  for (; n >= free_begin; keys.advance(n)) {
    loop.template step<Masked::kNothing>(n, tile);
  }
  CUTE_NO_UNROLL
  for (; kHasBegin && n >= begin; keys.advance(n)) {
    loop.template step<Masked::kBothEnds>(n, tile);
  }
}

template <class Traits_>
struct FwdConsumer {
  using Traits = Traits_;
  using Element = typename Traits::Element;
  using MmaS = typename Traits::MmaS;
  using MmaO = typename Traits::MmaO;
  using Tile = FwdTile<Traits>;
  using Slots = FwdSlots<Traits>;
  using Softmax = typename Slots::Softmax;
  using Descriptors =
      cute::conditional_t<sizeof(Element) == 1, OffsetDescriptors, BufferDescriptors>;
  static constexpr FwdConfig k = Traits::k;

  using FragmentS = decltype(cute::partition_fragment_C(
      MmaS{}, cute::Shape<cute::_64, typename Traits::TileN>{}));
  using FragmentP =
      decltype(cute::make_tensor<Element>(Traits::operand_p_layout(FragmentS{}.layout())));
  using FragmentO = decltype(cute::partition_fragment_C(
      MmaO{}, cute::Shape<cute::_64, typename Traits::HeadDimV>{}));

  FwdStorage<Traits>& shared;
  typename Traits::Params const& p;
  int warpgroup;
  int thread;  // in the warpgroup
  PingPongOf<Traits> ping_pong;
  RingState<Traits::kQStages> q_ring;
  RingState<Traits::kStages> k_ring;
  RingState<Traits::kStages> v_ring;
  typename Slots::Scales scales;
  typename Slots::Queries queries;
  typename Slots::Columns columns;
  typename Slots::Sums sums;
  Softmax softmax;
  FragmentS tSrS;  // S, then P
  FragmentP tOrP;
  FragmentO tOrO;

  CUTE_DEVICE FwdConsumer(FwdStorage<Traits>& shared_, typename Traits::Params const& p_,
                          int warpgroup_, int thread_)
      : shared(shared_),
        p(p_),
        warpgroup(warpgroup_),
        thread(thread_),
        ping_pong(warpgroup_),
        scales(shared_, p_),
        sums(shared_, p_, warpgroup_, thread_),
        softmax(p_.scale_log2, p_.lazy_rescale_log2, p_.zero) {}

  // The next tile, as soon as its Q has arrived. Its limits are still missing.
  CUTE_DEVICE Tile take_tile() {
    while (true) {
      int const q_stage = q_ring.stage;
      shared.q_full[q_stage][warpgroup].wait(q_ring.phase);
      q_ring.advance();
      Tile const tile{shared.work[q_stage][warpgroup], q_stage};
      if (!kMayLackRows || !tile.work.valid() || tile.work.rows.left > 0) {
        return tile;
      }
      pass_over(tile);
    }
  }

  // -------------------------------------------------------------------------------- GEMMs
  CUTE_DEVICE void wait_for_k() {
    shared.k_full[k_ring.stage].wait(k_ring.phase);
    Slots::Keys::after_wait(p);
  }

  CUTE_DEVICE void load_queries(Tile const& tile) {
    queries.load(shared.q[tile.q_stage][warpgroup], thread);
  }

  // Issues S = Q K^T of the next K tile, whose K has arrived.
  CUTE_DEVICE void issue_scores(Tile const& tile) {
    auto mma = MmaS{}.get_slice(0);
    int const q_buffer = tile.q_stage * Traits::kWarpgroups + warpgroup;
    using LayoutQ = typename Traits::SmemLayoutQ;  // (64, columns)
    using LayoutK = typename Traits::SmemLayoutK;  // (N, columns)
    // Both (MMA, 1, columns / 16).
    auto tSrQ = Descriptors::template operand<LayoutQ>(
        shared.q[0], q_buffer, [&](auto const& sQ) { return mma.partition_fragment_A(sQ); });
    auto tSrK = Descriptors::template operand<LayoutK>(
        shared.k, k_ring.stage, [&](auto const& sK) { return mma.partition_fragment_B(sK); });
    queries.issue(tSrQ, tSrK, tSrS);
  }

  // Waits for S, and releases its K. `others`: groups of GEMMs that were issued after those of S.
  template <int kOthers>
  CUTE_DEVICE void complete_scores() {
    wait_gemm<kOthers>(tSrS);
    release_k();
    columns.complete(shared, p.zero, warpgroup, thread, tSrS);
  }

  // Issues O = P V of the next K tile. It is added to O unless O starts from zero.
  CUTE_DEVICE void issue_output(Tile const& tile) {
    shared.v_full[v_ring.stage].wait(v_ring.phase);
    Slots::Keys::after_wait(p);
    auto mma = typename Traits::MmaV{}.get_slice(0);
    using LayoutV = typename Traits::SmemLayoutV;  // (columns, N)
    auto tOrV = Descriptors::template operand<LayoutV>(shared.v, v_ring.stage, [&](auto const& sV) {
      return mma.partition_fragment_B(sV);  // (MMA, 1, N / 16)
    });
    issue_gemm<Traits::kOutputSteps>(MmaO{}, tOrP, tOrV, tOrO,
                                     Slots::Sums::kStartsFromZero || tile.o_is_zero);
  }

  // Before PV of the K tiles that are visited first and last.
  CUTE_DEVICE void clear_first_values(Tile const& tile) {
    if constexpr (Traits::kClearsValues) {
      MissingValues<Traits>{shared, p, warpgroup, thread}.clear_after_end(
          tile.work.location, tile.work.keys.tile(tile.work.keys.first()), v_ring);
    }
  }

  CUTE_DEVICE void clear_last_values(Tile const& tile) {
    if constexpr (Traits::kClearsValues) {
      FwdWork<Traits> const& work = shared.work[tile.q_stage][warpgroup];
      MissingValues<Traits>{shared, p, warpgroup, thread}.clear_before_begin(
          work.location, work.keys.tile(work.keys.last()), v_ring);
    }
  }

  CUTE_DEVICE void release_k() { release(shared.k_empty, k_ring); }
  CUTE_DEVICE void release_v() { release(shared.v_empty, v_ring); }

  // -------------------------------------------------------------------------------- softmax
  CUTE_DEVICE void start_rows(Tile& tile) {
    if (!Traits::kMasksLate) {
      tile.limits = Slots::Limits::of_tile(p, tile.work, thread);
    }
    scales.start_rows(softmax, tile.q_stage, warpgroup, thread);
  }

  template <Masked kMasked>
  CUTE_DEVICE void mask_scores(int n, Tile& tile) {
    if (Traits::kMasksLate) {
      tile.limits = Slots::Limits::of_tile(p, shared.work[tile.q_stage][warpgroup], thread);
    }
    tile.limits.template apply<kMasked>(p, tSrS, Slots::Limits::at(tile.work.keys, n));
  }

  CUTE_DEVICE FwdScoresAt<Traits> scores_at(int n, Tile const& tile) const {
    return {p, tile.work, n, thread};
  }

  template <class Scale>
  CUTE_DEVICE void transform_scores(int n, Tile const& tile, Scale const& scale) {
    float factors[2] = {Slots::Score::factor(p), Slots::Score::factor(p)};
    softmax.scale_scores(factors, scale);
    Slots::Score::forward(tSrS, factors, scores_at(n, tile));
  }

  // Turns S of K tile n into P, in the registers of S. hook: as in Softmax::update().
  template <Masked kMasked, class Scale, class Hook>
  CUTE_DEVICE void exponentiate(int n, Tile& tile, Scale const& scale, Hook const& hook) {
    transform_scores(n, tile, scale);
    if (kMasked != Masked::kNothing) {
      mask_scores<kMasked>(n, tile);
    }
    softmax.template update<kMasked != Masked::kNothing>(tSrS, scale, hook);
  }

  // Packs P of K tile n, in the registers of S, into the operand of PV.
  CUTE_DEVICE void pack(int n, Tile const& tile) {
    Slots::Probabilities::transform(tSrS, scores_at(n, tile));
    softmax.pack(tSrS, tOrP);
  }

  // -------------------------------------------------------------------------------- results
  // Divides O by the sums of its rows, and stores O and the LSE.
  CUTE_DEVICE void store(Tile const& tile) {
    // WHY `work` is read here: the loops have no registers for it. It is overwritten once the Q
    // buffer is released.
    FwdWork<Traits> const& work = shared.work[tile.q_stage][warpgroup];
    float row_sinks[2];
    read_sinks<Traits>(p, work, thread, row_sinks);
    sums.end(tOrO, softmax);
    bool is_part = false;
    if constexpr (Traits::kMayFold) {
      is_part = p.folds && work.location.part.parts > 1;
      if (p.folds) {
        softmax.apply_value_scale(tOrO);
      }
      if (is_part) {
        softmax.complete_rows();
      }
    }
    if (!is_part) {
      softmax.finish(tOrO, row_sinks);
    }
    Slots::Output::store(shared, p, {tile.q_stage, warpgroup, thread}, softmax, row_sinks, tOrO);
  }

  // ------------------------------------------------------------------------- parts of the keys
  CUTE_DEVICE KeyTilePart first_part(Tile const& tile) const {
    return KeyTilePart::first(tile.work.keys, p.part_tiles);
  }

  // The K tile that a tile of queries visits first.
  CUTE_DEVICE int first_keys(Tile const& tile) const {
    if constexpr (Traits::kFolds) {
      return first_part(tile).end - 1;
    } else {
      return tile.work.keys.first();
    }
  }

  // -------------------------------------------------------------------------- skipped K tiles
  // Passes over K tiles of which none of this warpgroup's rows sees a key.
  CUTE_DEVICE void skip_keys(int count) {
    CUTE_NO_UNROLL
    for (; Traits::kMostSkipped > 0 && count > 0; --count) {
      skip(shared.k_full, shared.k_empty, k_ring);
      scales.skip();
    }
  }

  CUTE_DEVICE void skip_values(int count) {
    CUTE_NO_UNROLL
    for (; Traits::kMostSkipped > 0 && count > 0; --count) {
      skip(shared.v_full, shared.v_empty, v_ring);
    }
  }

 private:
  using Barriers = Mbarrier[Traits::kStages];

  // Where the second warpgroup has no rows, the first one has the tensor cores to itself.
  static constexpr bool kMayLackRows = Traits::kIsCache && Traits::kWarpgroups > 1;

  CUTE_DEVICE void pass_over(Tile const& tile) {
    CUTE_NO_UNROLL
    for (int n = tile.work.keys.last(); n <= tile.work.keys.first(); ++n) {
      take_turn();
      skip(shared.k_full, shared.k_empty, k_ring);
      skip(shared.v_full, shared.v_empty, v_ring);
    }
    take_turn();
    release_queries(shared, tile.q_stage, warpgroup, thread);
  }

  CUTE_DEVICE void take_turn() {
    ping_pong.wait();
    ping_pong.pass();
  }

  // TRAP: without a GEMM nothing synchronises the warps. A late warp would find the stage filled
  // again, and wait for a phase that is already over.
  CUTE_DEVICE void skip(Barriers& full, Barriers& empty, RingState<Traits::kStages>& ring) {
    full[ring.stage].wait(ring.phase);
    sync_warpgroup(warpgroup);
    release(empty, ring);
  }

  // One elected thread arrives: a GEMM is complete for all warps of the warpgroup at once.
  CUTE_DEVICE void release(Barriers& empty, RingState<Traits::kStages>& ring) {
    if (thread == 0) {
      empty[ring.stage].arrive();
    }
    ring.advance();
  }
};

}  // namespace fa3
