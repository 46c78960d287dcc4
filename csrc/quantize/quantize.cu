// A CTA processes a tile of rows of one head. Scales by block take one pass: the CTA loads its
// rows, rotates them, keeps them in shared memory while it finds the largest value, casts them and
// writes them. Scales by head or tensor take two passes: the first finds the largest values, the
// second casts.
#include <algorithm>

#include "device/barriers.h"
#include "launch/launch.h"
#include "quantize/tile_rows.h"

namespace fa3 {
namespace {

constexpr int kMostThreads = 768;
// The most threads per CTA; more would spill registers.
template <class Element>
constexpr int kThreads = sizeof(Element) == 4 ? 512 : kMostThreads;
// Fragments per thread, as long as the CTA stays within its thread limit. Few fragments keep the
// wait at the barrier short; with several, one is loaded while another is rotated.
constexpr int kThreadFragments = 4;
constexpr int kMostStashBytes = 226 * 1024;  // a CTA may have 227 KiB
constexpr int kTwoPassTile = 128;            // rows

// kStash: one pass. kReadTwice: one pass for tiles that do not fit in shared memory and are read
// again, mostly from L2. kMaxima, kCast: the first and the second of two passes.
enum class Pass { kStash, kReadTwice, kMaxima, kCast };

CUTE_DEVICE char* dynamic_memory() {
  extern __shared__ __align__(128) char memory[];
  return memory;
}

// The largest value over all threads of the CTA. Bits of non-negative floats have the same order as
// the floats.
CUTE_DEVICE uint32_t max_over_cta(uint32_t own, uint32_t* warp_maxima) {
  int const lane = int(threadIdx.x) % 32;
  uint32_t const warp_maximum = __reduce_max_sync(0xffffffffu, own);
  if (lane == 0) {
    warp_maxima[threadIdx.x / 32] = warp_maximum;
  }
  __syncthreads();
  return __reduce_max_sync(0xffffffffu, lane < int(blockDim.x) / 32 ? warp_maxima[lane] : 0);
}

template <class Element, bool kIsRotated, Pass kPass>
CUTE_DEVICE void quantize(QuantizeParams const& p, uint32_t* warp_maxima) {
  QuantizeShape const& s = p.shape;
  QuantizeWork const work = work_of_cta(s, p.cu_seqlens, p.seqused, int(blockIdx.x));
  QuantizeTile const& tile = work.tile;
  TileRows<Element, kIsRotated> const rows(p, work);
  Stash const stash(dynamic_memory(), p.stash_fragments, Stash::kQuads<Element, kIsRotated>);
  bool const writes = writes_scale(s, tile, work.head);
  int64_t const index = scale_index(s, tile, work.head);

  uint32_t maximum = 0;
  if constexpr (kPass == Pass::kCast) {
    maximum = tile.used > 0 || writes ? __ldg(p.maxima + index) : 0;
  } else if (tile.used > 0) {
    rows.load([&](auto const& fragment, auto const& piece, int row) {
      maximum = max(maximum, __float_as_uint(fragment.largest()));
      if constexpr (kPass == Pass::kStash) {
        stash.write(fragment, piece.number(row));
      }
    });
    maximum = max_over_cta(maximum, warp_maxima);
  }
  if constexpr (kPass == Pass::kMaxima) {
    if (threadIdx.x == 0 && maximum > 0) {
      atomicMax(p.maxima + index, maximum);
    }
    return;
  }
  float const scale = scale_of(maximum);
  if (threadIdx.x == 0 && writes) {
    p.scales[index] = s.block > 0 && tile.used == 0 ? 1.f : scale;
  }
  auto const cast = [&](auto const& fragment, auto const& piece, int row) {
    rows.store(fragment.cast(scale), piece, row);
  };
  if constexpr (kPass == Pass::kStash) {
    rows.read(stash, cast);
  } else {
    rows.load(cast);
  }
  rows.store_zeros();
}

template <class Element, bool kIsRotated, Pass kPass>
__global__ void __launch_bounds__(kThreads<Element>)
    quantize_kernel(QuantizeParams const __grid_constant__ p) {
  __shared__ uint32_t warp_maxima[kMostThreads / 32];
  wait_for_earlier_launches();
  allow_later_launches();
  quantize<Element, kIsRotated, kPass>(p, warp_maxima);
}

// ----------------------------------------------------------------------------------------- launch
// Fragments per CTA.
int64_t fragments_of(QuantizeShape const& s) {
  return int64_t(min_of(s.tile, s.rows)) * fragments_of_row(s.head_dim);
}

template <class Element, bool kIsRotated, Pass kPass>
void launch_pass(QuantizeParams params, void* stream) {
  static std::atomic<uint64_t> devices_ready{0};
  auto* const kernel = quantize_kernel<Element, kIsRotated, kPass>;
  QuantizeShape const& s = params.shape;
  int64_t const fragments =
      std::min<int64_t>(fragments_of(s), kThreads<Element> * kThreadFragments);
  int const threads = round_up(ceil_div(int(fragments), kThreadFragments), 32);
  LaunchShape shape{"quantize_fp8", int(s.tiles() * s.heads), threads, 0};
  if constexpr (kPass == Pass::kStash) {
    shape.shared_bytes = kMostStashBytes;
    allow_shared_memory(kernel, shape, devices_ready);
    params.stash_rows = min_of(s.tile, s.rows);
    params.stash_fragments = int(fragments_of(s));
    shape.shared_bytes = params.stash_fragments * Stash::kFragmentBytes<Element, kIsRotated>;
  }
  launch_early(kernel, shape, params, stream);
}

template <class Element, bool kIsRotated>
void launch_passes(QuantizeParams const& params, void* stream) {
  int64_t const bytes = fragments_of(params.shape) * Stash::kFragmentBytes<Element, kIsRotated>;
  if (params.shape.block <= 0) {
    launch_pass<Element, kIsRotated, Pass::kMaxima>(params, stream);
    launch_pass<Element, kIsRotated, Pass::kCast>(params, stream);
  } else if (bytes <= kMostStashBytes) {
    launch_pass<Element, kIsRotated, Pass::kStash>(params, stream);
  } else {
    launch_pass<Element, kIsRotated, Pass::kReadTwice>(params, stream);
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
