// Two CTAs of a cluster add up accumulators, of a warpgroup in each: a thread sends its values to
// the thread of the same number, and adds what that one has sent.
#pragma once

#include "config/slices.h"
#include "device/cluster.h"
#include "device/math.h"

namespace fa3 {

// All threads of a warpgroup must call it. received: what the other CTA sends here. full: it has
// arrived (1 + bytes). empty: the other CTA has read what this one sent before (4). phase: of this
// exchange, 0 at first. zero: a 0 that ptxas does not know.
// INVARIANT: a + b = b + a, so both CTAs have the same bits.
template <int kFours, class Fragment>
CUTE_DEVICE void add_from_other_cta(float4 (&received)[kFours][kWarpgroupThreads], Mbarrier& full,
                                    Mbarrier& empty, uint32_t phase, int zero, int thread,
                                    Fragment& acc) {
  int const other = 1 - cluster_rank();
  auto values = cute::recast<float4>(acc);
  if (thread == 0) {
    full.arrive_and_expect_tx(sizeof(received));
  }
  empty.wait(phase ^ 1);
  uint32_t const target = remote_address(other, &received[0][thread]);
  uint32_t const remote_full = remote_address(other, &full);
  CUTE_UNROLL
  for (int i = 0; i < kFours; ++i) {
    send_async(target + i * kWarpgroupThreads * int(sizeof(float4)), values(i), remote_full);
  }
  full.wait(phase);
  uint32_t read = 0;
  CUTE_UNROLL
  for (int i = 0; i < kFours; ++i) {
    float4 const sent = received[i][thread];
    read |= __float_as_uint(sent.x);
    values(i).x += sent.x;
    values(i).y += sent.y;
    values(i).z += sent.z;
    values(i).w += sent.w;
  }
  // TRAP: a load is issued before the arrival that follows it, but may end after the other CTA has
  // sent its next values. So the arrival depends on what all lanes have loaded.
  bool const never = __any_sync(kWholeWarp, (read & uint32_t(zero)) != 0);
  if (thread % 32 == 0) {
    arrive_remote(other, empty, never);
  }
}

}  // namespace fa3
