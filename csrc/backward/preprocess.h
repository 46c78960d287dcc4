// The kernel before the main one. For each row of dO it computes delta = rowsum(dO * O) - dLSE and
// the LSE in base 2. It zeroes the flags of dQ and, for long sequences, the sums (add_order.h). A
// CTA has one tile of one head's queries.
//
// A row gets an infinite LSE where P has to be zero whatever the scores are: past the end of the
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
  while (lanes < 32 && 2 * lanes * kChunkColumns <= Config::k.head_dim_v) {
    lanes *= 2;
  }
  return lanes;
}

// The index in the workspaces of the tile of a CTA. WHY from the end: the main kernel goes upwards,
// so it finds what the preprocess kernel has read last in L2, and the postprocess kernel what the
// main kernel has added last.
CUTE_DEVICE int tile_index() { return int(gridDim.x) - 1 - int(blockIdx.x); }

// A tile of queries of one head: its rows of the tensors. Packed tensors have no batch, and a head
// may have fewer tiles than the grid has space for.
struct HeadTile {
  int batch;
  int head;
  RowTile rows;

  template <class Config>
  CUTE_DEVICE static HeadTile of_index(BwdRowParams const& p, int index) {
    int const pair = p.m_tiles.div(index);
    int const m = index - pair * int(p.m_tiles.divisor);
    int const batch = p.heads.div(pair);
    if (p.row_tiles != nullptr) {
      return HeadTile{0, pair, p.row_tiles[m]};
    }
    int const row = m * Config::k.tile_m;
    return HeadTile{batch, pair - batch * p.heads_q,
                    RowTile{row, min_of(Config::k.tile_m, p.seqlen_q - row)}};
  }
};

// Row i of a tile.
template <class Element>
CUTE_DEVICE Element* row_of(TensorView const& t, HeadTile const& tile, int i) {
  return static_cast<Element*>(t.data) + tile.batch * t.batch_stride + tile.head * t.head_stride +
         (tile.rows.row + i) * t.row_stride;
}

// The part of this lane in the sum of dO * O over a row.
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

// LSE and delta of row i, which may lie past the end of the sequence.
CUTE_DEVICE void store_row(BwdRowParams const& p, HeadTile const& tile, int i, float dot,
                           int64_t target) {
  float lse = -INFINITY;
  if (i < tile.rows.rows) {
    int64_t const source =
        (int64_t(tile.batch) * p.heads_q + tile.head) * p.seqlen_q + tile.rows.row + i;
    lse = p.lse[source];
    dot -= p.dlse == nullptr ? 0.f : p.dlse[source];
  }
  bool const is_empty = lse == -INFINITY;
  p.lse_log2[target] = is_empty ? INFINITY : lse * kLog2E;
  p.delta[target] = is_empty ? 0.f : dot;
}

template <class Config>
CUTE_DEVICE void zero_sums(BwdRowParams const& p, int index) {
  constexpr int kTileFloats = Config::k.tile_m * Config::k.dq_columns();
  float4* const sums = reinterpret_cast<float4*>(p.dq_sum + int64_t(index) * kTileFloats);
  for (int i = int(threadIdx.x); i < kTileFloats / 4; i += kRowThreads) {
    sums[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
}

// Zeroes the flags of this CTA's tile; the first CTA also zeroes the ticket.
template <class Config>
CUTE_DEVICE void zero_flags(BwdRowParams const& p) {
  constexpr int kFlags = Config::k.dq_adders();
  if (int(threadIdx.x) < kFlags) {
    p.dq_flags[int64_t(tile_index()) * kFlags + int(threadIdx.x)] = 0;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *p.ticket = 0;
  }
}

template <class Config>
__global__ void __launch_bounds__(kRowThreads)
    backward_preprocess_kernel(BwdRowParams const __grid_constant__ p) {
  using Element = ElementOf<Config::k.dtype>;
  wait_for_earlier_launches();
  int const index = tile_index();
  HeadTile const tile = HeadTile::of_index<Config>(p, index);
  if (p.dq_is_zeroed) {
    zero_sums<Config>(p, index);
  }
  zero_flags<Config>(p);
  constexpr int kLanes = row_lanes<Config>();
  int const lane = int(threadIdx.x) % kLanes;
  CUTE_UNROLL
  for (int row = int(threadIdx.x) / kLanes; row < Config::k.tile_m; row += kRowThreads / kLanes) {
    float dot = 0.f;
    if (row < tile.rows.rows) {
      dot = partial_dot<kLanes>(row_of<Element const>(p.o, tile, row),
                                row_of<Element const>(p.dout, tile, row), p.head_dim_v, lane);
    }
    dot = sum_over_lanes<kLanes>(dot);
    if (lane == 0) {
      store_row(p, tile, row, dot, int64_t(index) * Config::k.tile_m + row);
    }
  }
  allow_later_launches();
}

}  // namespace fa3
