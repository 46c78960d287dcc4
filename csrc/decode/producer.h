// The producer, one warpgroup or two: finds the tiles of the CTA and copies their Q, K and V into
// shared memory with cp.async, 16 bytes per thread, in whole rows. Each row has its own address, so
// pages of any size cost the same. Rows that belong to no key of the sequence become zeros and are
// not read.
//
// WHY not TMA: its tensor copies reach 4.1 TB/s of an H200's 4.6 (docs/journal/cache.md).
#pragma once

#include "decode/latent_rows.h"
#include "forward/cache/cache_batch.h"
#include "forward/results.h"

namespace fa3 {

// Byte offsets of a row of K and V, if it belongs to a key of the sequence.
struct DecodeRowOffsets {
  int id;  // its entry in the cache, or one that does not exist
  int64_t k;
  int64_t v;
};

template <class Traits>
struct DecodeProducer {
  using Work = FwdWork<Traits>;
  using Params = typename Traits::Params;
  // A warp copies 32 rows of a K tile. A lane holds the offsets of one row and copies a chunk of 16
  // bytes of several rows.
  static constexpr int kElementBytes = int(sizeof(typename Traits::ElementKv));
  static constexpr int kChunks = Traits::kStageColumns * kElementBytes / 16;  // per row of a stage
  static constexpr int kRowsAtOnce = 32 / kChunks;
  static constexpr int kRowBytes = min_of(kChunks * 16, 128);  // per row of a slice
  static_assert(Traits::kIsLatent || Traits::kTileN == kWarpgroupThreads);

  DecodeStorage<Traits>& shared;
  Params const& p;
  DecodeTiles<Traits>& tiles;
  int thread;
  int chunk;
  int first_row;  // first of the warp's rows that this lane copies
  RingState<Traits::kStages> ring;
  RingState<Traits::kQStages> tile_ring;
  Work work;              // the next tile
  DecodeRowOffsets rows;  // this thread's row of its first K tile

  CUTE_DEVICE DecodeProducer(DecodeStorage<Traits>& shared_, Params const& p_,
                             DecodeTiles<Traits>& tiles_, int thread_)
      : shared(shared_),
        p(p_),
        tiles(tiles_),
        thread(thread_),
        chunk(thread_ % kChunks),
        first_row(thread_ % 32 / kChunks) {}

  // Finds the first tile. is_early: earlier launches may still run, and the first keys are
  // prefetched into L2.
  //
  // INVARIANT: all that this reads from global memory is read again once earlier launches have
  // ended, and nothing else is read or written before that.
  CUTE_DEVICE void find_first(bool is_early) {
    tiles.begin();
    find_next();
    write_work();
    if (!Traits::kIsLatent && is_early && work.valid() && exists(rows.id)) {
      prefetch_row(static_cast<char const*>(p.k_rows.data) + rows.k, p.row_bytes_k);
      prefetch_row(static_cast<char const*>(p.v_rows.data) + rows.v, p.row_bytes_v);
    }
  }

  // Returns whether find_first() would read the same entry now.
  CUTE_DEVICE bool reads_same() const {
    return !work.valid() || Traits::kIsLatent ||
           entry_of<true>(KeySource::of(work), slot_of(work.keys.first())) == rows.id;
  }

  CUTE_DEVICE void run() {
    allow_later_launches();
    while (work.valid()) {
      publish();
      load_tile();
      find_next();
      shared.work_empty[tile_ring.stage].wait(tile_ring.phase ^ 1);
      write_work();
    }
    publish();
    cute::cp_async_wait<0>();
    if (p.is_second) {
      wait_for_earlier_launches();
    }
  }

 private:
  CUTE_DEVICE void find_next() {
    work = tiles.next();
    if (!Traits::kIsLatent && work.valid()) {
      KeySource const keys = KeySource::of(work);
      int const slot = slot_of(work.keys.first());
      rows = offsets_of(keys, slot, entry_of<true>(keys, slot));
    }
  }

