// The types that a Config implies: element, shared-memory layouts, products. Types only.
#pragma once

#include "config/fwd_config.h"
#include "device/products.h"

namespace fa3 {

template <class Config_>
struct FwdTraits {
  using Config = Config_;
  using Element = ElementOf<Config::kDtype>;

  static constexpr int kHeadDim = Config::kHeadDim;
  static constexpr int kHeadDimV = Config::kHeadDimV;
  static constexpr int kTileN = Config::kTileN;
  static constexpr int kStages = Config::kStages;
  static constexpr int kQStages = Config::kQStages;
  static constexpr int kWarpgroups = Config::kConsumerWarpgroups;
  static constexpr MaskKind kMask = Config::kMask;
  static constexpr bool kGeneral = is_general(kMask);
  using Place = PlaceOf<kMask>;

  // Columns in shared memory: the head dims, filled up to whole slices. The products leave the
  // filling out.
  static constexpr int kColumns = padded_columns(kHeadDim);
  static constexpr int kColumnsV = padded_columns(kHeadDimV);
  static constexpr int kQBufferColumns = q_buffer_columns<Config>();
  static constexpr int kScoreSteps = kHeadDim / 16;

  using HeadDimV = cute::Int<kHeadDimV>;
  using Columns = cute::Int<kColumns>;
  using ColumnsV = cute::Int<kColumnsV>;
  using TileN = cute::Int<kTileN>;

  // Slices of 64 columns (128 bytes, swizzled), one behind the other: what a TMA box of 64 columns
  // writes.
  using RowMajorAtom = cute::GMMA::Layout_K_SW128_Atom<Element>;
  using SmemLayoutQ =
      decltype(cute::tile_to_shape(RowMajorAtom{}, cute::Shape<cute::_64, Columns>{}));
  using SmemLayoutO =
      decltype(cute::tile_to_shape(RowMajorAtom{}, cute::Shape<cute::_64, ColumnsV>{}));
  using SmemLayoutK = decltype(cute::tile_to_shape(RowMajorAtom{}, cute::Shape<TileN, Columns>{}));
  // The same bytes as a row-major (keys, head dim) tile, named as the B operand (head dim, keys) of
  // PV.
  using SmemLayoutV = decltype(cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Element>{},
                                                   cute::Shape<ColumnsV, TileN>{},
                                                   cute::Step<cute::_2, cute::_1>{}));

  // S = Q K^T: Q and K are contiguous along the head dim.
  using MmaS = decltype(cute::make_tiled_mma(shared_atom<Element, kTileN, Major::K>()));
  // O = P V: P in registers, V contiguous along the head dim, which is the N of this product.
  using MmaO = decltype(cute::make_tiled_mma(register_atom<Element, kHeadDimV, Major::MN>()));
  // Cuts V into operands of PV: the descriptor of an operand does not say how many columns are
  // read.
  using MmaV = decltype(cute::make_tiled_mma(register_atom<Element, kColumnsV, Major::MN>()));
};

}  // namespace fa3
