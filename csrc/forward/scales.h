// FP8: the scales of q, k and v. By block, of 64 rows of q and 32 of k and v, or per (sequence, KV
// head), whose blocks all have the same one: the stride of a block is 0.
#pragma once

#include "device/fragments.h"
#include "device/math.h"
#include "forward/storage.h"

namespace fa3 {

// P is brought into the range of e4m3 by this power of two.
constexpr int kOffsetLog2 = 8;

// No scale counts as smaller: with 0 the maximum of a row would lose its meaning. Twice that far
// from 1 a float still has room.
constexpr float kLeastScale = 1e-30f;

CUTE_DEVICE float scale_at(ScaleView const& scales, int64_t first, int block) {
  float const scale =
      scales.data == nullptr ? 1.f : scales.data[first + block * scales.block_stride];
  return scale < kLeastScale ? kLeastScale : scale;  // NaN stays NaN
}

// What becomes of the scores of a block: times k, and v_log2 more.
struct ScoreScale {
  float k;
  float v_log2;
};

// Of the K tile at hand, in shared memory.
// WHY volatile: kept in registers from one use to the next they spill.
struct KeyScales {
  uint32_t first;

  CUTE_DEVICE explicit KeyScales(BlockScale const* scales)
      : first(cute::cast_smem_ptr_to_uint(scales)) {}

  CUTE_DEVICE ScoreScale of_scores(int block) const {
    ScoreScale scale;
    asm volatile("ld.volatile.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(scale.k), "=f"(scale.v_log2)
                 : "r"(first + block * int(sizeof(BlockScale))));
    return scale;
  }

  CUTE_DEVICE float over_v(int block) const {
    float over_v;
    int const offset = block * int(sizeof(BlockScale)) + int(offsetof(BlockScale, over_v));
    asm volatile("ld.volatile.shared.f32 %0, [%1];" : "=f"(over_v) : "r"(first + offset));
    return over_v;
  }
};

// Where all keys of a sequence have one, which is in those of q, or comes last.
struct OneScale {
  CUTE_DEVICE static ScoreScale of_scores(int) { return ScoreScale{1.f, 0.f}; }
  CUTE_DEVICE static float over_v(int) { return 1.f; }
};

// Of this thread's two rows.
CUTE_DEVICE void read_query_scales(float const (&of_rows)[kWarpgroupRows], int thread,
                                   float (&scales)[2]) {
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    scales[r] = of_rows[fragment_row(thread) + 8 * r];
  }
}

// Where the scales of a tile begin, and the last block of keys that the sequence has; -1: none, and
// no scale is read, whatever the rows are.
struct TileScales {
  int64_t q;
  int64_t k;
  int64_t v;
  int last_key_block;

  CUTE_DEVICE bool has_keys() const { return last_key_block >= 0; }
};

CUTE_DEVICE int64_t first_scale(ScaleView const& scales, int batch, int head, int first_row,
                                int rows_of_block) {
  int64_t const first = batch * scales.batch_stride + head * scales.head_stride;
  return first + (first_row / rows_of_block + (first_row < 0 ? 0 : batch)) * scales.block_stride;
}

// Rows of no sequence are entries behind those of the batch, without keys.
template <class Traits>
CUTE_DEVICE TileScales scales_of(FwdDeviceParams const& p, FwdWork<Traits> const& work) {
  int const batch = min_of(work.entry, p.scale_batches - 1);
  int q_begin = -1;  // dense: blocks go by batch_stride
  int k_begin = -1;
  if constexpr (Traits::kGeneral) {
    if (p.is_packed()) {
      q_begin = first_row_of_sequence(work);
      k_begin = max_of(0, work.place.end_k() - work.place.len.k);
    }
  }
  int const head = p.q_scale.by_kv_head ? work.kv_head : work.rows.head;
  TileScales scales;
  scales.q = first_scale(p.q_scale, batch, head, q_begin, kScaleBlockQueries);
  scales.k = first_scale(p.k_scale, batch, work.kv_head, k_begin, kScaleBlockKeys);
  scales.v = first_scale(p.v_scale, batch, work.kv_head, k_begin, kScaleBlockKeys);
  int const keys = max_of(0, work.place.lengths(p.seqlen).k);
  scales.last_key_block = ceil_div(keys, kScaleBlockKeys) - 1;
  return scales;
}

