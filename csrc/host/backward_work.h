// What a CTA of the backward works on, computed on the CPU by the kernel's own code
// (backward/work.h).
#pragma once

#include <array>
#include <vector>

#include "bwd_variants.h"
#include "device/cute.h"

// The grid of a kernel: nvcc's name, which g++ does not have.
inline thread_local dim3 gridDim;

#include "backward/work.h"

namespace fa3::host {

// What backward/work.h reads of BwdTraits; those need a dtype too.
template <class Tile, bool kIsCausal>
struct WorkTraits {
  static constexpr int kTileM = Tile::kTileM;
  static constexpr int kTileN = bwd_tile_n<Tile>();
  static constexpr int kClusterSize = Tile::kClusterSize;
  static constexpr bool kCausal = kIsCausal;
};

struct Step {
  int head;
  int m;
  bool is_masked;
  int64_t tile;  // the place in the workspaces
};

struct CtaWork {
  BwdWork work;
  std::vector<Step> steps;
};

template <class Traits>
std::vector<CtaWork> work_of_ctas(FwdProblem const& problem, BwdSchedule const& schedule) {
  BwdDeviceParams p{};
  p.seqlen = SeqlenPair{problem.seqlen_q, problem.seqlen_k};
  p.m_tiles = schedule.m_tiles;
  p.heads_q = problem.heads_q;
  p.group = problem.heads_q / problem.heads_k;
  p.order = key_tile_order(problem, schedule);
  int flag = 0;
  p.dq_flags = problem.deterministic ? &flag : nullptr;
  gridDim.x = unsigned(schedule.grid);
  std::vector<CtaWork> ctas;
  for (int index = 0; index < schedule.grid; ++index) {
    int const number = index / Traits::kClusterSize;
    int const rank = index % Traits::kClusterSize;
    CtaWork& cta = ctas.emplace_back(CtaWork{work_of_cta<Traits>(p, number, rank), {}});
    for (BwdSteps steps(cta.work); steps.valid(); steps.next()) {
      cta.steps.push_back(Step{steps.head, steps.m, steps.is_masked(), steps.tile(p)});
    }
  }
  return ctas;
}

}  // namespace fa3::host