  CUTE_DEVICE void write_work() {
    if (thread == 0) {
      shared.work[tile_ring.stage] = work.valid() ? share_of_part<Traits>(p, work, 0) : work;
    }
  }

  CUTE_DEVICE void publish() {
    if (thread == 0) {
      shared.work_full[tile_ring.stage].arrive();
    }
  }

  // Loads Q, K and V of the tile. The page table is read one K tile ahead.
  CUTE_DEVICE void load_tile() {
    if constexpr (Traits::kConvertsLatents) {
      convert_latents();
      return;
    } else if constexpr (Traits::kIsLatent) {
      load_latents();
      return;
    }
    KeySource const keys = KeySource::of(work);
    bool is_first = true;
    CUTE_NO_UNROLL
    for (int n = work.keys.first(); n >= work.keys.last(); work.keys.advance(n)) {
      uint32_t const used = __ballot_sync(kWholeWarp, exists(rows.id));
      int const next_id =
          n > work.keys.last() ? entry_of<false>(keys, slot_of(work.keys.next(n))) : p.entries;
      CUTE_NO_UNROLL
      for (int part = 0; part < Traits::kParts; ++part) {
        shared.empty[ring.stage].wait(ring.phase ^ 1);
        if (is_first) {
          load_queries();
          is_first = false;
        }
        load<true>(keys, used, part);
      }
      CUTE_NO_UNROLL
      for (int part = 0; part < Traits::kPartsV; ++part) {
        shared.empty[ring.stage].wait(ring.phase ^ 1);
        load<false>(keys, used, part);
      }
      rows = offsets_of(keys, slot_of(work.keys.next(n)), next_id);
    }
    tile_ring.advance();
  }

  CUTE_DEVICE void load_latents() {
    KeyRange<Traits> const range = work.keys;
    KeyRows<Traits, kWarpgroupWarps> keys(p, KeySource::of(work), thread / 32);
    keys.read_ahead(range.tile(range.first()));
    bool is_first = true;
    CUTE_NO_UNROLL
    for (int n = range.first(); n >= range.last(); range.advance(n)) {
      keys.take(range.tile(n));
      if (n > range.last()) {
        keys.read_ahead(range.tile(range.next(n)));
      }
      shared.empty[ring.stage].wait(ring.phase ^ 1);
      if (is_first) {
        load_queries();
        is_first = false;
      }
      constexpr int kSliceBytes = Traits::kTileN * 128;
      keys.template copy_rows<1>(p.k_rows, 0, shared.keys[ring.stage]);
      keys.template copy_rows<2>(p.v_rows, 0, shared.keys[ring.stage] + kSliceBytes);
      arrive_after_copies(shared.full[ring.stage]);
      ring.advance();
      CUTE_NO_UNROLL
      for (int part = 1; part < Traits::kParts; ++part) {
        shared.empty[ring.stage].wait(ring.phase ^ 1);
        keys.template copy_rows<3>(p.v_rows, 3 * part - 1, shared.keys[ring.stage]);
        arrive_after_copies(shared.full[ring.stage]);
        ring.advance();
      }
    }
    tile_ring.advance();
  }

  CUTE_DEVICE void convert_latents() {
    load_queries();
    LatentRows<Traits>(shared, p, KeySource::of(work), thread).visit(work.keys, ring);
    tile_ring.advance();
  }

  // The slot of this thread's row in the K tile of visit n.
  CUTE_DEVICE int slot_of(int n) const { return work.keys.tile(n) * Traits::kTileN + thread; }

  // The cache entry that holds a slot. kIsEarly: earlier launches may still run, so the value must
  // not stay in L1.
  template <bool kIsEarly>
  CUTE_DEVICE int entry_of(KeySource const& keys, int slot) const {
    if (!keys.has(slot)) {
      return p.entries;
    }
    if (p.page_table == nullptr) {
      return keys.entry;
    }
    int const* const id = p.page_table + keys.sequence * p.table_stride + p.page_size.div(slot);
    return kIsEarly ? read_now(id) : *id;
  }

