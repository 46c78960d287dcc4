#include "dispatch/plan_backward.h"

#include <algorithm>
#include <iterator>

#include "bwd_variants.h"
#include "core/int_math.h"

namespace fa3 {
namespace {

// Share of L2 that Q, dO and the accumulator of dQ of one section should fit into: each half of L2
// keeps what its CTAs read (backward/README.md, what was tried).
constexpr int kSectionL2Percent = 30;

// (KV head, batch) pairs of a section, of a causal or a deterministic launch: what fits into L2,
// but at least a tile for every multiprocessor. Deterministic: two, so that fewer CTAs of a head
// wait for each other when they start.
int choose_section_pairs(FwdProblem const& problem, BwdVariantFacts const& facts,
                         BwdSchedule const& schedule) {
  int64_t const pairs = int64_t(problem.heads_k) * problem.batch;
  int64_t const row_bytes = int64_t(facts.head_dim) * (2 + 2 + 4);
  int64_t const pair_bytes = problem.seqlen_q * row_bytes * (problem.heads_q / problem.heads_k);
  int64_t const fitting = problem.device.l2_bytes * kSectionL2Percent / 100 / pair_bytes;
  int const ctas = problem.device.sm_count * (problem.deterministic ? 2 : 1);
  int64_t const least = ceil_div(ctas, schedule.n_tiles);
  return int(std::clamp<int64_t>(std::max(fitting, least), 1, pairs));
}

}  // namespace

int find_backward_variant(Dtype dtype, bool causal, int64_t head_dim) {
  int best = -1;
  for (int i = 0; i < int(std::size(kBwdVariants)); ++i) {
    BwdVariantFacts const& facts = kBwdVariants[i];
    bool const fits = facts.dtype == dtype && (facts.mask == MaskKind::kCausal) == causal &&
                      facts.head_dim >= head_dim;
    if (fits && (best < 0 || facts.head_dim < kBwdVariants[best].head_dim)) {
      best = i;
    }
  }
  return best;
}

BwdPlan plan_backward(FwdProblem const& problem) {
  BwdPlan plan;
  plan.variant = find_backward_variant(problem.dtype, problem.causal, problem.head_dim);
  BwdVariantFacts const& facts = kBwdVariants[plan.variant];
  BwdSchedule& schedule = plan.schedule;
  schedule.m_tiles = ceil_div(problem.seqlen_q, facts.tile_m);
  schedule.n_tiles = ceil_div(problem.seqlen_k, facts.tile_n);
  schedule.grid = schedule.n_tiles * problem.heads_k * problem.batch * facts.cluster_size;
  schedule.rows = int64_t(schedule.m_tiles) * facts.tile_m * problem.heads_q * problem.batch;
  schedule.dq_floats = schedule.rows * facts.dq_columns;
  int64_t const flags = schedule.rows / facts.tile_m * facts.dq_adders;
  schedule.flags = problem.deterministic ? flags + 1 : 0;
  schedule.section_pairs = choose_section_pairs(problem, facts, schedule);
  return plan;
}

}  // namespace fa3
