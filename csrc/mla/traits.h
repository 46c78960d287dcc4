// The types of the kernel for a latent cache. Types and sizes only.
//
// INVARIANT: the names that the parts of csrc/forward read are those of FwdTraits.
#pragma once

#include "config/fwd_config.h"
#include "device/fragments.h"
#include "device/products.h"
#include "forward/work.h"

namespace fa3 {

// Zeros between launches.
struct CombineCounters {
  int tiles;  // that several CTAs share
  int ctas;   // CTAs of the combining kernel that have read `tiles`
};

// A tile whose parts are to be combined.
template <class Work>
struct alignas(16) SharedTile {
  static constexpr int kWords = int(sizeof(Work) + 15) / 16;

  Work work;

  CUTE_DEVICE uint4& word(int i) { return reinterpret_cast<uint4*>(this)[i]; }
};

// CacheDeviceParams::q, k: the rotary columns; v: the latent ones of the keys.
template <class Work>
struct MlaDeviceParams : CacheDeviceParams {
  CUtensorMap qv;                  // the latent columns of Q, as q
  SharedTile<Work>* shared_tiles;  // those that are to be combined, in any order
  CombineCounters* combine;
  // How the combining kernel divides its work (PartCombination).
  int fours_of_cta;
  FastDiv ctas_of_block;
  FastDiv blocks;       // in a tile
  ScaleView key_scale;  // e4m3: of the latent columns
};

// The columns of a K tile are loaded in three groups.
enum class Columns : int { kLeft, kRight, kRotary };

template <class Config_>
struct MlaTraits {
  using Config = Config_;
  static constexpr FwdConfig k = Config::k;

  using Element = ElementOf<k.dtype_q>;
  using ElementKv = ElementOf<k.dtype_kv>;
  using Location = CacheLocation;
  using Params = MlaDeviceParams<FwdWork<MlaTraits>>;
  static constexpr KernelKind kKind = k.kind;
  static constexpr bool kIsCache = true;
  static constexpr bool kIsMasked = true;
  static constexpr bool kHasScales = false;
  static constexpr bool kTransposesV = false;
  static constexpr bool kConverts = k.converts();  // latent columns, as e4m3 in the cache
  // The left PV waits for S of the next K tile, so that it runs during the softmax, when the tensor
  // cores have nothing else to do: 128 heads, 64 x 4k 175 -> 167 us (H200, 2026-11-27). WHY not the
  // right one, whose ring has a stage less: 182 us. WHY not with e4m3, which is converted then: 7 %
  // slower.
  static constexpr bool kLeftWaits = !kConverts;
  // Sinks enter where a tile ends (scores.h); there are no row maxima.
  static constexpr bool kHasRowOptions = false;

  static constexpr int kHeadDim = k.head_dim;
  static constexpr int kHeadDimV = k.head_dim_v;
  static constexpr int kTileN = k.tile_n;
  static constexpr int kStages = k.stages;
  static constexpr int kWarpgroups = k.consumer_warpgroups;  // that have rows of their own
  static constexpr int kValueKeys = kTileN;
  static constexpr int kMostSkipped = 0;

  // Each of two warpgroups has half of the columns of O.
  static constexpr int kOutputWarpgroups = 2;
  static constexpr int kOutputColumns = kHeadDimV / kOutputWarpgroups;

  static constexpr int kSlice = kSliceColumns;
  static constexpr int kRawSlice = kSlice;
  static constexpr int kRawColumns = kHeadDim;
  static constexpr int kRawColumnsV = kHeadDimV;
  // WHY in 16 bits fewer stages of the right half: there is no room for more. S needs it last.
  static constexpr int kRightStages = k.right_stages();
  static constexpr int kRawStages = k.raw_stages;  // one for each half
  static constexpr int kHalfElements = kTileN * kOutputColumns;
  static constexpr int kRotaryElements = kTileN * kHeadDim;
  // Columns of a slice of 128 bytes of the latent columns as loaded; those of e4m3 have a scale.
  static constexpr int kSliceV = 128 / int(sizeof(ElementKv));
  // Latent columns of Q that stay in registers, the first ones; and all others.
  static constexpr int kHeldColumns = kOutputColumns;
  static constexpr int kSharedColumns = kHeadDimV - kHeldColumns + kHeadDim;
  static constexpr int kTileStages = 2;  // tiles that are known at a time

  static_assert(kTileN == kWarpgroupRows && kHeadDim == kTileN,
                "P has the size of rotary columns, and half of Q that of half of a K tile");

  using RowMajorAtom = cute::GMMA::Layout_K_SW128_Atom<Element>;
  template <int kRows, int kColumns>
  using RowMajor = decltype(cute::tile_to_shape(
      RowMajorAtom{}, cute::Shape<cute::Int<kRows>, cute::Int<kColumns>>{}));
  // Half of the latent columns as the B operand (columns, keys) of P V.
  using SmemLayoutV =
      decltype(cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Element>{},
                                   cute::Shape<cute::Int<kOutputColumns>, cute::Int<kTileN>>{},
                                   cute::Step<cute::_2, cute::_1>{}));

  using MmaHeldS = decltype(cute::make_tiled_mma(register_atom<Element, kTileN, Major::K>()));
  using MmaS = decltype(cute::make_tiled_mma(shared_atom<Element, kTileN, Major::K>()));
  // WHY 128 columns, not all 256: ptxas (13.0) compiles no instruction with 128 sums for 512
  // threads.
  static constexpr int kProductColumns = 128;
  using MmaO = decltype(cute::make_tiled_mma(shared_atom<Element, kProductColumns, Major::MN>()));
  static constexpr int kHeldSteps = kHeldColumns / kStepColumns<Element>;
  static constexpr int kRotarySteps = kHeadDim / kStepColumns<Element>;
  static constexpr int kOutputSteps = kTileN / kStepColumns<Element>;
};

}  // namespace fa3
