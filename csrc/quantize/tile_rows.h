// The rows of a CTA: loads of their fragments from x or shared memory, and stores of their values.
#pragma once

#include "quantize/fragment.h"
#include "quantize/quantize.h"

namespace fa3 {

// Fragments that wait in shared memory for the scale of their block. A thread reads only what it
// wrote. Quads of 16 bytes are ordered (quad, fragment), so that adjacent lanes use adjacent banks.
class Stash {
  uint4* quads_;
  float* units_;
  int fragments_;

 public:
  template <class Element, bool kIsRotated>
  static constexpr int kQuads =
      kLaneColumns * (kIsRotated ? 2 : int(sizeof(Element))) / int(sizeof(uint4));

  template <class Element, bool kIsRotated>
  static constexpr int kFragmentBytes =
      kQuads<Element, kIsRotated> * int(sizeof(uint4)) + (kIsRotated ? int(sizeof(float)) : 0);

  CUTE_DEVICE Stash(char* memory, int fragments, int quads)
      : quads_(reinterpret_cast<uint4*>(memory)),
        units_(reinterpret_cast<float*>(quads_ + quads * fragments)),
        fragments_(fragments) {}

  template <class Element, int kWidth>
  CUTE_DEVICE void write(RotatedFragment<Element, kWidth> const& fragment, int number) const {
    write_words(fragment.words, number);
    units_[number] = fragment.unit;
  }

  template <class Element, int kWidth>
  CUTE_DEVICE void write(PlainFragment<Element, kWidth> const& fragment, int number) const {
    write_words(fragment.raw.words, number);
  }

  template <class Element, int kWidth>
  CUTE_DEVICE void read(RotatedFragment<Element, kWidth>& fragment, int number) const {
    read_words(fragment.words, number);
    fragment.unit = units_[number];
  }

  template <class Element, int kWidth>
  CUTE_DEVICE void read(PlainFragment<Element, kWidth>& fragment, int number) const {
    read_words(fragment.raw.words, number);
  }

 private:
  template <int kWords>
  CUTE_DEVICE void write_words(uint32_t const (&words)[kWords], int number) const {
    CUTE_UNROLL
    for (int i = 0; i < kWords; i += 4) {
      quads_[i / 4 * fragments_ + number] =
          make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
    }
  }

  template <int kWords>
  CUTE_DEVICE void read_words(uint32_t (&words)[kWords], int number) const {
    CUTE_UNROLL
    for (int i = 0; i < kWords; i += 4) {
      uint4 const quad = quads_[i / 4 * fragments_ + number];
      words[i] = quad.x;
      words[i + 1] = quad.y;
      words[i + 2] = quad.z;
      words[i + 3] = quad.w;
    }
  }
};

// The fragments of this thread in a piece of kWidth columns, in rows `row`, `row` + `step`, ...
template <int kWidth>
struct PieceOfThread {
  static constexpr int kLanes = lanes_of_piece(kWidth);

  int column;     // first column of the lane
  int row;        // in the tile
  int warp_row;   // the first row of the warp
  int step;       // rows
  int fragments;  // in the stash, before this piece

  // Index of a fragment in the stash.
  CUTE_DEVICE int number(int tile_row) const {
    return fragments + tile_row * kLanes + int(threadIdx.x) % kLanes;
  }
};

template <class Element, bool kIsRotated>
class TileRows {
  template <int kWidth>
  using Fragment = std::conditional_t<kIsRotated, RotatedFragment<Element, kWidth>,
                                      PlainFragment<Element, kWidth>>;
  QuantizeParams const& p_;
  int used_;
  int written_;
  Element const* source_;  // the tile's first value
  uint8_t* target_;
  int kv_head_;

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

  // Loads fragments from x and calls use(fragment, piece, row) for each used row.
  template <class Use>
  CUTE_DEVICE void load(Use const& use) const {
    for_each_piece([&]<int kWidth>(PieceOfThread<kWidth> const& piece) {
      typename Fragment<kWidth>::Signs const signs(p_.mixed_seed, kv_head_, piece.column);
      Element const* source = source_ + piece.row * p_.x.row_stride + piece.column;
      RawFragment<Element, kWidth> next{};
      if (piece.row < used_) {
        next.load(source);
      }
      // Lanes without a row stay with their warp, because lanes exchange values.
      int row = piece.row;
#pragma unroll 1
      for (int first = piece.warp_row; first < used_; first += piece.step) {
        Fragment<kWidth> fragment;
        fragment.take(next, signs);
        source += piece.step * p_.x.row_stride;
        if (row + piece.step < used_) {
          next.load(source);
        }
        if (row < used_) {
          use(fragment, piece, row);
        }
        row += piece.step;
      }
    });
  }

  // Calls use(fragment, piece, row) for each used row, with fragments from the stash.
  template <class Use>
  CUTE_DEVICE void read(Stash const& stash, Use const& use) const {
    for_each_piece([&]<int kWidth>(PieceOfThread<kWidth> const& piece) {
#pragma unroll 1
      for (int row = piece.row; row < used_; row += piece.step) {
        Fragment<kWidth> fragment;
        stash.read(fragment, piece.number(row));
        use(fragment, piece, row);
      }
    });
  }

  template <int kWidth>
  CUTE_DEVICE void store(CastFragment<kWidth> const& values, PieceOfThread<kWidth> const& piece,
                         int row) const {
    values.store(target_of(row) + piece.column, p_.shape.head_dim % kSpanColumns == 0);
  }

  // Stores zeros in the rows that are not used.
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

  // Visits the pieces of a row, widest first.
  template <class Run>
  CUTE_DEVICE void for_each_piece(Run const& run) const {
    int start = 0;
    int fragments = 0;
    auto const run_width = [&]<int kWidth>(std::integral_constant<int, kWidth>) {
      constexpr int kLanes = lanes_of_piece(kWidth);
      if ((p_.shape.head_dim & kWidth) == 0) {
        return;
      }
      int const thread = int(threadIdx.x);
      run(PieceOfThread<kWidth>{start + column_of_lane(kWidth, thread % kLanes, 0), thread / kLanes,
                                thread / 32 * (32 / kLanes), int(blockDim.x) / kLanes, fragments});
      start += kWidth;
      fragments += p_.stash_rows * kLanes;
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
