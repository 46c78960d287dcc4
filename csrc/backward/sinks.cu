// A CTA sums the gradient of one head's sink over all rows, in a fixed order, from the LSE and
// delta that the preprocess kernel stored.
#include "backward/sinks.h"

#include "backward/params.h"
#include "core/softmax_math.h"
#include "device/barriers.h"
#include "launch/launch.h"
#include "device/math.h"

namespace fa3 {
namespace {

constexpr int kSinkThreads = 1024;

// The contribution of one row. With an infinite LSE the row does not exist, or sees no key and no
// sink.
CUTE_DEVICE float sink_gradient(float sink_log2, float lse_log2, float delta) {
  return lse_log2 == INFINITY ? 0.f : exp2_approx(sink_log2 - lse_log2) * delta;
}

// The sum over all threads, for thread 0.
CUTE_DEVICE float sum_over_threads(float x) {
  __shared__ float warp_sums[kSinkThreads / 32];
  int const thread = int(threadIdx.x);
  x = sum_over_lanes<32>(x);
  if (thread % 32 == 0) {
    warp_sums[thread / 32] = x;
  }
  __syncthreads();
  return thread < 32 ? sum_over_lanes<32>(warp_sums[thread]) : 0.f;
}

__global__ void __launch_bounds__(kSinkThreads)
    backward_sinks_kernel(BwdSinkParams const __grid_constant__ p) {
  wait_for_earlier_launches();
  int const head = int(blockIdx.x);
  int const fours_of_pair = int(p.m_fours.divisor);
  // Rounded as the LSE was (preprocess.h): where the LSE is that of the sink alone, P is exactly 1.
  float const sink_log2 = __fmul_rn(p.sinks[head], kLog2E);
  float sum = 0.f;
  for (int i = int(threadIdx.x); i < p.fours; i += kSinkThreads) {
    int const batch = p.m_fours.div(i);
    int64_t const pair = int64_t(batch) * p.heads_q + head;
    int64_t const at = pair * fours_of_pair + i - batch * fours_of_pair;
    float4 const lse = reinterpret_cast<float4 const*>(p.lse_log2)[at];
    float4 const delta = reinterpret_cast<float4 const*>(p.delta)[at];
    sum += sink_gradient(sink_log2, lse.x, delta.x) + sink_gradient(sink_log2, lse.y, delta.y) +
           sink_gradient(sink_log2, lse.z, delta.z) + sink_gradient(sink_log2, lse.w, delta.w);
  }
  sum = sum_over_threads(sum);
  if (threadIdx.x == 0) {
    p.dsinks[head] = -sum;
  }
  allow_later_launches();
}

BwdSinkParams sink_params(BwdParams const& p) {
  constexpr int kRows = 4;
  int const m_fours = p.schedule.m_tiles * (p.schedule.tile_m / kRows);
  BwdSinkParams s;
  s.sinks = p.sinks;
  s.dsinks = p.dsinks;
  s.lse_log2 = p.lse_log2;
  s.delta = p.delta;
  s.heads_q = p.problem.heads_q;
  s.fours = m_fours * (p.problem.is_packed ? 1 : p.problem.batch);
  s.m_fours = FastDiv(m_fours);
  return s;
}

}  // namespace

void launch_sinks(BwdParams const& params, void* stream) {
  LaunchShape const shape{"sinks", params.problem.heads_q, kSinkThreads, 0};
  launch_early(backward_sinks_kernel, shape, sink_params(params), stream);
}

}  // namespace fa3
