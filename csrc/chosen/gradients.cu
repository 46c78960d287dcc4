// Gradients of attention to keys that each query chooses by index. A CTA has a query and up to 64
// query heads of a KV head: Q and dO stay in shared memory, tiles of 64 chosen keys pass through
// it (gather.h), and two warpgroups compute the five products (math.h). Gradients of keys are added
// to float32 sums in global memory by all CTAs; another kernel rounds them.
//
// INVARIANT: indices and counts come from the device and may be nonsense; only rows that exist and
// are chosen are read, and no other sum is changed.
#include "chosen/gradients.h"

#include <type_traits>

#include "chosen/gather.h"
#include "chosen/math.h"
#include "launch/launch.h"

namespace fa3 {
namespace {

constexpr int kThreads = 3 * kWarpgroupThreads;
constexpr int kGatherRegisters = 40;
constexpr int kMathRegisters = 232;

template <class Traits>
__global__ void __launch_bounds__(kThreads, 1)
    chosen_gradients_kernel(ChosenGradientParams const __grid_constant__ p) {
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<ChosenStorage<Traits>*>(shared_bytes);
  if (threadIdx.x == 0) {
    shared.init_barriers();
  }
  __syncthreads();
  wait_for_earlier_launches();
  ChosenWork const work(p);
  int const thread = int(threadIdx.x) % kWarpgroupThreads;
  int const warpgroup = cutlass::canonical_warp_group_idx();
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<kGatherRegisters>();
    ChosenGather<Traits>{shared, p, work, thread}.run();
  } else {
    cutlass::arch::warpgroup_reg_alloc<kMathRegisters>();
    if (warpgroup == 1) {
      ChosenMath<Traits, 0>{shared, p, work, thread}.run();
    } else {
      ChosenMath<Traits, 1>{shared, p, work, thread}.run();
    }
  }
}

// ------------------------------------------------------------------------------------- rounding
constexpr int kRoundThreads = 256;
constexpr int kGroup = 16;  // columns of a thread

// Columns of a group in the order of sum_index() become columns in order.
template <class Element>
__global__ void __launch_bounds__(kRoundThreads)
    chosen_rounding_kernel(ChosenGradientParams const __grid_constant__ p) {
  wait_for_earlier_launches();
  int const width = p.widths.k + p.widths.v;
  int64_t const number = int64_t(blockIdx.x) * kRoundThreads + int(threadIdx.x);
  int64_t const row = number / (width / kGroup);
  int const column = int(number % (width / kGroup)) * kGroup;
  if (row >= int64_t(p.rows) * p.heads_k) {
    return;
  }
  auto const* const sums = reinterpret_cast<float4 const*>(p.sums + row * width + column);
  uint32_t words[kGroup / 2];
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    float4 const four = sums[i];
    words[i] = pack_two<Element>(four.x, four.y);
    words[4 + i] = pack_two<Element>(four.z, four.w);
  }
  bool const is_k = column < p.widths.k;
  Element* const target =
      is_k ? static_cast<Element*>(p.dk) + row * p.widths.k + column
           : static_cast<Element*>(p.dv) + row * p.widths.v + column - p.widths.k;
  reinterpret_cast<uint4*>(target)[0] = make_uint4(words[0], words[1], words[2], words[3]);
  reinterpret_cast<uint4*>(target)[1] = make_uint4(words[4], words[5], words[6], words[7]);
}

// --------------------------------------------------------------------------------------- launch
template <class Traits>
void launch_main(ChosenGradientParams const& p, void* stream) {
  constexpr int kBytes = int(sizeof(ChosenStorage<Traits>));
  static_assert(kBytes <= 227 * 1024);
  LaunchShape const shape{"chosen_gradients", p.queries * p.heads_k * p.head_blocks(), kThreads,
                          kBytes};
  static std::atomic<uint64_t> devices_ready{0};
  allow_shared_memory(chosen_gradients_kernel<Traits>, shape, devices_ready);
  if (shape.grid > 0) {
    launch_early(chosen_gradients_kernel<Traits>, shape, p, stream);
  }
}

constexpr ChosenWidths kLatents{64, 512, true};
constexpr ChosenWidths kNarrow{64, 64, false};
constexpr ChosenWidths kWide{128, 128, false};

template <class Element>
void launch(ChosenGradientParams const& p, void* stream) {
  auto const start = [&](auto const traits) {
    launch_main<typename decltype(traits)::type>(p, stream);
  };
  if (p.widths == kLatents) {
    start(std::type_identity<ChosenTraits<Element, kLatents.k, kLatents.v, true>>{});
  } else if (p.widths == kNarrow) {
    start(std::type_identity<ChosenTraits<Element, kNarrow.k, kNarrow.v, false>>{});
  } else {
    start(std::type_identity<ChosenTraits<Element, kWide.k, kWide.v, false>>{});
  }
  int64_t const groups = int64_t(p.rows) * p.heads_k * ((p.widths.k + p.widths.v) / kGroup);
  if (groups > 0) {
    int const grid = int((groups + kRoundThreads - 1) / kRoundThreads);
    launch_early(chosen_rounding_kernel<Element>,
                 LaunchShape{"chosen_rounding", grid, kRoundThreads, 0}, p, stream);
  }
}

}  // namespace

bool has_chosen_gradients(ChosenWidths const& widths) {
  return widths == kLatents || widths == kNarrow || widths == kWide;
}

void launch_chosen_gradients(ChosenGradientParams const& params, void* stream) {
  bind_thread("chosen_gradients", 1, 0);
  params.dtype == Dtype::kFloat16 ? launch<cutlass::half_t>(params, stream)
                                  : launch<cutlass::bfloat16_t>(params, stream);
}

}  // namespace fa3
