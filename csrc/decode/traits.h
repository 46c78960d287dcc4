// The types of the decode kernel. Types and sizes only.
//
// INVARIANT: members that code in csrc/forward reads have the same names as in FwdTraits.
#pragma once

#include "config/fwd_config.h"
#include "device/fragments.h"
#include "device/products.h"
#include "forward/cache/key_rows.h"
#include "forward/work.h"

namespace fa3 {

struct DecodeDeviceParams : CacheDeviceParams {
  TensorView q_rows;   // strides in bytes
  TensorView qv_rows;  // a latent cache: the latent columns
  int row_bytes_q;
  bool is_bf16;  // with an e4m3 cache: Q in global memory is bf16, else fp16
  // The previous launch belongs to the same call and waited for earlier launches
  // before it let this one start. So this launch does not wait at its start, but waits for the
  // previous one at its end.
  bool is_second;
  CacheRows rows;       // a latent cache
  ScaleView key_scale;  // e4m3 latents: the scales of each key
};

template <class Config_>
struct DecodeTraits {
  using Config = Config_;
  static constexpr FwdConfig k = Config::k;

  using Element = ElementOf<k.dtype_q>;  // operands of both GEMMs
  // K and V in shared memory, and but for e4m3 latents in global memory.
  using ElementKv = ElementOf<k.is_latent() ? k.dtype_q : k.dtype_kv()>;
  using Location = CacheLocation;
  using Params = DecodeDeviceParams;
  static constexpr KernelKind kKind = k.kind;
  static constexpr bool kIsCache = true;
  static constexpr bool kMayFold = false;
  static constexpr bool kHasScales = false;
  // Absorbed MLA: keys have rotary and latent columns, and the latent columns are also V.
  static constexpr bool kIsLatent = k.is_latent();
  // K and V are e4m3: the consumers convert them, but latents the producer (latent_rows.h).
  static constexpr bool kConverts = k.converts() && !kIsLatent;
  static constexpr bool kConvertsLatents = k.converts() && kIsLatent;
  static constexpr int kProducers = k.producers();  // warpgroups
  static constexpr int kProducerThreads = kProducers * kWarpgroupThreads;
  static constexpr int kRawChunks = k.raw_latent_bytes() / 16 / kProducerThreads;

  static constexpr int kHeadDim = k.head_dim;
  static constexpr int kHeadDimV = k.head_dim_v;
  static constexpr int kTileN = k.tile_n;
  static constexpr int kStages = k.stages;
  static constexpr int kQStages = k.q_stages;
  static constexpr int kWarpgroups = 1;  // a tile has at most 64 rows
  static constexpr int kMostSkipped = 0;
  static constexpr int kSlice = k.slice();
  // Columns of a row of Q in shared memory.
  static constexpr int kColumns = k.columns() + kIsLatent * kHeadDimV;
  static constexpr int kQRows = k.decode_buffer_rows();
  static constexpr int kValueKeys = kTileN;

  // A stage of the ring holds a part of K or V of a K tile: some of its columns.
  static constexpr int kStageColumns = k.stage_columns();
  static constexpr int kStageBytes = k.stage_bytes();
  // A latent cache: columns of K are the rotary and then the latent ones.
  static constexpr int kKeyColumns = kHeadDim + kIsLatent * kHeadDimV;
  static constexpr int kParts = ceil_div(kKeyColumns, kStageColumns);
  // Columns of O that are stored together, 64 by each warpgroup.
  static constexpr int kOutputColumns = k.part_columns();
  static constexpr int kPartsV = ceil_div(kHeadDimV, kOutputColumns);
  static constexpr int kBlocks = kOutputColumns / 64;

  // Each of two consumer warpgroups computes S of 64 keys, which may be all, and O of 64 columns of
  // a stage.
  static constexpr int kConsumers = 2;
  static constexpr int kConsumerThreads = kConsumers * kWarpgroupThreads;
  static constexpr int kConsumerWarps = kConsumers * kWarpgroupWarps;
  static constexpr int kKeys = kIsLatent ? kTileN : kTileN / kConsumers;
  static constexpr int kKeyWarps = kTileN / 16;  // warps that share the keys of a K tile
  // On a latent cache the warpgroups take K tiles in turn and compute all columns of O, so one
  // warpgroup reads a stage, and each has its own P.
  static constexpr int kReaders = kIsLatent ? 1 : kConsumers;
  static constexpr int kPBuffers = kIsLatent ? kConsumers : 1;
  static_assert(kKeys == 64 && k.slice() == 64);
  static constexpr int kOutputSteps = kTileN / 16;

  // Columns of O per row in the buffer of partial results.
  static constexpr int kPartColumns = kPartsV * kOutputColumns;

  // k-steps of S over a part of K.
  static constexpr int steps_of_part(int part) {
    return min_of(kStageColumns, kKeyColumns - part * kStageColumns) / 16;
  }

  using RowMajorAtom = cute::GMMA::Layout_K_SW128_Atom<Element>;
  // The columns of Q that S multiplies with a part of K (rows, columns).
  using SmemLayoutQ = decltype(cute::tile_to_shape(
      RowMajorAtom{}, cute::Shape<cute::Int<kQRows>, cute::Int<kStageColumns>>{}));
  // A stage of K (keys, columns) and of V (columns, keys).
  using SmemLayoutK = decltype(cute::tile_to_shape(
      RowMajorAtom{}, cute::Shape<cute::Int<kTileN>, cute::Int<kStageColumns>>{}));
  using SmemLayoutV =
      decltype(cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Element>{},
                                   cute::Shape<cute::Int<kStageColumns>, cute::Int<kTileN>>{},
                                   cute::Step<cute::_2, cute::_1>{}));
};

// Types that depend on kRows, the rows of Q of a tile, rounded up: N of both GEMMs.
template <class Traits, int kRows>
struct DecodeGemms {
  using Element = typename Traits::Element;
  using Rows = cute::Int<kRows>;
  using Shape = cute::Shape<cute::_64, Rows, cute::_16>;
  static constexpr auto mma_s() {
    if constexpr (Traits::kConverts) {
      return cute::GMMA::rs_op_selector<Element, Element, float, Shape, Major::K, Major::K>();
    } else {
      return cute::GMMA::ss_op_selector<Element, Element, float, Shape, Major::K, Major::K>();
    }
  }
  static constexpr auto mma_o() {
    if constexpr (Traits::kConverts) {
      return cute::GMMA::rs_op_selector<Element, Element, float, Shape, Major::K, Major::MN>();
    } else {
      return cute::GMMA::ss_op_selector<Element, Element, float, Shape, Major::MN, Major::MN>();
    }
  }
  using MmaS = decltype(cute::make_tiled_mma(mma_s()));  // S^T = K Q^T
  using MmaO = decltype(cute::make_tiled_mma(mma_o()));  // O^T = V^T P^T
  // P^T (rows, keys): 8 x 8 blocks.
  using SmemLayoutP = decltype(cute::tile_to_shape(cute::GMMA::Layout_MN_INTER_Atom<Element>{},
                                                   cute::Shape<Rows, cute::Int<Traits::kTileN>>{}));
  // Accumulators of S^T (64 keys) or O^T (64 columns), kRows / 2 elements per thread.
  using Sums = decltype(cute::partition_fragment_C(MmaS{}, cute::Shape<cute::_64, Rows>{}));
};

}  // namespace fa3
