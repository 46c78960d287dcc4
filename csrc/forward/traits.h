// The types that a Config implies: elements, shared-memory layouts, GEMMs. Types only; the slots
// are in forward/slots.h.
#pragma once

#include "config/fwd_config.h"
#include "core/cache_keys.h"
#include "device/fragments.h"
#include "device/products.h"

namespace fa3 {

struct FwdDeviceParams;
struct CacheDeviceParams;
struct FoldDeviceParams;
struct ListDeviceParams;

template <class Config_>
struct FwdTraits {
  using Config = Config_;
  static constexpr FwdConfig k = Config::k;

  using Element = ElementOf<k.dtype_q>;       // Q, P and the operands of both GEMMs
  using ElementKv = ElementOf<k.dtype_kv()>;  // K and V in global memory
  using Location = cute::conditional_t<k.kind.is_cache(), CacheLocation, LocationOf<k.kind.batch>>;
  static constexpr KernelKind kKind = k.kind;
  static constexpr bool kIsCache = kKind.is_cache();
  static constexpr bool kFolds = k.folds();
  // On a cache: parts may be folded in order, where the call asks for it (CacheDeviceParams).
  static constexpr bool kMayFold = kIsCache && !k.is_fp8() && !k.is_latent() && !k.is_swapped;
  static constexpr bool kHasLists = kKind.has_lists();
  using DenseParams = cute::conditional_t<kHasLists, ListDeviceParams, FwdDeviceParams>;
  using Params = cute::conditional_t<kIsCache, CacheDeviceParams,
                                     cute::conditional_t<kFolds, FoldDeviceParams, DenseParams>>;
  static constexpr bool kIsMasked = k.kind.mask != MaskKind::kFull;
  static constexpr bool kHasRowOptions = !k.kind.is_dense();  // sinks and row maxima, at run time
  static constexpr bool kTransposesV = k.values == ValuesKind::kTransposed;
  static constexpr bool kConverts = k.converts();
  static constexpr bool kHasScales = k.scales() == ScalesKind::kBlocks;
  // On a cache: consumers clear the rows of V that belong to no key (cache/missing_values.h).
  static constexpr bool kClearsValues = kIsCache && k.values == ValuesKind::kDirect;

  // Those of this CTA, as are all columns here.
  static constexpr int kHeadDim = k.cta_head_dim();
  static constexpr int kHeadDimV = k.cta_head_dim_v();
  static constexpr int kTileN = k.tile_n;
  static constexpr int kStages = k.stages;
  static constexpr int kQStages = k.q_stages;
  static constexpr int kWarpgroups = k.consumer_warpgroups;
  static constexpr int kOutputColumns = kHeadDimV;  // that a warpgroup has
  static constexpr int kMostSkipped = k.most_skipped();
  // kTransposed: V is loaded in parts of this many keys, into a ring of its own.
  static constexpr int kValueParts = kTransposesV ? k.raw.parts : 1;
  static constexpr int kValueKeys = k.tile_n / kValueParts;
  static constexpr int kValueStages = kTransposesV ? k.raw.stages * kValueParts
                                      : kConverts  ? k.raw.stages
                                                   : k.stages;
  static constexpr int kKeyStages = kConverts ? k.raw.stages : k.stages;
  // kBlocks: K tiles that share a scale, and stages of the ring of scales.
  static constexpr int kScaleTiles = kScaleBlockKeys / k.tile_n;
  static constexpr int kScaleStages = 2 * k.stages;
  // 16-bit elements of O that a warpgroup stages.
  static constexpr int kStagedElements = staged_bytes(k) / 2;
  // General kernels with a narrow producer recompute what they have no registers to keep.
  static constexpr bool kIsTight = !k.kind.is_dense() && k.tuning.producer == ProducerSize::kNarrow;
  // Two warpgroups on a cache have no registers for the mask of a tree while PV still reads P, nor
  // between masked K tiles: they find a row's limits again for each, and mask after PV. So do
  // kernels with lists, whose rows have two intervals.
  static constexpr bool kMasksLate = (k.kind.is_cache() && kWarpgroups > 1) || kHasLists;

