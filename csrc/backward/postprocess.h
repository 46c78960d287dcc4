// The kernel after the main one: dQ from its fp32 accumulator, times the softmax scale, to the
// output's dtype and strides; zero where no CTA has added. A CTA has one tile of queries of one
// head.
#pragma once

#include "backward/preprocess.h"
#include "device/math.h"

namespace fa3 {

// Eight columns of a row, from the four lanes that computed them: pair 0 or 1 of each float4.
template <class Element>
CUTE_DEVICE uint4 rounded_chunk(float4 const (&lanes)[4], bool second_row, float scale) {
  uint32_t words[4];
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    float const low = second_row ? lanes[i].z : lanes[i].x;
    float const high = second_row ? lanes[i].w : lanes[i].y;
    words[i] = pack_two<Element>(low * scale, high * scale);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

template <class Config>
__global__ void __launch_bounds__(kRowThreads)
    backward_postprocess_kernel(BwdRowParams const __grid_constant__ p) {
  using Element = ElementOf<Config::k.dtype>;
  constexpr DqLayout kDq = Config::k.dq_layout();
  constexpr int kChunks = kDq.columns / kChunkColumns;
  constexpr int kRowPairs = DqLayout::kRows / 2;
  constexpr int kItems = Config::k.dq_blocks() * kRowPairs * kChunks;
  wait_for_earlier_launches();
  int const index = tile_index();
  HeadTile const tile = HeadTile::of_index<Config>(p, index);
  float const* const sums =
      p.dq_sum + int64_t(index) * (Config::k.dq_blocks() * kDq.block_floats());
  bool const has_sums = p.dq_is_zeroed || p.dq_flags[int64_t(index) * Config::k.dq_adders()] != 0;
  // Neighbouring threads write neighbouring chunks of a row.
  CUTE_UNROLL
  for (int item = int(threadIdx.x); item < kItems; item += kRowThreads) {
    int const chunk = item % kChunks;
    int const row_pair = item / kChunks % kRowPairs;
    int const block = item / kChunks / kRowPairs;
    int const row = row_pair / 8 * 16 + row_pair % 8;
    float4 lanes[4] = {};
    CUTE_UNROLL
    for (int i = 0; has_sums && i < 4; ++i) {
      lanes[i] = reinterpret_cast<float4 const*>(sums + kDq.chunk_pair(block, row, chunk))[i];
    }
    int const column = kDq.first_column(block) + chunk * kChunkColumns;
    CUTE_UNROLL
    for (int second = 0; second < 2; ++second) {
      int const i = kDq.first_row(block) + row + 8 * second;
      if (i < tile.rows.rows && column < p.head_dim) {
        *reinterpret_cast<uint4*>(row_of<Element>(p.dq, tile, i) + column) =
            rounded_chunk<Element>(lanes, second == 1, p.softmax_scale);
      }
    }
  }
  allow_later_launches();
}

}  // namespace fa3
