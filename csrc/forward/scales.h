// FP8: the scales of q, k and v. By block, of 64 rows of q and kScaleBlockKeys of k and v, or per
// (sequence, KV head), whose blocks all have the same one: the stride of a block is 0. A block of
// keys is whole K tiles, so that a K tile has one scale.
#pragma once

#include "device/fragments.h"
#include "device/math.h"
#include "forward/storage.h"

namespace fa3 {

// P is brought into the range of e4m3 by this power of two.
constexpr int kOffsetLog2 = 8;

// No scale of v counts as smaller: with 0 the maximum of a row would lose its meaning. Twice that
// far from 1 a float still has room.
constexpr float kLeastScale = 1e-30f;

// Nor one of k, or one of q times that of the softmax. What scores are multiplied with must not be
// flushed to 0, for a hidden one is -inf.
constexpr float kLeastScoreScale = 0x1p-60f;

CUTE_DEVICE float at_least(float scale, float least) {
  return scale < least ? least : scale;  // NaN stays NaN
}

CUTE_DEVICE float scale_at(ScaleView const& scales, int64_t first, int block) {
  return scales.data == nullptr ? 1.f : scales.data[first + block * scales.block_stride];
}

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

// Brings the scales of a tile into shared memory, ahead of the consumers. A warp runs this.
template <class Traits>
struct ScaleReader {
  FwdStorage<Traits>& shared;
  FwdDeviceParams const& p;
  int lane;
  RingState<Traits::kStages> k_ring;
  RingState<Traits::kScaleStages> ring;

  CUTE_DEVICE ScaleReader(FwdStorage<Traits>& shared_, FwdDeviceParams const& p_, int lane_)
      : shared(shared_), p(p_), lane(lane_) {}

  CUTE_DEVICE void write_scales(int q_stage) {
    TileScales at;
    CUTE_NO_UNROLL
    for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
      FwdWork<Traits> const& work = shared.work[q_stage][wg];
      at = scales_of(p, work);
      write_query_scales(work, at, shared.q_scales[q_stage][wg]);
    }
    __syncwarp();
    if (lane == 0) {
      // By value: when the last K tile is there, `work` may be overwritten.
      FwdWork<Traits> const& work = shared.work[q_stage][0];
      write_key_scales(at, work.keys_begin(), work.keys_end());
    }
    __syncwarp();
  }

 private:
  struct BlockOfKeys {
    float k;
    float v;
  };

  CUTE_DEVICE BlockOfKeys read_block(TileScales const& at, int block) const {
    block = min_of(block, at.last_key_block);
    return block < 0
               ? BlockOfKeys{1.f, 1.f}
               : BlockOfKeys{scale_at(p.k_scale, at.k, block), scale_at(p.v_scale, at.v, block)};
  }

  // For each K tile, as K comes: those of Q, too, are there with the first one. A block is read
  // while the one before is in use.
  CUTE_DEVICE void write_key_scales(TileScales const& at, int keys_begin, int keys_end) {
    int block = (keys_end - 1) / Traits::kScaleTiles;
    BlockOfKeys next = read_block(at, block);
    int n = keys_end - 1;
    CUTE_NO_UNROLL
    for (; n >= keys_begin; --block) {
      float const v = at_least(next.v, kLeastScale);
      KeyScale const scale{at_least(next.k, kLeastScoreScale), log2_approx(v),
                           reciprocal_approx(v)};
      next = read_block(at, max_of(block - 1, 0));
      int const begin = max_of(keys_begin, block * Traits::kScaleTiles);
      CUTE_NO_UNROLL
      for (; n >= begin; --n) {
        shared.k_empty[k_ring.stage].wait(k_ring.phase ^ 1);
        shared.scales[ring.stage] = scale;
        shared.k_full[k_ring.stage].arrive();
        k_ring.advance();
        ring.advance();
      }
    }
  }

  CUTE_DEVICE void write_query_scales(FwdWork<Traits> const& work, TileScales const& at,
                                      float (&of_rows)[kWarpgroupRows]) const {
    int const last = max_of(0, work.place.lengths(p.seqlen).q - 1);
    CUTE_UNROLL
    for (int row = lane; row < kWarpgroupRows; row += 32) {
      int const offset = p.pack.div(row);
      int const head = row - offset * int(p.pack.divisor);
      int const position = clamp(work.position_begin + offset, 0, last);
      int64_t const of_head = at.q + head * p.q_scale.head_in_pack_stride;
      of_rows[row] =
          at.has_keys() ? scale_at(p.q_scale, of_head, position / kScaleBlockQueries) : 1.f;
    }
  }
};

}  // namespace fa3
