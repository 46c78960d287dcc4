// FP8: the scales of q, k and v. By block, of 64 rows of q and kScaleBlockKeys of k and v, or per
// (sequence, KV head), whose blocks all have the same one: the stride of a block is 0. A block of
// keys is whole K tiles, so that a K tile has one scale.
#pragma once

#include "core/compact_ring.h"
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

// Of this thread's two rows.
CUTE_DEVICE void read_query_scales(float const (&of_rows)[kWarpgroupRows], int thread,
                                   float (&scales)[2]) {
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    scales[r] = of_rows[fragment_row(thread) + 8 * r];
  }
}

// Where the scales of a tile begin. Rows of no sequence are entries behind those of the batch,
// without keys. WHY functions: each is worked out where it is needed, for registers are short.
template <class Traits>
struct TileScales {
  FwdDeviceParams const& p;
  FwdWork<Traits> const& work;

  // Whether the sequence has keys. If not no scale is read, whatever the rows are.
  CUTE_DEVICE bool has_keys() const { return last_key_block() >= 0; }

  // The last block of keys that the sequence has; -1: none.
  CUTE_DEVICE int last_key_block() const {
    return ceil_div(max_of(0, work.place.lengths(p.seqlen).k), kScaleBlockKeys) - 1;
  }

  CUTE_DEVICE int64_t first_of_q() const {
    int const head = p.q_scale.by_kv_head ? work.kv_head : work.rows.head;
    int begin = -1;  // dense: blocks go by batch_stride
    if constexpr (Traits::kGeneral) {
      begin = p.is_packed() ? first_row_of_sequence(work) : begin;
    }
    return first_scale(p.q_scale, head, begin, kScaleBlockQueries);
  }

  // scales: of k or v.
  CUTE_DEVICE int64_t first_of_keys(ScaleView const& scales) const {
    int begin = -1;
    if constexpr (Traits::kGeneral) {
      begin = p.is_packed() ? max_of(0, work.place.end_k() - work.place.len.k) : begin;
    }
    return first_scale(scales, work.kv_head, begin, kScaleBlockKeys);
  }

 private:
  CUTE_DEVICE int64_t first_scale(ScaleView const& scales, int head, int first_row,
                                  int rows_of_block) const {
    int const batch = min_of(work.entry, p.scale_batches - 1);
    int64_t const first = batch * scales.batch_stride + head * scales.head_stride;
    return first + (first_row / rows_of_block + (first_row < 0 ? 0 : batch)) * scales.block_stride;
  }
};

// Brings the scales of a tile into shared memory, ahead of the consumers. A warp runs this.
template <class Traits>
struct ScaleReader {
  FwdStorage<Traits>& shared;
  FwdDeviceParams const& p;
  CompactRing<Traits::kStages> k_ring;

  CUTE_DEVICE ScaleReader(FwdStorage<Traits>& shared_, FwdDeviceParams const& p_)
      : shared(shared_), p(p_) {}

  CUTE_DEVICE void write_scales(int q_stage) {
    CUTE_NO_UNROLL
    for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
      copy_query_scales({p, shared.work[q_stage][wg]}, shared.q_scales[q_stage][wg]);
    }
    write_key_scales({p, shared.work[q_stage][0]});
    __syncwarp();
  }

 private:
  // Of the blocks of keys of a tile. By value: when its last K tile is there, `work` may be
  // overwritten.
  struct BlockScales {
    float const* k;  // null: all are 1
    float const* v;
    int last;

    CUTE_DEVICE BlockScales(TileScales<Traits> const& tile)
        : k(begin(tile, tile.p.k_scale)),
          v(begin(tile, tile.p.v_scale)),
          last(tile.last_key_block()) {}

    CUTE_DEVICE static float const* begin(TileScales<Traits> const& tile, ScaleView const& scales) {
      bool const is_read = scales.data != nullptr && tile.has_keys();
      return is_read ? scales.data + tile.first_of_keys(scales) : nullptr;
    }
  };

  // For each K tile, as K comes, by one lane: those of Q, too, are there with the first one. A
  // block is read while the one before is in use.
  CUTE_DEVICE void write_key_scales(TileScales<Traits> const& tile) {
    BlockScales const at(tile);
    int const keys_begin = tile.work.keys_begin();
    int n = tile.work.keys_end() - 1;
    int block = n / Traits::kScaleTiles;
    auto const read = [&](float const* first, ScaleView const& scales) {
      return first == nullptr ? 1.f : first[min_of(block, at.last) * scales.block_stride];
    };
    float next_k = read(at.k, p.k_scale);
    float next_v = read(at.v, p.v_scale);
    cute::cp_async_wait<0>();  // the scales of Q
    __syncwarp();
    if (!is_first_lane()) {
      return;
    }
    CUTE_NO_UNROLL
    while (n >= keys_begin) {
      float const v = at_least(next_v, kLeastScale);
      KeyScale const scale{at_least(next_k, kLeastScoreScale), log2_approx(v),
                           reciprocal_approx(v)};
      int const begin = max_of(keys_begin, block * Traits::kScaleTiles);
      block = max_of(block - 1, 0);
      next_k = read(at.k, p.k_scale);
      next_v = read(at.v, p.v_scale);
      CUTE_NO_UNROLL
      for (; n >= begin; --n) {
        shared.k_empty[k_ring.stage()].wait(k_ring.phase() ^ 1);
        shared.scales[scale_stage()] = scale;
        shared.k_full[k_ring.stage()].arrive();
        k_ring.advance();
      }
    }
  }

  // Of the ring of scales, which has two rounds of K's.
  CUTE_DEVICE int scale_stage() const {
    static_assert(Traits::kScaleStages == 2 * Traits::kStages);
    return k_ring.turn;
  }

  // Of one warpgroup; they are there after a wait. WHY not through registers: all scales of a tile
  // are on their way at the same time.
  CUTE_DEVICE void copy_query_scales(TileScales<Traits> const& tile,
                                     float (&of_rows)[kWarpgroupRows]) const {
    int const last = max_of(0, tile.work.place.lengths(p.seqlen).q - 1);
    bool const is_read = p.q_scale.data != nullptr && tile.has_keys();
    int64_t const first = tile.first_of_q();
#pragma unroll(Traits::kIsTight ? 1 : kWarpgroupRows / 32)
    for (int i = 0; i < kWarpgroupRows; i += 32) {
      int const row = i + lane_of_warp();
      int const offset = p.pack.div(row);
      int const head = row - offset * int(p.pack.divisor);
      int const position = clamp(tile.work.position_begin + offset, 0, last);
      int64_t const place = first + head * p.q_scale.head_in_pack_stride +
                            position / kScaleBlockQueries * p.q_scale.block_stride;
      if (is_read) {
        cute::SM80_CP_ASYNC_CACHEALWAYS<float>::copy(p.q_scale.data[place], of_rows[row]);
      } else {
        of_rows[row] = 1.f;
      }
    }
  }
};

}  // namespace fa3
