// The types that a Config of the backward implies: element, shared-memory layouts, products. Types
// only.
//
// Scores are computed transposed, keys as rows: their accumulators are then the first operands of
// dV = P^T dO and dK = dS^T Q as they stand.
#pragma once

#include "config/bwd_config.h"
#include "device/products.h"

namespace fa3 {

template <class Config_>
struct BwdTraits {
  using Config = Config_;
  using Element = ElementOf<Config::kDtype>;

  static constexpr int kHeadDim = Config::kHeadDim;
  static constexpr int kTileM = Config::kTileM;
  static constexpr int kTileN = bwd_tile_n<Config>();
  static constexpr int kStages = Config::kStages;
  static constexpr int kWarpgroups = Config::kConsumerWarpgroups;
  static constexpr bool kCausal = Config::kMask == MaskKind::kCausal;
  static constexpr DqLayout kDq = bwd_dq_layout<Config>();

  using HeadDim = cute::Int<kHeadDim>;
  using TileM = cute::Int<kTileM>;
  using TileN = cute::Int<kTileN>;
  using DqColumns = cute::Int<kDq.columns>;

  // Slices of 64 columns (128 bytes, swizzled), one behind the other: what a TMA box of 64 columns
  // writes.
  using RowMajorAtom = cute::GMMA::Layout_K_SW128_Atom<Element>;
  using ColumnMajorAtom = cute::GMMA::Layout_MN_SW128_Atom<Element>;
  template <class Rows, class Columns>
  using Tile = decltype(cute::tile_to_shape(RowMajorAtom{}, cute::Shape<Rows, Columns>{}));
  // The same bytes with the columns first, as a second operand whose sum runs over the rows.
  template <class Rows, class Columns>
  using TransposedTile = decltype(cute::tile_to_shape(
      ColumnMajorAtom{}, cute::Shape<Columns, Rows>{}, cute::Step<cute::_2, cute::_1>{}));
  // 64 rows of a tile; the pointer says which.
  template <class Layout>
  using WarpgroupRows = decltype(cute::composition(
      Layout{}, cute::make_tile(cute::Layout<cute::_64>{},
                                cute::Layout<cute::Int<cute::size<1>(Layout{})>>{})));

  using SmemLayoutQ = Tile<TileM, HeadDim>;               // Q, dO
  using SmemLayoutQt = TransposedTile<TileM, HeadDim>;    // (head dim, M)
  using SmemLayoutK = Tile<TileN, HeadDim>;               // K, V
  using SmemLayoutKRows = WarpgroupRows<SmemLayoutK>;     // (64, head dim)
  using SmemLayoutKt = TransposedTile<TileN, DqColumns>;  // (columns of dQ, N)
  using SmemLayoutDs = Tile<TileM, TileN>;
  using SmemLayoutDsRows = WarpgroupRows<SmemLayoutDs>;  // (64, N)

  // S^T = K Q^T and dP^T = V dO^T: everything contiguous along the head dim.
  using MmaS = decltype(cute::make_tiled_mma(shared_atom<Element, kTileM, Major::K>()));
  // dV = P^T dO and dK = dS^T Q: the first operand in registers, the second contiguous along the
  // head dim, which is the N of these products.
  using MmaDkv = decltype(cute::make_tiled_mma(register_atom<Element, kHeadDim, Major::MN>()));
  // dQ = dS K: dS contiguous along the keys, K along the head dim.
  using MmaDq = decltype(cute::make_tiled_mma(shared_atom<Element, kDq.columns, Major::MN>()));
};

}  // namespace fa3