  // Columns in shared memory: the head dims padded to whole slices. Products skip the padding.
  static constexpr int kSlice = k.slice();
  static constexpr int kColumns = k.columns();
  static constexpr int kColumnsV = k.columns_v();
  // Those of K and V as loaded.
  static constexpr int kRawSlice = k.raw_slice();
  static constexpr int kRawColumns = padded_columns(kHeadDim, kRawSlice);
  static constexpr int kRawColumnsV = padded_columns(kHeadDimV, kRawSlice);
  static constexpr int kQBufferElements = q_buffer_bytes(k) / int(sizeof(Element));
  static constexpr int kScoreSteps = kHeadDim / kStepColumns<Element>;
  static constexpr int kOutputSteps = kTileN / kStepColumns<Element>;

  using HeadDimV = cute::Int<kHeadDimV>;
  using Columns = cute::Int<kColumns>;
  using ColumnsV = cute::Int<kColumnsV>;
  using TileN = cute::Int<kTileN>;

  // Slices of 128 bytes (64 bytes for e4m3 with at most 64 columns), swizzled, one after the other:
  // the layout that TMA boxes of that width write.
  template <bool kNarrow>
  using AtomOf = cute::conditional_t<kNarrow, cute::GMMA::Layout_K_SW64_Atom<Element>,
                                     cute::GMMA::Layout_K_SW128_Atom<Element>>;
  using RowMajorAtom = AtomOf<kSlice * sizeof(Element) == 64>;
  using SmemLayoutQ =
      decltype(cute::tile_to_shape(RowMajorAtom{}, cute::Shape<cute::_64, Columns>{}));
  using SmemLayoutO =
      decltype(cute::tile_to_shape(RowMajorAtom{}, cute::Shape<cute::_64, ColumnsV>{}));
  using SmemLayoutK = decltype(cute::tile_to_shape(RowMajorAtom{}, cute::Shape<TileN, Columns>{}));

  // V as the B operand (head dim, keys) of PV. kDirect: the bytes of a row-major (keys, head dim)
  // tile. kTransposed: contiguous along the keys, which 8-bit operands require, in slices of 128 or
  // 64 keys.
  static constexpr bool kNarrowV = slice_keys(kTileN) == 64;
  using KeysV = cute::Int<padded_columns(kTileN, slice_keys(kTileN))>;
  CUTE_HOST_DEVICE static constexpr auto layout_of_v() {
    if constexpr (kTransposesV) {
      return cute::tile_to_shape(AtomOf<kNarrowV>{}, cute::Shape<HeadDimV, KeysV>{});
    } else {
      return cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Element>{},
                                 cute::Shape<ColumnsV, TileN>{}, cute::Step<cute::_2, cute::_1>{});
    }
  }
  using SmemLayoutV = decltype(layout_of_v());

  // P as the operand of PV: ((2,2,2),1,N/16), e4m3 ((4,2,2),1,N/32).
  template <class Layout>
  CUTE_DEVICE static auto operand_p_layout(Layout scores) {
    if constexpr (sizeof(Element) == 1) {
      return operand_a_layout_of_bytes(scores);
    } else {
      return operand_a_layout(scores);
    }
  }

  // S = Q K^T: Q and K are contiguous along the head dim.
  using MmaS = decltype(cute::make_tiled_mma(shared_atom<Element, kTileN, Major::K>()));
  // S = Q K^T with Q in registers.
  using MmaHeldS = decltype(cute::make_tiled_mma(register_atom<Element, kTileN, Major::K>()));
  // O = P V: P in registers. V is contiguous along the head dim, which is the N of this GEMM,
  // or, transposed, along the keys.
  static constexpr Major kMajorV = kTransposesV ? Major::K : Major::MN;
  using MmaO = decltype(cute::make_tiled_mma(register_atom<Element, kHeadDimV, kMajorV>()));
  // Splits V into operands of PV: the descriptor of an operand does not say how many columns are
  // read.
  static constexpr int kOperandColumnsV = kTransposesV ? kHeadDimV : kColumnsV;
  using MmaV = decltype(cute::make_tiled_mma(register_atom<Element, kOperandColumnsV, kMajorV>()));
  // PV of a part of the columns (forward/fp8/loop_serial.h).
  static constexpr int kPartColumns = kHeadDimV < 128 ? kHeadDimV : 128;
  using MmaPart = decltype(cute::make_tiled_mma(register_atom<Element, kPartColumns, kMajorV>()));
};

}  // namespace fa3
