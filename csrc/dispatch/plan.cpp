#include "dispatch/plan.h"

#include <algorithm>

#include "core/block_range.h"
#include "core/int_math.h"
#include "core/row_packing.h"
#include "dispatch/variants.h"

namespace fa3 {
namespace {

constexpr int kElementBytes = 2;

// Share of L2 that the keys and values of one section of a causal launch should fit into; the rest
// is for Q, O and the keys and values that the next section already reads.
constexpr int kSectionL2Percent = 60;

// Queries from which on the padding of the last tile no longer decides between tiles.
constexpr int kManyQueries = 4096;

// Section sizes that are looked at: bounds the time of a plan.
constexpr int64_t kMostCandidates = 128;

// Packing makes K and V serve more rows, but cuts the positions of a tile by the same factor: it
// pays where a tile would otherwise be padding. Worth it from 10 % more useful rows.
constexpr int kPackGainPercent = 10;

int m_tiles_of(FwdProblem const& problem, FwdVariantFacts const& facts, int pack) {
  return ceil_div(problem.seqlen_q, RowPacking{pack}.positions_per_tile(facts.consumer_warpgroups));
}

int choose_pack(FwdProblem const& problem, FwdVariantFacts const& facts) {
  int const group = problem.heads_q / problem.heads_k;
  if (problem.pack_gqa == PackGqa::kNever || group <= 1) {
    return 1;
  }
  int const pack = largest_pack(group);
  if (problem.pack_gqa == PackGqa::kAlways) {
    return pack;
  }
  // The useful share of rows is seqlen_q * pack / (m_tiles * rows of a tile); two of them compare
  // by pack / m_tiles.
  int64_t const packed = int64_t(pack) * m_tiles_of(problem, facts, 1);
  int64_t const unpacked = m_tiles_of(problem, facts, pack);
  return packed * 100 > unpacked * (100 + kPackGainPercent) ? pack : 1;
}

// (head, batch) pairs of a causal section: about as many KV heads as fit into L2, and at least as
// many as give every CTA two tiles; within that, the number whose tiles come closest to a multiple
// of two rounds of the grid, because the tiles of a full pair of rounds add up to the same work for
// every CTA. Example: 132 CTAs, 16 tiles a head, 34 heads fit: 33, which are exactly 4 rounds.
int choose_section_pairs(FwdProblem const& problem, FwdSchedule const& schedule) {
  if (!problem.causal || schedule.tiles == 0) {
    return 1;
  }
  int64_t const kv_heads = int64_t(problem.heads_k) * problem.batch;
  int64_t const kv_bytes =
      int64_t(problem.seqlen_k) * (problem.head_dim + problem.head_dim_v) * kElementBytes;
  int64_t const budget = problem.device.l2_bytes * kSectionL2Percent / 100;
  int64_t const fitting = std::max<int64_t>(1, budget / std::max<int64_t>(1, kv_bytes));
  int const pairs_per_kv_head = problem.heads_q / problem.heads_k / schedule.pack;
  int64_t const tiles_per_kv_head = int64_t(schedule.m_tiles) * pairs_per_kv_head;
  int64_t const two_rounds = 2 * int64_t(schedule.grid);
  int64_t const least =
      std::max<int64_t>(1, (two_rounds + tiles_per_kv_head / 2) / tiles_per_kv_head);
  int64_t const most = std::min(kv_heads, std::max(fitting, least));
  int64_t const lowest =
      std::max<int64_t>({1, std::min(least, most), most * 2 / 3, most - kMostCandidates});

  int64_t best = most;
  double best_waste = 1e30;
  for (int64_t heads = most; heads >= lowest; --heads) {
    int64_t const tiles = heads * tiles_per_kv_head;
    int64_t const over = tiles % two_rounds;
    double const waste = double(std::min(over, two_rounds - over)) / double(tiles);
    if (waste < best_waste) {
      best_waste = waste;
      best = heads;
    }
  }
  return int(best * pairs_per_kv_head);
}

// (query, key) pairs that one head of one batch sees: the last query sees min(seqlen_k, ...) keys,
// each one before it one key fewer.
double visible_pairs(FwdProblem const& problem) {
  double const k = problem.seqlen_k;
  if (!problem.causal) {
    return problem.seqlen_q * k;
  }
  double const rows = std::min(problem.seqlen_q, problem.seqlen_k);
  return rows * k - rows * (rows - 1) / 2;
}

// Pairs that the tiles of one row head of one batch compute.
double computed_pairs(FwdProblem const& problem, FwdSchedule const& schedule,
                      FwdVariantFacts const& facts) {
  int const positions = RowPacking{schedule.pack}.positions_per_tile(facts.consumer_warpgroups);
  SeqlenPair const len{problem.seqlen_q, problem.seqlen_k};
  double pairs = 0;
  for (int m = 0; m < schedule.m_tiles; ++m) {
    BlockRange const range =
        block_range(m * positions, (m + 1) * positions, len, facts.tile_n, problem.causal);
    pairs += double(range.end) * facts.tile_n * facts.consumer_warpgroups * kWarpgroupRows;
  }
  return pairs;
}

// Time of a plan up to a factor: what its tiles compute, over the speed of the tile.
double relative_time(FwdProblem const& problem, FwdPlan const& plan) {
  FwdVariantFacts const& facts = kFwdVariants[plan.variant];
  return computed_pairs(problem, plan.schedule, facts) /
         (plan.schedule.pack * facts.relative_speed);
}

FwdPlan plan_with(FwdProblem const& problem, int variant) {
  return FwdPlan{variant, schedule_forward(problem, kFwdVariants[variant])};
}

}  // namespace

FwdSchedule schedule_forward(FwdProblem const& problem, FwdVariantFacts const& facts) {
  FwdSchedule schedule;
  schedule.pack = choose_pack(problem, facts);
  schedule.m_tiles = m_tiles_of(problem, facts, schedule.pack);
  schedule.tiles =
      int(int64_t(schedule.m_tiles) * (problem.heads_q / schedule.pack) * problem.batch);
  schedule.grid =
      std::min(schedule.tiles, std::max(1, problem.device.sm_count - problem.sm_margin));
  schedule.section_pairs = choose_section_pairs(problem, schedule);
  return schedule;
}

// Among the variants that serve a problem the one that takes the least time; from kManyQueries on
// the first one listed, which is the fastest where nothing is padding.
FwdPlan plan_forward(FwdProblem const& problem) {
  auto const next_variant = [&](int begin) {
    return find_variant(problem.dtype, problem.causal, problem.head_dim, problem.head_dim_v, begin);
  };
  int variant = next_variant(0);
  FwdPlan best = plan_with(problem, variant);
  if (problem.seqlen_q >= kManyQueries) {
    return best;
  }
  while ((variant = next_variant(variant + 1)) >= 0) {
    FwdPlan const other = plan_with(problem, variant);
    if (relative_time(problem, other) < relative_time(problem, best)) {
      best = other;
    }
  }
  return best;
}

FwdCost cost_forward(FwdProblem const& problem, FwdPlan const& plan) {
  FwdSchedule const& schedule = plan.schedule;
  FwdCost cost;
  if (schedule.tiles == 0) {
    return cost;
  }
  double const heads = double(problem.batch) * problem.heads_q;
  double const useful = visible_pairs(problem) * heads;
  double const computed =
      computed_pairs(problem, schedule, kFwdVariants[plan.variant]) * heads / schedule.pack;
  double const dims = problem.head_dim + problem.head_dim_v;
  double const q_rows = heads * problem.seqlen_q;
  double const k_rows = double(problem.batch) * problem.heads_k * problem.seqlen_k;
  cost.waves = double(schedule.tiles) / schedule.grid;
  cost.useful_share = computed > 0 ? useful / computed : 0;
  cost.flops = 2 * dims * useful;
  cost.bytes = kElementBytes * dims * (q_rows + k_rows) + sizeof(float) * q_rows;
  return cost;
}

}  // namespace fa3
