// The rows of an e4m3 latent cache. Each producer thread copies chunks of the next K tile to a
// buffer of its own, and stores those of this one, times the scales of their keys, as 16-bit
// columns in the stages that a 16-bit cache has.
//
// WHY not loads to registers: ptxas (13.0) tracks nearly all of them by one scoreboard, so each
// part waits for the latest loads. 128 queries of 16 heads and 2048 keys took 136 us instead of 108
// (H200, 2026-11-28; by one producer warpgroup, which two make 102).
#pragma once

#include "decode/storage.h"
#include "device/async_copy.h"
#include "forward/cache/keys_converted.h"

namespace fa3 {

// Four lanes hold a row. A quad is 64 latent columns: a chunk of 16 bytes of each lane, which
// becomes two chunks of a slice of a stage.
template <class Traits>
struct LatentRows : KeyRows<Traits, Traits::kProducerThreads / 32, 4> {
  using Base = KeyRows<Traits, Traits::kProducerThreads / 32, 4>;
  using Element = typename Traits::Element;
  static constexpr int kRows = Base::kRowsOfLane;
  static constexpr int kQuads = Traits::kHeadDimV / 64;
  static constexpr int kSliceBytes = Traits::kTileN * 128;
  // Slices of 64 columns in a stage. The first slice of a K tile holds the rotary columns.
  static constexpr int kSlices = Traits::kStageColumns / 64;
  static constexpr int kRotaryChunks = 2;  // chunks that a lane copies for each row
  static_assert(kQuads == 2 * Base::kLanesOfRow, "a lane has the scale of 128 columns of its row");

  DecodeStorage<Traits>& shared;
  int thread;
  int target;                  // this lane's first row in a slice of a stage, in bytes
  int first_half;              // in the row: the first of the two chunks that a chunk becomes
  int rotary;                  // in the row: the first rotary chunk
  char const* latents[kRows];  // rows of the K tile that is copied; nullptr: no key
  // A lane holds the scale of 128 of the columns of its rows: in the K tile that is stored, and in
  // the one that is copied.
  float scales[kRows];
  float next_scales[kRows];

  CUTE_DEVICE LatentRows(DecodeStorage<Traits>& shared_, typename Traits::Params const& p,
                         KeySource const& from, int thread_)
      : Base(p, from, thread_ / 32),
        shared(shared_),
        thread(thread_),
        target(this->first * 128),
        first_half((2 * lane() ^ this->first % 8) * 16),
        rotary((lane() ^ this->first % 8) * 16) {}

  // Fills the stages of all K tiles of a range. When a part of a K tile has been stored, that of
  // the next K tile is copied to its place.
  CUTE_DEVICE void visit(KeyRange<Traits> const range, RingState<Traits::kStages>& ring) {
    this->read_ahead(range.tile(range.first()));
    take(range.tile(range.first()));
    copy<0>(true);
    copy<1>(true);
    copy<2>(true);
    if (range.first() > range.last()) {
      this->read_ahead(range.tile(range.next(range.first())));
    }
    CUTE_NO_UNROLL
    for (int n = range.first(); n >= range.last(); range.advance(n)) {
      bool const has_next = n > range.last();
      begin_tile();
      if (has_next) {
        int const next = range.next(n);
        take(range.tile(next));
        if (next > range.last()) {
          this->read_ahead(range.tile(range.next(next)));
        }
      }
      fill<0>(ring, has_next);
      fill<1>(ring, has_next);
      fill<2>(ring, has_next);
    }
    cute::cp_async_wait<0>();
  }

 private:
  template <int kPart>
  CUTE_DEVICE void fill(RingState<Traits::kStages>& ring, bool has_next) {
    shared.empty[ring.stage].wait(ring.phase ^ 1);
    store<kPart>(shared.keys[ring.stage]);
    fence_shared_for_async_proxy();  // it also waits for the copies that are under way
    shared.full[ring.stage].arrive();
    ring.advance();
    copy<kPart>(has_next);
  }

