// The largest value of the CTAs of a cluster, which have the rows of a block together.
//
// Each warp writes its maximum to the shared memory of all CTAs; an mbarrier there counts the
// bytes. So nobody meets at a barrier, not even the warps of a CTA, and a CTA that has the maxima
// of the last round may end: nothing more is written to it.
#pragma once

#include "device/cluster.h"

namespace fa3 {

constexpr int kMostClusterCtas = 8;  // that every GPU with clusters takes

// Of a CTA among those that have a block together: all of its cluster or a team of them.
struct ClusterPlace {
  int rank;   // in the team
  int ctas;   // of the team
  int begin;  // the first one's rank in the cluster
};

// kHasTeams: they change. WHY not always so: to expect the maxima of a round in it, not in the one
// before the last, takes registers (dense, head dim 256 spills).
template <int kMostCtaWarps, bool kHasTeams>
class ClusterMaximum {
  static constexpr int kWords = kMostClusterCtas * kMostCtaWarps;
  static_assert(kWords % 32 == 0, "all lanes read as many");
  // Of a warp that is not in the team: 0.
  uint32_t of_warps_[2][kWords];
  uint64_t arrived_[2];

 public:
  // The other CTAs may be sent to after the cluster has met: cute::cluster_wait().
  CUTE_DEVICE void start(int ctas) {
    clear(0);
    if (threadIdx.x == 0) {
      for (uint64_t& barrier : arrived_) {
        Mbarrier::init(&barrier, 1);
      }
      fence_barrier_init();
      if (!kHasTeams) {
        expect(arrived_[0], ctas);
        expect(arrived_[1], ctas);
      }
    }
    __syncwarp();
    cute::cluster_arrive();
  }

  // Before the first round of a smaller team; barriers of the CTA stand before and behind.
  CUTE_DEVICE void make_team(int ctas) { clear(ctas * int(blockDim.x) / 32); }

  // round: 0, 1, ... of the CTAs of a team, which were together in all rounds before. INVARIANT:
  // two buffers and mbarriers in turns do. A warp sends in round n + 2 when it has all maxima of
  // round n + 1, which the others sent after they had read those of n.
  CUTE_DEVICE uint32_t of_all(uint32_t bits, int round, ClusterPlace const& team) {
    int const lane = int(threadIdx.x) % 32;
    int const warps = int(blockDim.x) / 32;
    int const own = team.rank * warps + int(threadIdx.x) / 32;
    uint32_t(&of_warps)[kWords] = of_warps_[round % 2];
    uint64_t& arrived = arrived_[round % 2];
    uint32_t const of_warp = __reduce_max_sync(0xffffffffu, bits);
    if (lane < team.ctas) {
      send(team.begin + lane, &of_warps[own], of_warp, arrived);
    }
    if (kHasTeams && threadIdx.x == 0) {
      expect(arrived, team.ctas);  // bytes that have come already count too
    }
    wait(arrived, uint32_t(round / 2 % 2));
    if (!kHasTeams && threadIdx.x == 0) {
      expect(arrived, team.ctas);  // of round + 2
    }
    uint32_t largest = 0;
    CUTE_UNROLL
    for (int i = 0; i < kWords / 32; ++i) {
      largest = max(largest, of_warps[lane + 32 * i]);
    }
    return __reduce_max_sync(0xffffffffu, largest);
  }

 private:
  CUTE_DEVICE void clear(int first) {
#pragma unroll 1
    for (int i = first + int(threadIdx.x); i < kWords; i += int(blockDim.x)) {
      of_warps_[0][i] = of_warps_[1][i] = 0;
    }
  }

  static CUTE_DEVICE void expect(uint64_t& barrier, int ctas) {
    uint32_t const words = uint32_t(ctas) * blockDim.x / 32;
    Mbarrier::arrive_and_expect_tx(&barrier, words * uint32_t(sizeof(uint32_t)));
  }

  static CUTE_DEVICE void send(int rank, void* target, uint32_t word, uint64_t& arrived) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
                 :
                 : "r"(shared_address_of(rank, target)), "r"(word),
                   "r"(shared_address_of(rank, &arrived))
                 : "memory");
  }

  static CUTE_DEVICE void wait(uint64_t& barrier, uint32_t phase) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(cute::cast_smem_ptr_to_uint(&barrier)),
        "r"(phase)
        : "memory");
  }
};

}  // namespace fa3