  CUTE_DEVICE bool exists(int id) const { return uint32_t(id) < uint32_t(p.entries); }

  // Offsets of a row. A missing row gets offsets inside the tensor too.
  CUTE_DEVICE DecodeRowOffsets offsets_of(KeySource const& keys, int slot, int id) const {
    int const row = p.page_table == nullptr ? keys.row + slot : p.page_size.mod(slot);
    int const entry = exists(id) ? id : 0;
    return {id, offset_of(p.k_rows, keys, row, entry), offset_of(p.v_rows, keys, row, entry)};
  }

  CUTE_DEVICE static int64_t offset_of(TensorView const& rows, KeySource const& keys, int row,
                                       int id) {
    return id * rows.batch_stride + row * rows.row_stride + keys.kv_head * rows.head_stride;
  }

  // Loads a part of K or V of a K tile. used: a bit for each row of the warp, set if it exists.
  template <bool kIsK>
  CUTE_DEVICE void load(KeySource const& keys, uint32_t used, int part) {
    constexpr int kAllChunks = (kIsK ? Traits::kHeadDim : Traits::kHeadDimV) * kElementBytes / 16;
    int const row_chunk = part * kChunks + chunk;
    bool const has_column = row_chunk * 16 < (kIsK ? p.row_bytes_k : p.row_bytes_v);
    char const* const data = static_cast<char const*>((kIsK ? p.k_rows : p.v_rows).data) +
                             (has_column ? row_chunk * 16 : 0);
    uint32_t const copied = has_column ? used >> first_row : 0;
    bool const is_stored = kAllChunks % kChunks == 0 || row_chunk < kAllChunks;
    bool const is_whole = (part + 1) * kChunks * 16 <= (kIsK ? p.row_bytes_k : p.row_bytes_v);
    if (used == kWholeWarp && is_whole) {
      copy_rows<kIsK, false>(data, copied, is_stored);
    } else {
      copy_rows<kIsK, true>(data, copied, is_stored);
    }
    if (Traits::kConverts && part == 0 && p.has_page_scales()) {
      load_key_scale<kIsK>(keys, rows.id);
    }
    arrive_after_copies(shared.full[ring.stage]);
    ring.advance();
  }

  // kMayLack: some rows do not exist or lack this chunk, and get zeros. WHY a path without zeros: a
  // copy with zeros holds its predicate until it has read it, and ptxas (13.0) used one predicate
  // for all copies. Without predicates, 64 sequences of 128 to 16k keys take 182 us instead of 190,
  // and together with 4 prompts of 512 queries 280 us instead of 359 (H200, 2026-11-27).
  template <bool kIsK, bool kMayLack>
  CUTE_DEVICE void copy_rows(char const* data, uint32_t copied, bool is_stored) {
    uint32_t const to = cute::cast_smem_ptr_to_uint(shared.keys[ring.stage]) + target();
    CUTE_UNROLL
    for (int i = 0; i < 32; i += kRowsAtOnce) {
      int64_t const row_offset = __shfl_sync(kWholeWarp, kIsK ? rows.k : rows.v, i + first_row);
      uint32_t const own = (to ^ swizzle_of(i)) + i * kRowBytes;
      if (!kMayLack) {
        copy_chunk(own, data + row_offset);
      } else if (is_stored) {
        copy_chunk(own, data + row_offset, (copied >> i & 1) != 0);
      }
    }
  }

  // The offset in a stage of this lane's chunk of its first row. Slices have 128 or 64 bytes.
  CUTE_DEVICE uint32_t target() const {
    int const row = thread / 32 * 32 + first_row;
    if constexpr (kChunks == 4) {
      return uint32_t(row * 64 + (chunk ^ row / 2 % 4) * 16);
    } else {
      return uint32_t(chunk_offset_bytes<Traits::kTileN>(row, chunk));
    }
  }