  // The rows of the K tile that was read ahead become those that are copied.
  CUTE_DEVICE void take(int tile) {
    Base::take(tile);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      latents[i] = this->row(this->p.v_rows, i);
      next_scales[i] = scale_of(i);
    }
  }

  // The K tile that was copied is stored from now on.
  CUTE_DEVICE void begin_tile() {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      scales[i] = next_scales[i];
    }
  }

  // A group of copies, without any if there is no further K tile.
  template <int kPart>
  CUTE_DEVICE void copy(bool has_tile) {
    int at = first_chunk(kPart);
    CUTE_UNROLL
    for (int i = 0; has_tile && i < kRows; ++i) {
      CUTE_UNROLL
      for (int quad = first_quad(kPart); quad < first_quad(kPart + 1); ++quad) {
        copy_one(at++, latents[i], 4 * quad + lane());
      }
      char const* const rotary = kPart == 0 ? this->row(this->p.k_rows, i) : nullptr;
      CUTE_UNROLL
      for (int chunk = 0; kPart == 0 && chunk < kRotaryChunks; ++chunk) {
        copy_one(at++, rotary, 4 * chunk + lane());
      }
    }
    cute::cp_async_fence();
  }

  // Stores a part of a K tile. The copies of two later parts may be under way. WHY all chunks are
  // read before the first is stored: ptxas does not read ahead of a store.
  template <int kPart>
  CUTE_DEVICE void store(char* stage) const {
    constexpr int kFirst = first_chunk(kPart);
    constexpr int kChunks = first_chunk(kPart + 1) - kFirst;
    cute::cp_async_wait<2>();
    uint4 raw[kChunks];
    CUTE_UNROLL
    for (int at = 0; at < kChunks; ++at) {
      raw[at] = shared.raw[kFirst + at][thread];
    }
    int at = 0;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      char* const row = stage + target + i * Base::kRowsAtOnce * 128;
      CUTE_UNROLL
      for (int quad = first_quad(kPart); quad < first_quad(kPart + 1); ++quad) {
        float const scale = __shfl_sync(kWholeWarp, scales[i], quad / 2, Base::kLanesOfRow);
        ConvertedChunks<Element> const wide(raw[at++], Factor{scale});
        char* const slice = row + (quad + 1) % kSlices * kSliceBytes;
        *reinterpret_cast<uint4*>(slice + first_half) = wide.halves[0];
        *reinterpret_cast<uint4*>(slice + (first_half ^ 16)) = wide.halves[1];
      }
      CUTE_UNROLL
      for (int chunk = 0; kPart == 0 && chunk < kRotaryChunks; ++chunk) {
        *reinterpret_cast<uint4*>(row + (rotary ^ chunk * 64)) = raw[at++];
      }
    }
  }

  // Slice i of a K tile holds the columns of quad i - 1.
  static constexpr int first_quad(int part) { return clamp(part * kSlices - 1, 0, kQuads); }
  static constexpr int first_chunk(int part) {
    return kRows * (first_quad(part) + (part > 0 ? kRotaryChunks : 0));
  }

  CUTE_DEVICE int lane() const { return thread % Base::kLanesOfRow; }

  // Copies a chunk of a row, or zeros.
  CUTE_DEVICE void copy_one(int at, char const* row, int chunk) {
    bool const is_read = row != nullptr;
    char const* const from = is_read ? row : static_cast<char const*>(this->p.v_rows.data);
    copy_chunk(cute::cast_smem_ptr_to_uint(&shared.raw[at][thread]),
               from + (is_read ? chunk * 16 : 0), is_read);
  }

  CUTE_DEVICE float scale_of(int i) const {
    ScaleView const& view = this->p.key_scale;
    if (view.data == nullptr) {
      return 1.f;
    }
    auto const [entry, row] = this->place(i);
    return latents[i] == nullptr ? 0.f
                                 : view.data[entry * view.batch_stride + row * view.head_stride +
                                             lane() * view.block_stride];
  }
};

}  // namespace fa3
