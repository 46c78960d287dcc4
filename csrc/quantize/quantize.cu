// A CTA has a tile of rows of one head. Scales by block, one pass: it loads its rows, rotates them,
// keeps them in shared memory while it finds the largest value, casts them and writes them. Scales
// by head and tensor: a first pass finds the largest values, a second one casts.
#include <algorithm>

#include "device/barriers.h"
#include "launch/launch.h"
#include "quantize/tile_rows.h"

namespace fa3 {
namespace {

template <class Element>
constexpr int kMostWarps = sizeof(Element) == 4 ? 16 : 24;  // more would spill
// Warp tiles of a warp, unless that takes too many warps: few for short waits at the barrier.
constexpr int kTilesOfWarp = 4;
constexpr int kMostSharedBytes = 226 * 1024;  // of the 227 KiB of a CTA
constexpr int kTwoPassTile = 128;             // rows

// kKeep: one pass. kReadTwice: the same for tiles that do not fit in shared memory, which are read
// again, most of them from L2. kMaxima, kCast: the first and the second of two passes.
enum class Pass { kKeep, kReadTwice, kMaxima, kCast };

// The largest of what the threads of the CTA have. Bits of floats that are not negative are ordered
// as the floats are.
CUTE_DEVICE uint32_t largest_of_cta(uint32_t own, uint32_t* of_warps) {
  int const lane = int(threadIdx.x) % 32;
  uint32_t const of_warp = __reduce_max_sync(0xffffffffu, own);
  if (lane == 0) {
    of_warps[threadIdx.x / 32] = of_warp;
  }
  __syncthreads();
  return __reduce_max_sync(0xffffffffu, lane < int(blockDim.x) / 32 ? of_warps[lane] : 0);
}

template <class Element, bool kIsRotated, Pass kPass>
CUTE_DEVICE void quantize(QuantizeParams const& p, uint32_t* of_warps) {
  QuantizeShape const& s = p.shape;
  QuantizeWork const work = work_of_cta(s, p.cu_seqlens, p.seqused, int(blockIdx.x));
  TileRows<Element, kIsRotated> const rows(p, work);
  bool const writes = writes_scale(s, work.tile, work.head);
  int64_t const index = scale_index(s, work.tile, work.head);

  uint32_t maximum = 0;
  if constexpr (kPass == Pass::kCast) {
    maximum = work.tile.used > 0 || writes ? __ldg(p.maxima + index) : 0;
  } else if (work.tile.used > 0) {
    rows.load([&](auto const& fragment, auto const&, int, auto& tile) {
      maximum = max(maximum, __float_as_uint(fragment.largest()));
      if constexpr (kPass == Pass::kKeep) {
        fragment.keep(tile);
      }
    });
    maximum = largest_of_cta(maximum, of_warps);
  }
  if constexpr (kPass == Pass::kMaxima) {
    if (threadIdx.x == 0 && maximum > 0) {
      atomicMax(p.maxima + index, maximum);
    }
    return;
  }
  float const scale = scale_of(maximum);
  if (threadIdx.x == 0 && writes) {
    p.scales[index] = s.block > 0 && work.tile.used == 0 ? 1.f : scale;
  }
  auto const cast = [&](auto const& fragment, auto const& piece, int row, auto const&) {
    rows.store(fragment.cast(scale), piece, row);
  };
  if constexpr (kPass == Pass::kKeep) {
    rows.restore(cast);
  } else {
    rows.load(cast);
  }
  rows.store_zeros();
}

template <class Element, bool kIsRotated, Pass kPass>
__global__ void __launch_bounds__(32 * kMostWarps<Element>)
    quantize_kernel(QuantizeParams const __grid_constant__ p) {
  __shared__ uint32_t of_warps[kMostWarps<Element>];
  wait_for_earlier_launches();
  allow_later_launches();
  quantize<Element, kIsRotated, kPass>(p, of_warps);
}

// ----------------------------------------------------------------------------------------- launch
// How a CTA shares the rows of a tile.
struct CtaShape {
  int warps;
  int64_t tiles;       // of a warp, in shared memory
  int64_t tile_bytes;  // of a warp tile

  template <class Element>
  static CtaShape of(QuantizeShape const& s) {
    int const rows = min_of(s.tile, s.rows);
    int64_t const all = tiles_of_warp(s.head_dim, rows, 1);
    int const warps =
        int(std::min<int64_t>((all + kTilesOfWarp - 1) / kTilesOfWarp, kMostWarps<Element>));
    return {warps, std::max<int64_t>(tiles_of_warp(s.head_dim, rows, warps), kTilesAhead),
            sizeof(typename TileRows<Element, false>::Tile)};
  }

  int64_t shared_bytes() const { return warps * tiles * tile_bytes; }
};

template <class Element, bool kIsRotated, Pass kPass>
void launch_pass(QuantizeParams params, CtaShape cta, void* stream) {
  static std::atomic<uint64_t> devices_ready{0};
  auto* const kernel = quantize_kernel<Element, kIsRotated, kPass>;
  if (kPass != Pass::kKeep) {
    cta.tiles = kTilesAhead;
  }
  params.tiles_of_warp = int(cta.tiles);
  LaunchShape shape{"quantize_fp8", int(params.shape.tiles() * params.shape.heads), 32 * cta.warps,
                    kMostSharedBytes};
  allow_shared_memory(kernel, shape, devices_ready);
  shape.shared_bytes = int(cta.shared_bytes());
  launch_early(kernel, shape, params, stream);
}

template <class Element, bool kIsRotated>
void launch_passes(QuantizeParams const& params, void* stream) {
  CtaShape const cta = CtaShape::of<Element>(params.shape);
  if (params.shape.block <= 0) {
    launch_pass<Element, kIsRotated, Pass::kMaxima>(params, cta, stream);
    launch_pass<Element, kIsRotated, Pass::kCast>(params, cta, stream);
  } else if (cta.shared_bytes() <= kMostSharedBytes) {
    launch_pass<Element, kIsRotated, Pass::kKeep>(params, cta, stream);
  } else {
    launch_pass<Element, kIsRotated, Pass::kReadTwice>(params, cta, stream);
  }
}

template <class Element>
void launch_for(QuantizeParams const& params, void* stream) {
  params.is_rotated ? launch_passes<Element, true>(params, stream)
                    : launch_passes<Element, false>(params, stream);
}

}  // namespace

void launch_quantize(QuantizeParams params, void* stream) {
  QuantizeShape& shape = params.shape;
  shape.set_tile(shape.block > 0 ? shape.block : kTwoPassTile);
  bind_thread("quantize_fp8", 1, 0);
  switch (params.dtype) {
    case Dtype::kFloat16:
      return launch_for<cutlass::half_t>(params, stream);
    case Dtype::kBFloat16:
      return launch_for<cutlass::bfloat16_t>(params, stream);
    default:
      return launch_for<float>(params, stream);
  }
}

}  // namespace fa3