// A warp of the producer warpgroup: brings the scales into shared memory, ahead of the consumers.
template <class Traits>
struct ScaleReader {
  FwdStorage<Traits>& shared;
  FwdDeviceParams const& p;
  int lane;
  RingState<Traits::kQStages> q_ring;
  RingState<kScaleStages> ring;

  CUTE_DEVICE ScaleReader(FwdStorage<Traits>& shared_, FwdDeviceParams const& p_, int lane_)
      : shared(shared_), p(p_), lane(lane_) {}

  CUTE_DEVICE void run() {
    while (true) {
      TileScales at;
      CUTE_NO_UNROLL
      for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
        shared.q_full[q_ring.stage][wg].wait(q_ring.phase);
        FwdWork<Traits> const& work = shared.work[q_ring.stage][wg];
        if (!work.valid()) {
          return;
        }
        at = scales_of(p, work);
        write_query_scales(work, at, shared.q_scales[q_ring.stage][wg]);
        if (!p.scales_by_block) {
          shared.v_scale[q_ring.stage] = at.has_keys() ? scale_at(p.v_scale, at.v, 0) : 1.f;
        }
      }
      // A copy: when the scales have been used, `work` may be overwritten.
      BlockRange const keys = shared.work[q_ring.stage][0].keys;
      // Of one for all keys the ring tells that those of q are there.
      int const last = p.scales_by_block ? keys.begin : keys.end - 1;
      CUTE_NO_UNROLL
      for (int n = keys.end - 1; n >= last; --n) {
        shared.scales_empty[ring.stage].wait(ring.phase ^ 1);
        write_key_scales(at, n, shared.scales[ring.stage]);
        __syncwarp();
        if (lane == 0) {
          shared.scales_full[ring.stage].arrive();
        }
        ring.advance();
      }
      q_ring.advance();
    }
  }

 private:
  // Each of the first lanes has a block of K tile n.
  CUTE_DEVICE void write_key_scales(TileScales const& at, int n, BlockScale* scales) const {
    if (lane < Traits::kScaleBlocks) {
      int const block = min_of(n * Traits::kScaleBlocks + lane, at.last_key_block);
      float const v = at.has_keys() ? scale_at(p.v_scale, at.v, block) : 1.f;
      float const k = at.has_keys() ? scale_at(p.k_scale, at.k, block) : 1.f;
      float const over_v = reciprocal_approx(v) * (1.f / (1 << kOffsetLog2));
      scales[lane] = BlockScale{k, log2_approx(v), over_v};
    }
  }

  CUTE_DEVICE void write_query_scales(FwdWork<Traits> const& work, TileScales const& at,
                                      float (&of_rows)[kWarpgroupRows]) const {
    int const last = max_of(0, work.place.lengths(p.seqlen).q - 1);
    bool const with_k = !p.scales_by_block && at.has_keys();
    float const k_scale = with_k ? scale_at(p.k_scale, at.k, 0) : 1.f;
    CUTE_UNROLL
    for (int row = lane; row < kWarpgroupRows; row += 32) {
      int const offset = p.pack.div(row);
      int const head = row - offset * int(p.pack.divisor);
      int const position = min_of(work.position_begin + offset, last);
      int64_t const of_head = at.q + head * p.q_scale.head_in_pack_stride;
      float const q_scale =
          at.has_keys() ? scale_at(p.q_scale, of_head, position / kScaleBlockQueries) : 1.f;
      of_rows[row] = q_scale * k_scale;
    }
  }
};

}  // namespace fa3
