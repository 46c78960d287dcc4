// The types that a Config of the backward implies: element, shared-memory layouts, products. Types
// only.
//
// Scores are computed transposed, with keys as rows: their accumulators are then first
// operands of the products dV = P^T dO and dK = dS^T Q without a change of layout.
#pragma once

#include "config/bwd_config.h"
#include "core/packed_tiles.h"
#include "device/cluster.h"
#include "device/products.h"
#include "device/score.h"

namespace fa3 {

constexpr int kWarpRows = 16;  // a warp has 16 of the 64 rows of a product

struct BwdDeviceParams;
struct ListedBwdParams;

template <class Config_>
struct BwdTraits {
  using Config = Config_;
  static constexpr BwdConfig k = Config::k;
  using Element = ElementOf<k.dtype>;
  using Score = ScoreOf<k.kind.score>;
  using Location = LocationOf<k.kind.batch>;

  static constexpr KernelKind kKind = k.kind;
  static constexpr bool kHasLists = kKind.has_lists();
  using Params = cute::conditional_t<kHasLists, ListedBwdParams, BwdDeviceParams>;
  // Those of this CTA, as are all columns here.
  static constexpr int kHeadDim = k.cta_head_dim();     // Q, K, dQ and dK
  static constexpr int kHeadDimV = k.cta_head_dim_v();  // V, dO and dV
  static constexpr int kTileM = k.tile_m;
  static constexpr int kTileN = k.cta_keys();
  static constexpr int kQStages = k.q_stages;
  static constexpr int kDoutStages = k.dout_stages;
  static constexpr int kClusterSize = k.cluster_size;
  static constexpr int kOtherColumns = k.other_columns();
  static constexpr int kTileClusters = k.order_keys() / k.tile_n();  // that share a tile
  static constexpr bool kSplitsColumns = k.column_ctas() > 1;
  static constexpr BwdSplit kSplit = k.split;
  static constexpr bool kScoresFirst = k.scores_first;
  static constexpr int kWarpgroups = k.consumer_warpgroups;
  static constexpr DqLayout kDq = k.dq_layout();
  static constexpr int kDqBlocks = k.dq_blocks();
  static constexpr int kDqAdders = k.dq_adders();

  using TileM = cute::Int<kTileM>;
  using TileN = cute::Int<kTileN>;
  using DqColumns = cute::Int<kDq.columns>;
  static constexpr int kKeySlice = k.key_slice();
  static constexpr int kDqOperandColumns = padded_columns(kDq.columns, kKeySlice);
  template <int kDim>
  using Columns = cute::Int<padded_columns(kDim)>;

  // Slices of 64 columns (128 bytes, swizzled), one after the other: the layout that a TMA box of
  // 64 columns writes.
  template <int kSlice>
  using RowMajorAtom =
      cute::conditional_t<kSlice == kSliceColumns, cute::GMMA::Layout_K_SW128_Atom<Element>,
                          cute::GMMA::Layout_K_SW32_Atom<Element>>;
  template <int kSlice>
  using ColumnMajorAtom =
      cute::conditional_t<kSlice == kSliceColumns, cute::GMMA::Layout_MN_SW128_Atom<Element>,
                          cute::GMMA::Layout_MN_SW32_Atom<Element>>;
  template <class Rows, class Columns>
  using Tile =
      decltype(cute::tile_to_shape(RowMajorAtom<kSliceColumns>{}, cute::Shape<Rows, Columns>{}));
  // The bytes of a Tile with the columns first: a second operand, summed over the rows.
  template <class Rows, class Columns, int kSlice = kSliceColumns>
  using TransposedTile = decltype(cute::tile_to_shape(
      ColumnMajorAtom<kSlice>{}, cute::Shape<Columns, Rows>{}, cute::Step<cute::_2, cute::_1>{}));
  // 64 rows of a tile, from the pointer on.
  template <class Layout>
  using WarpgroupRows = decltype(cute::composition(
      Layout{}, cute::make_tile(cute::Layout<cute::_64>{},
                                cute::Layout<cute::Int<cute::size<1>(Layout{})>>{})));

  // kDim: the head dim of Q and K, or that of dO and V.
  template <int kDim>
  using SmemLayoutQ = Tile<TileM, Columns<kDim>>;
  template <int kDim>
  using SmemLayoutQt = TransposedTile<TileM, Columns<kDim>>;  // (columns, M)
  // K (kSlice: kKeySlice) and V.
  template <int kDim, int kSlice = kSliceColumns>
  using SmemLayoutKeys = decltype(cute::tile_to_shape(
      RowMajorAtom<kSlice>{}, cute::Shape<TileN, cute::Int<padded_columns(kDim, kSlice)>>{}));
  template <int kDim, int kSlice>
  using SmemLayoutKeyRows = WarpgroupRows<SmemLayoutKeys<kDim, kSlice>>;  // (64, columns)
  using SmemLayoutKt =
      TransposedTile<TileN, cute::Int<kDqOperandColumns>, kKeySlice>;  // (columns of dQ, N)
  using SmemLayoutDs = Tile<TileM, TileN>;
  using SmemLayoutDsRows = WarpgroupRows<SmemLayoutDs>;  // (64, N)

  // S^T = K Q^T and dP^T = V dO^T: everything contiguous along the head dim.
  using MmaS = decltype(cute::make_tiled_mma(shared_atom<Element, kTileM, Major::K>()));
  // dV = P^T dO and dK = dS^T Q: the first operand in registers, the second contiguous along the
  // head dim, which is the N of these products. TRAP: for more than 192 columns ptxas (13.0) needs
  // more registers than 512 threads start with, whatever setmaxnreg says.
  template <int kColumns>
  using FromRegisters =
      decltype(cute::make_tiled_mma(register_atom<Element, kColumns, Major::MN>()));
  static constexpr bool is_in_halves(int head_dim) { return head_dim > 192; }
  template <int kDim>
  using MmaDkv = FromRegisters<is_in_halves(kDim) ? kDim / 2 : kDim>;
  // Splits Q and dO into second operands of these: the descriptor of an operand does not say how
  // many columns are read.
  template <int kDim>
  using MmaQt = FromRegisters<is_in_halves(kDim) ? kDim / 2 : padded_columns(kDim)>;
  // dQ = dS K: dS contiguous along the keys, K along the head dim.
  using MmaDq = decltype(cute::make_tiled_mma(shared_atom<Element, kDq.columns, Major::MN>()));
  // Splits K into second operands: a whole slice, also where a block of dQ has half of one.
  using MmaKt =
      decltype(cute::make_tiled_mma(shared_atom<Element, kDqOperandColumns, Major::MN>()));

  // The first column of this CTA, of Q and K as of V.
  CUTE_DEVICE static int first_column() { return kSplitsColumns ? cluster_rank() * kHeadDim : 0; }
  static_assert(!kSplitsColumns || kHeadDim == kHeadDimV);
};

}  // namespace fa3