  // The XOR between the swizzles of rows r and r + i. The swizzle repeats every 8 rows.
  CUTE_DEVICE static constexpr uint32_t swizzle_of(int i) {
    return uint32_t(kChunks == 4 ? 0 : i % 8 * 16);
  }

  // Loads the page scale of this thread's key, or 0 if the key does not exist, as for its K and V.
  template <bool kIsK>
  CUTE_DEVICE void load_key_scale(KeySource const& keys, int id) {
    if constexpr (Traits::kConverts) {
      ScaleView const& scales = kIsK ? p.k_page_scale : p.v_page_scale;
      copy_float(&shared.key_scales[ring.stage][thread],
                 scales.data + keys.kv_head * scales.head_stride +
                     (exists(id) ? id : 0) * scales.batch_stride,
                 exists(id));
    }
  }

  // Prefetches a row into L2, a line of 128 bytes at a time.
  CUTE_DEVICE static void prefetch_row(char const* row, int bytes) {
    CUTE_NO_UNROLL
    for (int i = 0; i < bytes; i += 128) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(row + i));
    }
  }

  // Loads the rows of Q that exist and the scales of the tile.
  CUTE_DEVICE void load_queries() {
    int const chunks = p.row_bytes_q / 16;
    constexpr int kRowChunks = (Traits::kHeadDim + Traits::kIsLatent * Traits::kHeadDimV) / 8;
    int const rows = rows_of_tile(p, work.rows);
    uint32_t const to = cute::cast_smem_ptr_to_uint(shared.q[tile_ring.stage]);
    bool const is_packed = p.has_packed_queries();
    auto const data_of = [&](TensorView const& q) {
      return static_cast<char const*>(q.data) + (is_packed ? 0 : work.entry) * q.batch_stride +
             (is_packed ? work.location.q_end - work.location.len.q : 0) * q.row_stride;
    };
    CUTE_NO_UNROLL
    for (int i = thread; i < rows * kRowChunks; i += Traits::kProducerThreads) {
      int const row = i / kRowChunks;
      int const row_chunk = i % kRowChunks;
      RowOfTile const at = row_of_tile(p, work.rows, row);
      bool const is_latent = Traits::kIsLatent && row_chunk >= chunks;
      TensorView const& q = is_latent ? p.qv_rows : p.q_rows;
      char const* const from = data_of(q) + (work.position_begin + at.offset) * q.row_stride +
                               (work.rows.head + at.head) * q.head_stride;
      bool const is_read = is_latent || row_chunk < chunks;
      int const chunk_of_row = is_latent ? row_chunk - chunks : row_chunk;
      copy_chunk(to + chunk_offset_bytes<Traits::kQRows>(row, row_chunk),
                 from + (is_read ? chunk_of_row * 16 : 0), is_read);
    }
    if constexpr (Traits::kConverts) {
      load_tile_scales();
    }
  }

  CUTE_DEVICE void load_tile_scales() {
    if constexpr (Traits::kConverts) {
      DecodeScales& scales = shared.tile_scales[tile_ring.stage];
      if (thread == 0) {
        load_tile_scale(&scales.k, p.k_scale);
      } else if (thread == 1) {
        load_tile_scale(&scales.v, p.v_scale);
      }
    }
  }

  // Loads a scale of the tile. Without one the consumers use 1.
  CUTE_DEVICE void load_tile_scale(float* target, ScaleView const& scale) const {
    if (scale.data != nullptr) {
      int const batch = min_of(work.entry, p.scale_batches - 1);
      copy_float(target, scale.data + batch * scale.batch_stride + work.kv_head * scale.head_stride,
                 true);
    }
  }
};

}  // namespace fa3
