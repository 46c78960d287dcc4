// ScalesKind: no scales; or scales of q, k and v by block (64 rows of q, kScaleBlockKeys rows of k
// and v), or per (sequence, KV head), where the stride of a block is 0. A block of keys consists of
// whole K tiles, so that a K tile has one scale. The scale warp reads them (ScaleReader).
// With HeadScales only k and v have scales, per (sequence, KV head); the producer reads them with
// each tile.
#pragma once

#include "forward/fp8/compact_ring.h"
#include "device/fragments.h"
#include "device/math.h"
#include "forward/softmax.h"
#include "forward/storage.h"

namespace fa3 {

// This power of two moves P into the range of e4m3.
constexpr int kOffsetLog2 = 8;

// Smaller scales of v are raised to this: with 0 the maximum of a row would be meaningless. The
// square of the bound is still a float.
constexpr float kLeastScale = 1e-30f;

// Smaller scales of k, and of q times the softmax scale, are raised to this. WHY: a masked score is
// -inf, so its factor must not be flushed to 0.
constexpr float kLeastScoreScale = 0x1p-60f;

CUTE_DEVICE float at_least(float scale, float least) {
  return scale < least ? least : scale;  // NaN stays NaN
}

// Scales of this thread's two rows.
CUTE_DEVICE void read_query_scales(float const (&of_rows)[kWarpgroupRows], int thread,
                                   float (&scales)[2]) {
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    scales[r] = of_rows[fragment_row(thread) + 8 * r];
  }
}

// ScalesKind::kNone, consumer side.
template <class Traits>
struct NoScales {
  CUTE_DEVICE NoScales(FwdStorage<Traits>&, typename Traits::Params const&) {}

  // By the producer, with each tile.
  CUTE_DEVICE static void publish(FwdStorage<Traits>&, typename Traits::Params const&,
                                  FwdWork<Traits> const&, int, int) {}

  template <class Ring>
  CUTE_DEVICE void wait_for_queries(Ring const&) const {}

  template <class Softmax>
  CUTE_DEVICE void start_rows(Softmax& softmax, int, int, int) const {
    softmax.reset();
  }

  CUTE_DEVICE NoScale take() { return NoScale{}; }
  CUTE_DEVICE void skip() {}
};

// ScalesKind::kBlocks, consumer side.
template <class Traits>
struct BlockScales {
  FwdStorage<Traits>& shared;
  RingState<Traits::kScaleStages> ring;  // advances with each K tile

  CUTE_DEVICE BlockScales(FwdStorage<Traits>& shared_, typename Traits::Params const&)
      : shared(shared_) {}

  CUTE_DEVICE static void publish(FwdStorage<Traits>&, typename Traits::Params const&,
                                  FwdWork<Traits> const&, int, int) {}

  // The scales of Q arrive with the first K tile.
  template <class Ring>
  CUTE_DEVICE void wait_for_queries(Ring const& k_ring) const {
    shared.k_full[k_ring.stage].wait(k_ring.phase);
  }

  template <class Softmax>
  CUTE_DEVICE void start_rows(Softmax& softmax, int q_stage, int warpgroup, int thread) const {
    float scales[2];
    read_query_scales(shared.q_scales[q_stage][warpgroup], thread, scales);
    softmax.reset(scales);
  }

  // The scales of the next K tile, which have arrived. With a softcap a reference: there are not
  // enough registers to keep them from the scores to the sums.
  CUTE_DEVICE decltype(auto) take() {
    using Scale = cute::conditional_t<Traits::kKind.has_softcap(), KeyScale const&, KeyScale>;
    int const stage = ring.stage;
    ring.advance();
    return static_cast<Scale>(shared.scales[stage]);
  }

  CUTE_DEVICE void skip() { ring.advance(); }
};

// ScalesKind::kHeads, both sides.
template <class Traits>
struct HeadScales : NoScales<Traits> {
  using Params = typename Traits::Params;

  FwdStorage<Traits>& shared;
  float scale_log2;

  CUTE_DEVICE HeadScales(FwdStorage<Traits>& shared_, Params const& p)
      : NoScales<Traits>(shared_, p), shared(shared_), scale_log2(p.scale_log2) {}

  CUTE_DEVICE static void publish(FwdStorage<Traits>& shared, Params const& p,
                                  FwdWork<Traits> const& work, int q_stage, int warpgroup) {
    shared.head_scales[q_stage][warpgroup] = {
        at_least(scale_of(p.k_scale, p, work), kLeastScoreScale), scale_of(p.v_scale, p, work)};
  }

  template <class Softmax>
  CUTE_DEVICE void start_rows(Softmax& softmax, int q_stage, int warpgroup, int) const {
    HeadScale const scale = shared.head_scales[q_stage][warpgroup];
    softmax.reset();
    softmax.key_scale = scale.k;
    softmax.value_scale = scale.v;
    softmax.scale_log2 = Traits::kKind.has_softcap() ? scale_log2 : scale_log2 * scale.k;
  }

 private:
  CUTE_DEVICE static float scale_of(ScaleView const& view, Params const& p,
                                    FwdWork<Traits> const& work) {
    int const batch = min_of(work.entry, p.scale_batches - 1);
    return view.data == nullptr
               ? 1.f
               : view.data[batch * view.batch_stride + work.kv_head * view.head_stride];
  }
};

