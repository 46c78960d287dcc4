// The slot Columns: whether a CTA has all columns of Q, K, V and O, or two CTAs of a cluster split
// them. Then each computes S of its columns, sends it to the other and adds what the other has
// sent, so that both have the same S and P. A warpgroup exchanges S with the warpgroup of the same
// number, each thread with the thread of the same number.
#pragma once

#include "device/cluster_sum.h"

namespace fa3 {

struct AllColumns {
  // Barriers are ready.
  CUTE_DEVICE static void begin() { __syncthreads(); }

  template <class Storage, class FragmentS>
  CUTE_DEVICE static void complete(Storage&, int, int, int, FragmentS&) {}

  CUTE_DEVICE static void end() {}

  // The first column of this CTA.
  CUTE_DEVICE static int first_column() { return 0; }

  // CTAs that take tiles, and the number of this one among them.
  CUTE_DEVICE static int ctas() { return int(gridDim.x); }
  CUTE_DEVICE static int own_cta() { return int(blockIdx.x); }

  // The ticket after the one that this CTA drew last.
  CUTE_DEVICE static int draw(int, int* counter) { return atomicAdd(counter, 1); }

  // A slot of partial results.
  CUTE_DEVICE static int slot(int shared) { return shared; }
};

// Both CTAs of a cluster take the same tiles: cluster c of n takes tiles c, c + n, c + 2n, ...
template <class Traits>
struct SharedColumns {
  static constexpr int kCtas = 2;
  static_assert(Traits::k.column_ctas() == kCtas);

  uint32_t phase = 0;

  CUTE_DEVICE static void begin() { cluster_sync(); }

  // Adds the S that the other CTA has sent. All threads of a warpgroup must call it. zero: a 0
  // that ptxas does not know.
  template <class Storage, class FragmentS>
  CUTE_DEVICE void complete(Storage& shared, int zero, int warpgroup, int thread, FragmentS& tSrS) {
    add_from_other_cta(shared.sent_scores[warpgroup], shared.scores_full[warpgroup],
                       shared.scores_empty[warpgroup], phase, zero, thread, tSrS);
    phase ^= 1;
  }

  // The other CTA sends nothing more to this one, nor does it arrive at its barriers.
  CUTE_DEVICE static void end() { cluster_sync(); }

  // That of Q and K is that of V and O.
  CUTE_DEVICE static int first_column() { return cluster_rank() * Traits::kHeadDimV; }

  CUTE_DEVICE static int ctas() { return int(gridDim.x) / kCtas; }
  CUTE_DEVICE static int own_cta() { return int(blockIdx.x) / kCtas; }
  CUTE_DEVICE static int draw(int before, int*) { return before + ctas(); }
  CUTE_DEVICE static int slot(int shared) { return shared * kCtas + cluster_rank(); }
};

template <class Traits>
using ColumnsOf =
    cute::conditional_t<(Traits::k.column_ctas() > 1), SharedColumns<Traits>, AllColumns>;

}  // namespace fa3
