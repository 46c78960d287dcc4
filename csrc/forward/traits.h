// The types that a Config implies: element, shared-memory layouts, products. Types only.
#pragma once

#include "config/fwd_config.h"
#include "device/cute.h"
#include "device/wgmma_shapes.h"

namespace fa3 {

template <Dtype kDtype>
using ElementOf =
    cute::conditional_t<kDtype == Dtype::kFloat16, cutlass::half_t, cutlass::bfloat16_t>;

// S = Q K^T: both operands in shared memory, contiguous along the head dim.
template <class Element, int kTileN>
constexpr auto score_atom() {
  constexpr auto kK = cute::GMMA::Major::K;
  constexpr bool kHalf = cute::is_same_v<Element, cutlass::half_t>;
  if constexpr (kTileN == 80) {
    return cute::conditional_t<kHalf, Wgmma64x80x16F16<kK, kK>, Wgmma64x80x16BF16<kK, kK>>{};
  } else if constexpr (kTileN == 176) {
    return cute::conditional_t<kHalf, Wgmma64x176x16F16<kK, kK>, Wgmma64x176x16BF16<kK, kK>>{};
  } else {
    return cute::GMMA::ss_op_selector<
        Element, Element, float, cute::Shape<cute::_64, cute::Int<kTileN>, cute::_16>, kK, kK>();
  }
}

// O = P V: P in registers, V contiguous along the head dim, which is the N of this product.
template <class Element, int kHeadDimV>
constexpr auto output_atom() {
  return cute::GMMA::rs_op_selector<Element, Element, float,
                                    cute::Shape<cute::_64, cute::Int<kHeadDimV>, cute::_16>,
                                    cute::GMMA::Major::K, cute::GMMA::Major::MN>();
}

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
  static constexpr bool kCausal = Config::kMask == MaskKind::kCausal;

  using HeadDim = cute::Int<kHeadDim>;
  using HeadDimV = cute::Int<kHeadDimV>;
  using TileN = cute::Int<kTileN>;

  // Slices of 64 columns (128 bytes, swizzled), one behind the other: what a TMA box of 64 columns
  // writes.
  using RowMajorAtom = cute::GMMA::Layout_K_SW128_Atom<Element>;
  using SmemLayoutQ =
      decltype(cute::tile_to_shape(RowMajorAtom{}, cute::Shape<cute::_64, HeadDim>{}));
  using SmemLayoutO =
      decltype(cute::tile_to_shape(RowMajorAtom{}, cute::Shape<cute::_64, HeadDimV>{}));
  using SmemLayoutK = decltype(cute::tile_to_shape(RowMajorAtom{}, cute::Shape<TileN, HeadDim>{}));
  // The same bytes as a row-major (keys, head dim) tile, named as the B operand (head dim, keys) of
  // PV.
  using SmemLayoutV = decltype(cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Element>{},
                                                   cute::Shape<HeadDimV, TileN>{},
                                                   cute::Step<cute::_2, cute::_1>{}));

  using MmaS = decltype(cute::make_tiled_mma(score_atom<Element, kTileN>()));
  using MmaO = decltype(cute::make_tiled_mma(output_atom<Element, kHeadDimV>()));
};

}  // namespace fa3
