// The output warpgroups. Each computes half of the columns of O = P V for the 64 rows of a tile and
// stores them as the result or as a part (combine.h).
#pragma once

#include "device/gemm.h"
#include "forward/cache/cache_batch.h"
#include "forward/cache/parts.h"
#include "forward/cache/result_rows.h"
#include "mla/converter.h"
#include "mla/storage.h"

namespace fa3 {

// The LSEs of a thread's two rows, as store_lse() reads them.
struct RowEnds {
  float lses[2];

  CUTE_DEVICE float lse(int r, float) const { return r == 0 ? lses[0] : lses[1]; }
};

template <class Traits>
struct OutputWarpgroup {
  using Params = typename Traits::Params;
  using Work = FwdWork<Traits>;
  using MmaO = typename Traits::MmaO;
  // The accumulators as the MMA sees them, (MMA, 1, 2), and as one row, ((2, 2, 32), 1, 1).
  using Accumulators = decltype(cute::partition_fragment_C(
      MmaO{}, cute::Shape<cute::_64, cute::Int<Traits::kOutputColumns>>{}));
  using FragmentO = decltype(cute::make_tensor<float>(
      cute::Layout<
          cute::Shape<cute::Shape<cute::_2, cute::_2, cute::Int<Traits::kOutputColumns / 8>>,
                      cute::_1, cute::_1>>{}));

  MlaStorage<Traits>& shared;
  Params const& p;
  int half;
  int thread;  // in the warpgroup
  RingState<Traits::kStages> p_ring;
  HalfRing<Traits> values;
  RingState<Traits::kTileStages> tiles;
  HalfConverter<Traits> converter;  // e4m3 only
  FragmentO tOrO;

  CUTE_DEVICE OutputWarpgroup(MlaStorage<Traits>& shared_, Params const& p_, int half_, int thread_)
      : shared(shared_),
        p(p_),
        half(half_),
        thread(thread_),
        values(half_ == 0),
        converter{shared_, half_, thread_} {}

  CUTE_DEVICE void run() {
    converter.start();
    CUTE_NO_UNROLL
    while (true) {
      shared.p_full[p_ring.stage].wait(p_ring.phase);
      KeyRange<Traits> const& keys = shared.work[tiles.stage].keys;
      int left = keys.count();
      if (keys.end == 0) {
        return;
      }
      if (half == 0) {
        values.advance();  // skips the stage of Q
        converter.release();
      }
      bool starts = true;
      CUTE_NO_UNROLL
      for (; left > 0; --left) {
        accumulate_pv(starts);
        starts = false;
      }
      store();
      __syncwarp();
      if (thread % 32 == 0) {
        shared.work_empty[tiles.stage].arrive();
      }
      tiles.advance();
      converter.end_tile();
    }
  }

 private:
  // Adds P V of the next K tile to O.
  CUTE_DEVICE void accumulate_pv(bool starts) {
    shared.p_full[p_ring.stage].wait(p_ring.phase);
    if (!starts && shared.any_rescale[p_ring.stage][thread / 32]) {
      float factors[2];
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        factors[r] = shared.rescale[p_ring.stage][fragment_row(thread) + 8 * r];
      }
      multiply_rows(tOrO, factors);
    }
    shared.half_full[values.stage].wait(values.phase);
    if (p.box_keys == 0) {  // gathered rows are not written by TMA
      fence_shared_for_async_proxy();
    }
    if (Traits::kLeftWaits && half == 0) {
      shared.left_allowed[p_ring.stage].wait(p_ring.phase);
    }
    auto mma = MmaO{}.get_slice(0);
    auto sP = cute::make_tensor(
        cute::make_smem_ptr(shared.rotary[p_ring.stage]),
        typename Traits::template RowMajor<kWarpgroupRows, Traits::kTileN>{});  // (64, N)
    auto sV = cute::make_tensor(cute::make_smem_ptr(shared.halves[values.stage]),
                                typename Traits::SmemLayoutV{});  // (256, N)
    auto accumulators = cute::make_tensor(tOrO.data(), Accumulators{}.layout());
    issue_gemm<Traits::kOutputSteps>(MmaO{}, mma.partition_fragment_A(sP),
                                     mma.partition_fragment_B(sV), accumulators, starts);
    wait_gemm<0>(accumulators);
    if (thread == 0) {
      shared.half_empty[values.stage].arrive();
      shared.rotary_empty[p_ring.stage].arrive();
    }
    values.advance();
    p_ring.advance();
    converter.release();
  }

  CUTE_DEVICE void store() {
    Work const& work = shared.work[tiles.stage];
    // WHY: without this, values derived from the thread index stay in registers across all tiles.
    int own = thread;
    asm volatile("" : "+r"(own));
    RowEnds ends;
    auto output = rows_view(tOrO);  // (2, (2, 32))
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      RowEnd const end = shared.ends[tiles.stage][fragment_row(own) + 8 * r];
      ends.lses[r] = end.lse;
      // A row without a visible key is 0, even if V holds NaN.
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(output); ++c) {
        output(r, c) = end.scale == 0.f ? 0.f : output(r, c) * end.scale;
      }
    }
    if (work.location.part.parts > 1) {
      store_part(work, own, ends);
      publish_parts(work);
      return;
    }
    ResultColumns<Traits>{p, work, own, half * Traits::kOutputColumns}.write(tOrO);
    if (half == 0) {
      store_lse<Traits>(p, work.rows, own, ends, {-INFINITY, -INFINITY});
    }
  }

  // Stores O in register order.
  CUTE_DEVICE void store_part(Work const& work, int own, RowEnds const& ends) const {
    PartRows<Traits> const parts{p, work.location.part.slot_of(work.location.part.index)};
    int const warp = own / 32;
    if (warp * kWarpRows >= rows_of_tile(p, work.rows)) {
      return;
    }
    constexpr int kFours = Traits::kOutputColumns / 8;
    float4* const target = parts.fours(warp, half * kFours) + own % 32;
    CUTE_UNROLL
    for (int i = 0; i < kFours; ++i) {
      target[32 * i] = make_float4(tOrO(4 * i), tOrO(4 * i + 1), tOrO(4 * i + 2), tOrO(4 * i + 3));
    }
    if (half == 0 && own % 4 < 2) {
      p.part_lses[parts.first_row(0) + fragment_row(own) + 8 * (own % 4)] = ends.lse(own % 4, 1.f);
    }
  }

  // The CTA of the first part queues the tile for the combining kernel.
  CUTE_DEVICE void publish_parts(Work const& work) {
    if (work.location.part.index == 0 && half == 0 && thread == 0) {
      p.shared_tiles[atomicAdd(&p.combine->tiles, 1)].work = work;
    }
  }
};

}  // namespace fa3
