// The rows of a CTA: on their way from x through shared memory to registers, kept in shared memory,
// and where their values go. Each warp has its own rows and its own part of shared memory.
#pragma once

#include "quantize/fragment.h"
#include "quantize/quantize.h"

namespace fa3 {

constexpr int kTilesAhead = 3;  // warp tiles of a warp whose copies are under way

// 16 bytes from global to shared memory, without L1.
CUTE_DEVICE void copy_quad(uint4* target, void const* source) {
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(uint32_t(__cvta_generic_to_shared(target))),
      "l"(__cvta_generic_to_global(source))
      : "memory");
}

CUTE_DEVICE void end_group_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kLater>
CUTE_DEVICE void wait_for_all_groups_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}

// WHY asm: the compiler would keep values derived from the thread index in registers from piece to
// piece, and spill.
CUTE_DEVICE int read_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  __builtin_assume(thread >= 0 && thread < 1024);
  return thread;
}

// A warp has one of as many warp tiles as the CTA has warps, of each piece.
template <int kWidth>
struct PieceOfWarp {
  static constexpr int kLanes = lanes_of_piece(kWidth);
  static constexpr int kRows = rows_of_warp(kWidth);

  int start;  // column
  int thread;

  CUTE_DEVICE int lane() const { return thread % 32; }
  CUTE_DEVICE int first_row() const { return thread / 32 * kRows; }
  CUTE_DEVICE int row_step() const { return int(blockDim.x) / 32 * kRows; }
  // The row and the first column of a lane.
  CUTE_DEVICE int row(int lane) const { return lane / kLanes; }
  CUTE_DEVICE int column(int lane) const {
    return start + column_of_lane(kWidth, lane % kLanes, 0);
  }
};

template <class Element, bool kIsRotated>
class TileRows {
  template <int kWidth>
  using Fragment = std::conditional_t<kIsRotated, RotatedFragment<Element, kWidth>,
                                      PlainFragment<Element, kWidth>>;

 public:
  using Tile = WarpTile<kLaneColumns* int(sizeof(Element)) / int(sizeof(uint4))>;

 private:
  // The warp tiles of this warp in shared memory, in the order of their use. Where there are fewer
  // than the warp has rows for, the first one follows the last one.
  struct Ring {
    Tile* tile;
    Tile* end;

    CUTE_DEVICE explicit Ring(int tiles) {
      extern __shared__ __align__(128) char memory[];
      tile = reinterpret_cast<Tile*>(memory) + int(threadIdx.x) / 32 * tiles;
      end = tile + tiles;
    }

    CUTE_DEVICE void advance(int tiles) {
      ++tile;
      tile = tile == end ? end - tiles : tile;
    }
  };

  QuantizeParams const& p_;
  int used_;
  int written_;
  Element const* source_;  // of the tile's first value
  uint8_t* target_;
  int kv_head_;

  // Copies of x to the warp tiles of a piece, one tile after the other.
  template <int kWidth>
  struct Copies {
    static constexpr int kLanes = PieceOfWarp<kWidth>::kLanes;
    static constexpr int kQuadColumns = 16 / int(sizeof(Element));
    static constexpr int kQuads = kColumnsOf<kWidth> / kQuadColumns;  // of a fragment

    Element const* source;
    int row;  // the warp's first

    CUTE_DEVICE Copies(TileRows const& rows, PieceOfWarp<kWidth> const& piece)
        : row(piece.first_row()) {
      auto const [fragment, quad] = quad_of_lane(kQuads, 0, piece.lane());
      source = rows.source_ + (row + piece.row(fragment)) * rows.p_.x.row_stride +
               piece.column(fragment) + quad * kQuadColumns;
    }

    // A group of copies, which is empty after the last row that counts.
    CUTE_DEVICE void start(TileRows const& rows, PieceOfWarp<kWidth> const& piece, Tile& tile) {
      CUTE_UNROLL
      for (int i = 0; i < kQuads; ++i) {
        auto const [fragment, quad] = quad_of_lane(kQuads, i, piece.lane());
        // From the first copy: the odd lane's fragment, later quads.
        int const next_row = kLanes == 1 && kQuads > 1 ? i % 2 : 0;
        int const next_span = kLanes == 1 ? 0 : i % 2 * kSpanColumns;
        int const column = column_of_lane(kWidth, 0, (i - i % 2) * kQuadColumns) + next_span;
        if (row + piece.row(fragment) < rows.used_) {
          copy_quad(tile.quads + quad_index(fragment, quad),
                    source + next_row * rows.p_.x.row_stride + column);
        }
      }
      end_group_of_copies();
      source += piece.row_step() * rows.p_.x.row_stride;
      row += piece.row_step();
    }
  };

