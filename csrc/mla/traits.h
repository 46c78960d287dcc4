// The types of the kernel for a latent cache. Types and sizes only.
//
// INVARIANT: members that code in csrc/forward reads have the same names as in FwdTraits.
#pragma once

#include "config/fwd_config.h"
#include "device/fragments.h"
#include "device/products.h"
#include "forward/cache/key_rows.h"
#include "forward/work.h"

namespace fa3 {

// Both are 0 between launches.
struct CombineCounters {
  int tiles;  // tiles that several CTAs share
  int ctas;   // CTAs of the combining kernel that have read `tiles`
};

// A tile whose parts the combining kernel combines.
template <class Work>
struct alignas(16) SharedTile {
  static constexpr int kWords = int(sizeof(Work) + 15) / 16;

  Work work;

  CUTE_DEVICE uint4& word(int i) { return reinterpret_cast<uint4*>(this)[i]; }
};

// In CacheDeviceParams, q and k are the rotary columns and v the latent columns of the keys.
template <class Work>
struct MlaDeviceParams : CacheDeviceParams {
  CUtensorMap qv;                  // latent columns of Q, laid out as q
  SharedTile<Work>* shared_tiles;  // tiles to combine, in any order
  CombineCounters* combine;
  // Work division of the combining kernel (PartCombination).
  int fours_of_cta;
  FastDiv ctas_of_block;
  FastDiv blocks;  // per tile
  CacheRows rows;
  ScaleView key_scale;  // e4m3 only: scales of the latent columns
};

// The columns of a K tile are loaded in three groups.
enum class Columns : int { kLeft, kRight, kRotary };

template <class Config_>
struct MlaTraits {
  using Config = Config_;
  static constexpr FwdConfig k = Config::k;

  using Element = ElementOf<k.dtype_q>;
  using ElementKv = ElementOf<k.dtype_kv()>;
  using Location = CacheLocation;
  using Params = MlaDeviceParams<FwdWork<MlaTraits>>;
  static constexpr KernelKind kKind = k.kind;
  static constexpr bool kIsCache = true;
  static constexpr bool kMayFold = false;
  static constexpr bool kIsMasked = true;
  static constexpr bool kHasScales = false;
  static constexpr bool kTransposesV = false;
  static constexpr bool kConverts = k.converts();  // the cache holds e4m3
  // The left PV waits for S of the next K tile, so that it overlaps with the softmax, when the
  // tensor cores would be idle: 128 heads, 64 x 4k 175 -> 167 us (H200, 2026-11-27). WHY the right
  // PV does not wait: its ring has one stage less, and it takes 182 us. WHY not with e4m3: its
  // conversion runs at that time, and waiting is 7 % slower.
  static constexpr bool kLeftWaits = !kConverts;
  static constexpr bool kHasRowOptions = true;  // sinks enter at the end of a tile (scores.h)

  static constexpr int kHeadDim = k.head_dim;
  static constexpr int kHeadDimV = k.head_dim_v;
  static constexpr int kTileN = k.tile_n;
  static constexpr int kStages = k.stages;
  static constexpr int kWarpgroups = k.consumer_warpgroups;  // warpgroups with rows of their own
  static constexpr int kValueKeys = kTileN;
  static constexpr int kMostSkipped = 0;

  // Each of two warpgroups computes half of the columns of O.
  static constexpr int kOutputWarpgroups = 2;
  static constexpr int kOutputColumns = kHeadDimV / kOutputWarpgroups;

  static constexpr int kSlice = kSliceColumns;
  static constexpr int kRawSlice = kSlice;
  static constexpr int kRawColumns = kHeadDim;
  static constexpr int kRawColumnsV = kHeadDimV;
  // WHY the right half has fewer stages in 16 bits: shared memory has no room for more, and S needs
  // the right half last.
  static constexpr int kRightStages = k.right_stages();
  static constexpr int kRawStages = k.raw.stages;  // one per half
  static constexpr int kHalfElements = kTileN * kOutputColumns;
  static constexpr int kRotaryElements = kTileN * kHeadDim;
  // Latent columns in a 128-byte slice as loaded. With e4m3 a slice has one scale.
  static constexpr int kSliceV = 128 / int(sizeof(ElementKv));
  // The first latent columns of Q stay in registers; all other columns are in shared memory.
  static constexpr int kHeldColumns = kOutputColumns;
  static constexpr int kSharedColumns = kHeadDimV - kHeldColumns + kHeadDim;
  static constexpr int kTileStages = 2;  // published tiles in flight

  static_assert(kTileN == kWarpgroupRows && kHeadDim == kTileN,
                "P must fit the rotary columns, and half of Q must fit half of a K tile");

  using RowMajorAtom = cute::GMMA::Layout_K_SW128_Atom<Element>;
  template <int kRows, int kColumns>
  using RowMajor = decltype(cute::tile_to_shape(
      RowMajorAtom{}, cute::Shape<cute::Int<kRows>, cute::Int<kColumns>>{}));
  // Half of the latent columns as B operand (columns, keys) of P V.
  using SmemLayoutV =
      decltype(cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Element>{},
                                   cute::Shape<cute::Int<kOutputColumns>, cute::Int<kTileN>>{},
                                   cute::Step<cute::_2, cute::_1>{}));

  using MmaHeldS = decltype(cute::make_tiled_mma(register_atom<Element, kTileN, Major::K>()));
  using MmaS = decltype(cute::make_tiled_mma(shared_atom<Element, kTileN, Major::K>()));
  // WHY 128 columns, not all 256: ptxas (13.0) cannot compile an instruction with 128 accumulators
  // per thread in a CTA of 512 threads.
  static constexpr int kMmaColumns = 128;
  using MmaO = decltype(cute::make_tiled_mma(shared_atom<Element, kMmaColumns, Major::MN>()));
  static constexpr int kHeldSteps = kHeldColumns / kStepColumns<Element>;
  static constexpr int kRotarySteps = kHeadDim / kStepColumns<Element>;
  static constexpr int kOutputSteps = kTileN / kStepColumns<Element>;
};

}  // namespace fa3
