// The kernel before the main one, for each row of dO: delta = rowsum(dO * O) - dLSE and the LSE in
// base 2; and zeros where dQ is summed up and where turns are counted (turns.h). A CTA has one tile
// of queries of one head.
//
// Rows get an infinite LSE where P has to be zero whatever the scores are: past the end of the
// sequence, and where a query sees no key (LSE = -inf).
#pragma once

#include "backward/params.h"
#include "backward/traits.h"
#include "core/softmax_math.h"
#include "device/barriers.h"

namespace fa3 {

constexpr int kRowThreads = 256;
constexpr int kChunkColumns = 8;  // 16 bytes

// Lanes that share a row of O and dO: a power of two, for the sum.
template <class Config>
constexpr int row_lanes() {
  int lanes = 8;
  while (lanes < 32 && 2 * lanes * kChunkColumns <= Config::kHeadDim) {
    lanes *= 2;
  }
  return lanes;
}

// A tile of queries of one head.
struct RowTile {
  int batch;
  int head;
  int m;

  CUTE_DEVICE static RowTile of_cta(BwdRowParams const& p) {
    int const index = int(blockIdx.x);
    int const pair = p.m_tiles.div(index);
    int const batch = p.heads.div(pair);
    return RowTile{batch, pair - batch * p.heads_q, index - pair * int(p.m_tiles.divisor)};
  }
};

template <class Element>
CUTE_DEVICE Element* row_of(TensorView const& t, RowTile const& tile, int position) {
  return static_cast<Element*>(t.data) + tile.batch * t.batch_stride + tile.head * t.head_stride +
         position * t.row_stride;
}

// This lane's share of the sum over a row of dO * O.
template <int kLanes, class Element>
CUTE_DEVICE float partial_dot(Element const* o, Element const* dout, int head_dim, int lane) {
  float sum = 0.f;
  for (int chunk = lane; chunk < head_dim / kChunkColumns; chunk += kLanes) {
    Element a[kChunkColumns];
    Element b[kChunkColumns];
    *reinterpret_cast<uint4*>(a) = reinterpret_cast<uint4 const*>(o)[chunk];
    *reinterpret_cast<uint4*>(b) = reinterpret_cast<uint4 const*>(dout)[chunk];
    CUTE_UNROLL
    for (int i = 0; i < kChunkColumns; ++i) {
      sum += float(a[i]) * float(b[i]);
    }
  }
  return sum;
}

template <int kLanes>
CUTE_DEVICE float sum_over_lanes(float x) {
  CUTE_UNROLL
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  }
  return x;
}

// LSE and delta of one row, which may lie past the end of the sequence.
CUTE_DEVICE void store_row(BwdRowParams const& p, RowTile const& tile, int position, float dot,
                           int64_t target) {
  float lse = -INFINITY;
  if (position < p.seqlen_q) {
    int64_t const source = (int64_t(tile.batch) * p.heads_q + tile.head) * p.seqlen_q + position;
    lse = p.lse[source];
    dot -= p.dlse == nullptr ? 0.f : p.dlse[source];
  }
  bool const is_empty = lse == -INFINITY;
  p.lse_log2[target] = is_empty ? INFINITY : lse * kLog2E;
  p.delta[target] = is_empty ? 0.f : dot;
}

// The flags of this CTA's tile; and, by the first CTA, the ticket.
template <class Config>
CUTE_DEVICE void zero_turns(BwdRowParams const& p) {
  constexpr int kFlags = bwd_dq_adders<Config>();
  if (int(threadIdx.x) < kFlags) {
    p.dq_flags[int64_t(blockIdx.x) * kFlags + int(threadIdx.x)] = 0;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *p.ticket = 0;
  }
}

template <class Config>
__global__ void __launch_bounds__(kRowThreads)
    backward_preprocess_kernel(BwdRowParams const __grid_constant__ p) {
  using Element = ElementOf<Config::kDtype>;
  wait_for_earlier_launches();
  RowTile const tile = RowTile::of_cta(p);
  constexpr int kTileFloats = Config::kTileM * bwd_dq_columns<Config>();
  float4* const sums = reinterpret_cast<float4*>(p.dq_sum + int64_t(blockIdx.x) * kTileFloats);
  for (int i = int(threadIdx.x); i < kTileFloats / 4; i += kRowThreads) {
    sums[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  if (p.dq_flags != nullptr) {
    zero_turns<Config>(p);
  }
  constexpr int kLanes = row_lanes<Config>();
  int const lane = int(threadIdx.x) % kLanes;
  CUTE_UNROLL
  for (int row = int(threadIdx.x) / kLanes; row < Config::kTileM; row += kRowThreads / kLanes) {
    int const position = tile.m * Config::kTileM + row;
    float dot = 0.f;
    if (position < p.seqlen_q) {
      dot = partial_dot<kLanes>(row_of<Element const>(p.o, tile, position),
                                row_of<Element const>(p.dout, tile, position), p.head_dim, lane);
    }
    dot = sum_over_lanes<kLanes>(dot);
    if (lane == 0) {
      store_row(p, tile, position, dot, int64_t(blockIdx.x) * Config::kTileM + row);
    }
  }
  allow_later_launches();
}

}  // namespace fa3