// Finds the scales of a tile. Rows of no sequence are entries after those of the batch, without
// keys. WHY functions: registers are short, so each value is computed where it is needed.
template <class Traits>
struct TileScales {
  FwdDeviceParams const& p;
  FwdWork<Traits> const& work;

  // Whether the sequence has keys. If not, no scale is read, whatever the rows are.
  CUTE_DEVICE bool has_keys() const { return last_key_block() >= 0; }

  // Index of the last block of keys of the sequence; -1: none.
  CUTE_DEVICE int last_key_block() const {
    return ceil_div(max_of(0, work.location.lengths(p.seqlen).k), kScaleBlockKeys) - 1;
  }

  CUTE_DEVICE int64_t first_of_q() const {
    int const head = p.q_scale.by_kv_head ? work.kv_head : work.rows.head;
    // Dense: batch_stride separates the blocks of sequences.
    int const begin = is_packed() ? first_row_of_sequence(p, work) : -1;
    return first_scale(p.q_scale, head, begin, kScaleBlockQueries);
  }

  // scales: those of k or v.
  CUTE_DEVICE int64_t first_of_keys(ScaleView const& scales) const {
    int const keys = work.location.lengths(p.seqlen).k;
    int const begin = is_packed() ? max_of(0, work.location.end_k() - keys) : -1;
    return first_scale(scales, work.kv_head, begin, kScaleBlockKeys);
  }

 private:
  CUTE_DEVICE bool is_packed() const { return !Traits::kKind.is_dense() && p.is_packed(); }

  CUTE_DEVICE int64_t first_scale(ScaleView const& scales, int head, int first_row,
                                  int rows_of_block) const {
    int const batch = min_of(work.entry, p.scale_batches - 1);
    int64_t const first = batch * scales.batch_stride + head * scales.head_stride;
    return first + (first_row / rows_of_block + (first_row < 0 ? 0 : batch)) * scales.block_stride;
  }
};

// Loads the scales of a tile into shared memory, ahead of the consumers. A whole warp runs this.
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
  // Scales of the blocks of keys of a tile. WHY by value: once the last K tile has arrived, `work`
  // may be overwritten.
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

  // Writes the scales of each K tile once its stage is empty, by one lane. The scales of Q are
  // complete with the first K tile. The scales of a block are read while those of the block before
  // are in use.
  CUTE_DEVICE void write_key_scales(TileScales<Traits> const& tile) {
    BlockScales const at(tile);
    KeyRange<Traits> const keys = tile.work.all_keys();
    int n = keys.first();
    int block = keys.tile(n) / Traits::kScaleTiles;
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
    while (n >= keys.last()) {
      float const v = at_least(next_v, kLeastScale);
      KeyScale const scale{at_least(next_k, kLeastScoreScale), log2_approx(v),
                           reciprocal_approx(v)};
      int const begin = last_visit(keys, n, block);
      block = block_after(keys, begin, block);
      next_k = read(at.k, p.k_scale);
      next_v = read(at.v, p.v_scale);
      CUTE_NO_UNROLL
      for (; n >= begin; keys.advance(n)) {
        shared.k_empty[k_ring.stage()].wait(k_ring.phase() ^ 1);
        shared.scales[scale_stage()] = scale;
        shared.k_full[k_ring.stage()].arrive();
        k_ring.advance();
      }
    }
  }

  // The last visit, from n on, whose keys have the scales of this block. Entries of a list do not
  // follow the order of blocks, so the scales are read for each.
  CUTE_DEVICE static int last_visit(BlockRange const& keys, int, int block) {
    return max_of(keys.last(), block * Traits::kScaleTiles);
  }
  CUTE_DEVICE static int last_visit(KeyList const&, int n, int) { return n; }

  CUTE_DEVICE static int block_after(BlockRange const&, int, int block) {
    return max_of(block - 1, 0);
  }
  CUTE_DEVICE static int block_after(KeyList const& keys, int n, int) {
    return keys.tile(max_of(n - 1, keys.last())) / Traits::kScaleTiles;
  }

  // The ring of scales has twice as many stages as the ring of K.
  CUTE_DEVICE int scale_stage() const {
    static_assert(Traits::kScaleStages == 2 * Traits::kStages);
    return k_ring.index;
  }

  // Copies the scales of the rows of one warpgroup; the caller waits for them. WHY not through
  // registers: all scales of a tile are loaded at the same time.
  CUTE_DEVICE void copy_query_scales(TileScales<Traits> const& tile,
                                     float (&of_rows)[kWarpgroupRows]) const {
    int const last = max_of(0, tile.work.location.lengths(p.seqlen).q - 1);
    bool const is_read = p.q_scale.data != nullptr && tile.has_keys();
    int64_t const first = tile.first_of_q();
#pragma unroll(Traits::kIsTight ? 1 : kWarpgroupRows / 32)
    for (int i = 0; i < kWarpgroupRows; i += 32) {
      int const row = i + lane_of_warp();
      int const offset = p.pack.div(row);
      int const head = row - offset * int(p.pack.divisor);
      int const position = clamp(tile.work.position_begin + offset, 0, last);
      int64_t const at = first + head * p.q_scale.head_in_pack_stride +
                         position / kScaleBlockQueries * p.q_scale.block_stride;
      if (is_read) {
        cute::SM80_CP_ASYNC_CACHEALWAYS<float>::copy(p.q_scale.data[at], of_rows[row]);
      } else {
        of_rows[row] = 1.f;
      }
    }
  }
};

}  // namespace fa3