 public:
  CUTE_DEVICE TileRows(QuantizeParams const& p, QuantizeWork const& work)
      : p_(p),
        used_(work.tile.used),
        written_(work.tile.written),
        kv_head_(p.shape.by_group.div(work.head)) {
    QuantizeShape const& s = p.shape;
    int64_t const entry = s.is_packed ? 0 : work.tile.entry;
    int64_t const row = work.tile.begin;
    source_ = static_cast<Element const*>(p.x.data) + entry * p.x.batch_stride +
              row * p.x.row_stride + work.head * p.x.head_stride;
    target_ = p.values + ((entry * s.rows + row) * s.heads + work.head) * s.head_dim;
  }

  // Calls use(fragment, piece, row, warp tile) for each row that counts.
  template <class Use>
  CUTE_DEVICE void load(Use const& use) const {
    Ring filled(p_.tiles_of_warp);
    Ring read = filled;
    for_each_piece([&]<int kWidth>(PieceOfWarp<kWidth> const& piece) {
      typename Fragment<kWidth>::Signs const signs(p_.mixed_seed, kv_head_,
                                                   piece.column(piece.lane()));
      Copies<kWidth> copies(*this, piece);
      filled = read;
#pragma unroll 1
      for (int i = 0; i < kTilesAhead; ++i) {
        copies.start(*this, piece, *filled.tile);
        filled.advance(p_.tiles_of_warp);
      }
#pragma unroll 1
      for (int row = piece.first_row(); row < used_; row += piece.row_step()) {
        wait_for_all_groups_but<kTilesAhead - 1>();
        __syncwarp();
        RawFragment<Element, kWidth> raw;
        read.tile->read(raw.words);
        __syncwarp();
        copies.start(*this, piece, *filled.tile);
        filled.advance(p_.tiles_of_warp);
        // Lanes without a row go on with their warp, because lanes exchange values.
        Fragment<kWidth> fragment;
        fragment.take(raw, signs);
        if (row + piece.row(piece.lane()) < used_) {
          use(fragment, piece, row + piece.row(piece.lane()), *read.tile);
        }
        read.advance(p_.tiles_of_warp);
      }
    });
  }

  // The same of fragments that were kept.
  template <class Use>
  CUTE_DEVICE void restore(Use const& use) const {
    Ring kept(p_.tiles_of_warp);
    for_each_piece([&]<int kWidth>(PieceOfWarp<kWidth> const& piece) {
      int const in_tile = piece.row(piece.lane());
#pragma unroll 1
      for (int row = piece.first_row(); row < used_; row += piece.row_step()) {
        Fragment<kWidth> fragment;
        fragment.restore(*kept.tile);
        if (row + in_tile < used_) {
          use(fragment, piece, row + in_tile, *kept.tile);
        }
        kept.advance(p_.tiles_of_warp);
      }
    });
  }

  template <int kWidth>
  CUTE_DEVICE void store(CastFragment<kWidth> const& values, PieceOfWarp<kWidth> const& piece,
                         int row) const {
    values.store(target_of(row) + piece.column(piece.lane()),
                 p_.shape.head_dim % kSpanColumns == 0);
  }

  // Rows that do not count.
  CUTE_DEVICE void store_zeros() const {
    int const chunks = p_.shape.head_dim / kChunkColumns;
    int const end = (written_ - used_) * chunks;
    for (int i = int(threadIdx.x); i < end; i += int(blockDim.x)) {
      uint8_t* const row = target_of(used_ + i / chunks);
      reinterpret_cast<uint2*>(row)[i % chunks] = make_uint2(0, 0);
    }
  }

 private:
  CUTE_DEVICE uint8_t* target_of(int row) const {
    return target_ + row * (int64_t(p_.shape.heads) * p_.shape.head_dim);
  }

  // From the widest to the narrowest.
  template <class Run>
  CUTE_DEVICE void for_each_piece(Run const& run) const {
    int start = 0;
    auto const run_width = [&]<int kWidth>(std::integral_constant<int, kWidth>) {
      if ((p_.shape.head_dim & kWidth) != 0) {
        run(PieceOfWarp<kWidth>{start, read_thread()});
        start += kWidth;
      }
    };
    run_width(std::integral_constant<int, 256>());
    run_width(std::integral_constant<int, 128>());
    run_width(std::integral_constant<int, 64>());
    run_width(std::integral_constant<int, 32>());
    run_width(std::integral_constant<int, 16>());
    run_width(std::integral_constant<int, 8>());
  }
};

}  // namespace fa3
