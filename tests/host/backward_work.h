// What a CTA of the backward works on, computed on the CPU by the kernel's own code
// (backward/work.h).
#pragma once

#include <array>
#include <vector>

#include "bwd_variants.h"
#include "device/cute.h"

#include "backward/work.h"
#include "packed_tables.h"

namespace fa3::host {

// What backward/work.h reads of BwdTraits, for a kind of which the tile may have no variant.
template <class Config, KernelKind kProblemKind>
struct WorkTraits {
  static constexpr BwdConfig k = Config::k;
  static constexpr int kTileM = Config::k.tile_m;
  static constexpr int kTileN = Config::k.cta_keys();
  static constexpr int kClusterSize = Config::k.cluster_size;
  static constexpr KernelKind kKind = kProblemKind;
  static constexpr bool kHasLists = kProblemKind.has_lists();
  static constexpr int kTileClusters = kHasLists ? k.order_keys() / k.tile_n() : 1;
  static constexpr bool kSplitsColumns = k.column_ctas() > 1;
  using Params = cute::conditional_t<kHasLists, ListedBwdParams, BwdDeviceParams>;
};

struct Step {
  int head;
  int m;
  bool is_masked;
  int64_t tile;  // in the workspaces
  int predecessors;
};

struct CtaWork {
  BwdWork work;
  std::vector<Step> steps;
};

// The schedule, the tables of packed sequences, and the work of every CTA.
struct BackwardWork {
  BwdSchedule schedule;
  std::vector<SequenceTiles> buffer;  // 32-byte aligned
  PackedTables tables;
  std::vector<CtaWork> ctas;
};

inline ListedBwdParams work_params(BwdParams const& params, MaskLists const& lists) {
  FwdProblem const& problem = params.problem;
  BwdSchedule const& schedule = params.schedule;
  ListedBwdParams p{};
  p.listed = lists;
  p.seqlen = SeqlenPair{problem.seqlen_q, problem.seqlen_k};
  p.m_tiles = schedule.m_tiles;
  p.works = params.schedule.works;
  p.heads_q = problem.heads_q;
  p.group = problem.heads_q / problem.heads_k;
  p.mask = problem.mask;
  p.is_deterministic = problem.deterministic;
  p.dq_is_zeroed = schedule.dq_is_zeroed;
  return p;
}

template <class Traits>
void add_work_of_ctas(typename Traits::Params const& p, BackwardWork& result) {
  for (int index = 0; index < result.schedule.works * Traits::kClusterSize; ++index) {
    int const number = index / Traits::kClusterSize;
    int const rank = index % Traits::kClusterSize;
    BwdWorkOf<Traits> const work = work_of_number<Traits>(p, number, rank);
    CtaWork& cta = result.ctas.emplace_back(CtaWork{work, {}});
    if (work.steps() == 0) {
      continue;
    }
    for (StepsOf<Traits> steps(work); steps.valid(); steps.next()) {
      cta.steps.push_back(Step{steps.head, steps.m, steps.template is_masked<Traits>(),
                               steps.tile(p), predecessors<Traits>(p, work, steps.order_number())});
    }
  }
}

template <class Config>
BackwardWork backward_work(BwdParams params, MaskLists const& lists) {
  BackwardWork result;
  result.schedule = params.schedule;
  ListedBwdParams p = work_params(params, lists);
  if (params.problem.is_packed) {
    result.buffer.resize(params.schedule.table_ints * sizeof(int) / sizeof(SequenceTiles) + 1);
    params.tables = reinterpret_cast<int*>(result.buffer.data());
    PrepareParams const prepare = prepare_params(params);
    fill_tables(prepare);
    p.tables = prepare.tables;
    p.tickets =
        TicketOrder{FastDiv(params.problem.heads_k), FastDiv(params.schedule.section_heads)};
    result.tables = prepare.tables;
  } else {
    p.order = key_tile_order(params.problem, params.schedule);
  }
  switch (params.problem.kind.mask) {
    case MaskKind::kFull:
      add_work_of_ctas<WorkTraits<Config, kFullKernel>>(p, result);
      break;
    case MaskKind::kCausal:
      add_work_of_ctas<WorkTraits<Config, kCausalKernel>>(p, result);
      break;
    case MaskKind::kInterval:
      add_work_of_ctas<WorkTraits<Config, kGeneralKernel>>(p, result);
      break;
    case MaskKind::kLists:
      if constexpr (Config::k.kind.has_lists()) {
        add_work_of_ctas<WorkTraits<Config, kListsKernel>>(p, result);
      }
      break;
  }
  return result;
}

}  // namespace fa3::host
