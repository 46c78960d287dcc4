// The types that a Config implies: element, shared-memory layouts, products. Types only.
#pragma once

#include "config/fwd_config.h"
#include "core/block_range.h"
#include "device/fragments.h"
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
  static constexpr bool kFp8 = Config::kDtype == Dtype::kFloat8E4M3;
  // FP8: K tiles that have the same scales; of so many they are in shared memory.
  static constexpr int kScaleTiles = kScaleBlockKeys / kTileN;
  static constexpr int kScaleStages = 2 * Config::kStages;
  // V comes in so many parts, each of so many keys, into a ring of so many of them.
  static constexpr int kValueParts = kFp8 ? Config::kRawParts : 1;
  static constexpr int kValueKeys = Config::kTileN / kValueParts;
  static constexpr int kValueStages = kFp8 ? Config::kRawStages * kValueParts : Config::kStages;
  static constexpr int kQStages = Config::kQStages;
  // FP8: elements of O, of 16 bits, that a warpgroup stages.
  static constexpr int kStagedElements =
      kFp8 && Config::kStageOutput ? kWarpgroupRows * padded_columns(Config::kHeadDimV) : 0;
  static constexpr int kWarpgroups = Config::kConsumerWarpgroups;
  static constexpr bool kSendsResults = sends_results<Config>();
  static constexpr MaskKind kMask = Config::kMask;
  static constexpr bool kGeneral = is_general(kMask);
  // FP8: general kernels whose producer has 24 registers are so short of them that it works out
  // again what it could keep.
  static constexpr bool kIsTight = kGeneral && Config::kProducerSize == ProducerSize::kNarrow;
  // Of the first K tile of a tile, a warp leaves out the softmax if none of its rows sees a key.
  // WHY here alone: of later K tiles, and under a window, that is 0 to 3 % slower.
  static constexpr bool kSkipsHidden = kFp8 && kMask == MaskKind::kCausal && Config::kIntraOverlap;
  // Of three warpgroups, each leaves out K tiles that none of its rows sees: so many of those that
  // come first in a tile, and of the last. WHY not 16-bit causal kernels: 0 to 1 % slower.
  static constexpr int kHiddenAtMost =
      kWarpgroups == 3 && Config::kTileOverlap && (kGeneral || (kFp8 && kMask == MaskKind::kCausal))
          ? most_hidden_tiles(kStages, kFp8 ? Config::kRawStages : 0)
          : 0;
  using Place = PlaceOf<kMask>;

  // Columns in shared memory: the head dims, filled up to whole slices. The products leave the
  // filling out.
  static constexpr int kSlice = slice_columns(Config::kDtype, kHeadDim);
  static constexpr int kColumns = padded_columns(kHeadDim, kSlice);
  static constexpr int kColumnsV = padded_columns(kHeadDimV, kSlice);
  static constexpr int kQBufferElements = q_buffer_bytes<Config>() / int(sizeof(Element));
  // WHY full kernels alone: FP8 ones at head dim 128 are level to 8 % slower where they mask keys,
  // with sequences packed or dense (README.md, "What was tried").
  static constexpr int kQuerySteps = kMask == MaskKind::kFull ? Config::kQuerySteps : 0;
  static constexpr int kScoreSteps = kHeadDim / kStepColumns<Element>;
  static constexpr int kOutputSteps = kTileN / kStepColumns<Element>;

  using HeadDimV = cute::Int<kHeadDimV>;
  using Columns = cute::Int<kColumns>;
  using ColumnsV = cute::Int<kColumnsV>;
  using TileN = cute::Int<kTileN>;

  // Slices of 128 bytes (of 64 at FP8 with as few columns), swizzled, one behind the other: what a
  // TMA box of so many columns writes.
  template <bool kNarrow>
  using AtomOf = cute::conditional_t<kNarrow, cute::GMMA::Layout_K_SW64_Atom<Element>,
                                     cute::GMMA::Layout_K_SW128_Atom<Element>>;
  using RowMajorAtom = AtomOf<kFp8 && kSlice == 64>;
  using SmemLayoutQ =
      decltype(cute::tile_to_shape(RowMajorAtom{}, cute::Shape<cute::_64, Columns>{}));
  using SmemLayoutO =
      decltype(cute::tile_to_shape(RowMajorAtom{}, cute::Shape<cute::_64, ColumnsV>{}));
  using SmemLayoutK = decltype(cute::tile_to_shape(RowMajorAtom{}, cute::Shape<TileN, Columns>{}));
  // The same bytes as a row-major (keys, head dim) tile, named as the B operand (head dim, keys) of
  // PV.
  // FP8: 8-bit operands have to be contiguous along the keys, of which slices have 128, or 64.
  static constexpr bool kNarrowV = slice_keys(kTileN) == 64;
  using KeysV = cute::Int<padded_columns(kTileN, slice_keys(kTileN))>;
  CUTE_HOST_DEVICE static constexpr auto layout_of_v() {
    if constexpr (kFp8) {
      return cute::tile_to_shape(AtomOf<kNarrowV>{}, cute::Shape<HeadDimV, KeysV>{});
    } else {
      return cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Element>{},
                                 cute::Shape<ColumnsV, TileN>{}, cute::Step<cute::_2, cute::_1>{});
    }
  }
  using SmemLayoutV = decltype(layout_of_v());

  // P as the operand of PV: ((2,2,2),1,N/16), FP8 ((4,2,2),1,N/32).
  template <class Layout>
  CUTE_DEVICE static auto operand_p_layout(Layout scores) {
    if constexpr (kFp8) {
      return operand_a_layout_of_bytes(scores);
    } else {
      return operand_a_layout(scores);
    }
  }

  // S = Q K^T: Q and K are contiguous along the head dim.
  using MmaS = decltype(cute::make_tiled_mma(shared_atom<Element, kTileN, Major::K>()));
  // The same, with Q in registers.
  using MmaHeldS = decltype(cute::make_tiled_mma(register_atom<Element, kTileN, Major::K>()));
  // O = P V: P in registers, V contiguous along the head dim, which is the N of this product; FP8:
  // along the keys.
  static constexpr Major kMajorV = kFp8 ? Major::K : Major::MN;
  using MmaO = decltype(cute::make_tiled_mma(register_atom<Element, kHeadDimV, kMajorV>()));
  // Cuts V into operands of PV: the descriptor of an operand does not say how many columns are
  // read.
  static constexpr int kOperandColumnsV = kFp8 ? kHeadDimV : kColumnsV;
  using MmaV = decltype(cute::make_tiled_mma(register_atom<Element, kOperandColumnsV, kMajorV>()));
  // kPromote: O in fp32 has room of its own (forward/promoted_sums.h).
  static constexpr bool kHoldsSums = Config::kPromote && Config::kIntraOverlap;
  static constexpr int kSharedSums = Config::kSharedSums;
  // PV of a part of the columns (kPromote without overlap).
  static constexpr int kPartColumns = kHeadDimV < 128 ? kHeadDimV : 128;
  using MmaPart = decltype(cute::make_tiled_mma(register_atom<Element, kPartColumns, kMajorV>()));
};

}  // namespace fa3
