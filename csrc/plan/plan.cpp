#include "plan/plan.h"

#include <algorithm>
#include <cmath>

#include "core/block_range.h"
#include "core/int_math.h"
#include "core/packed_tiles.h"
#include "core/row_packing.h"
#include "core/visible_pairs.h"
#include "plan/variants.h"

namespace fa3 {
namespace {

// Latent caches have head dims of their own (checks/attention.h).
constexpr bool every_problem_has_a_variant() {
  bool has = true;
  for (int dtype = 0; dtype < kKernelDtypes; ++dtype) {
    for (int kind = 0; kind < kBuiltKindCount; ++kind) {
      bool const is_narrow = dtype == int(Dtype::kFloat8E4M3);
      for (int i = 1; i <= kTabledHeadDims - is_narrow; ++i) {
        KernelKind const of = kBuiltKinds[kind].kind;
        bool const has_none = of.is_latent || (of.has_lists() && of.has_softcap() &&
                                               (is_narrow || i == kTabledHeadDims));
        has &= has_none || (*kFwdCandidates[dtype])[kind][i].count > 0;
      }
    }
  }
  return has;
}
static_assert(every_problem_has_a_variant(),
              "csrc/plan/variants.py: the largest head dim lacks a variant");

// Most tiles of a head that the estimate of a plan's time samples, which bounds planning time.
constexpr int kMostSamples = 64;

// Packing makes a tile cover fewer positions, so less of it is padding or masked. Equal work takes
// up to 3 % longer packed (bf16, d128, causal). Where packing saved 2 % of the work, it took 5 %
// less time (bf16, d128, full, 4 heads; H200, 2026-11-22).
constexpr int kPackGainPercent = 2;

int m_tiles_of(FwdProblem const& problem, FwdConfig const& config, int pack) {
  return ceil_div(problem.seqlen_q,
                  RowPacking{pack}.positions_per_tile(config.consumer_warpgroups));
}

// Whether the first queries of a sequence see far fewer keys than most queries do. If a
// window spans at most two tiles, all tiles cost about the same.
bool grows(FwdProblem const& problem, int tile_rows) {
  IntervalMask const mask = problem.mask;
  bool const ends_early = mask.right == 0 || mask.right < problem.seqlen_k / 2;
  return !mask.is_chunked && ends_early && mask.left >= 2 * tile_rows;
}

// Packed sequences: how many packed heads form a section, a divisor of all. The keys and values
// that they use at a time fit into a share of L2. A window moves with the queries, and some
// queries run ahead. The rest of L2 holds Q, O and the first reads of the next section.
int choose_section_heads(FwdProblem const& problem, int pack) {
  constexpr int kL2Percent = 60;
  IntervalMask const mask = problem.mask;
  int64_t const in_use =
      std::min<int64_t>(problem.seqlen_k, 2 * (int64_t(mask.left) + mask.right + 1));
  int64_t const head_bytes =
      in_use * (problem.head_dim + problem.head_dim_v) * element_bytes(problem.dtype);
  int64_t const fitting =
      problem.device.l2_bytes * kL2Percent / 100 / std::max<int64_t>(1, head_bytes);
  int heads = problem.heads_k;
  while (heads > fitting && heads > 1) {
    heads = largest_divisor_below(problem.heads_k, heads);
  }
  return heads * (problem.heads_q / problem.heads_k / pack);
}

// The tiles that CTAs compute at a time: CTAs that split the columns compute one together.
int tiles_at_once(FwdSchedule const& schedule, FwdConfig const& config) {
  return schedule.grid / config.column_ctas();
}

// Sections of causal tiles (core/tile_order.h), each of whole KV heads. Packed sequences have other
// sections. About eight CTAs read the keys of a head together: with two or four, memory bounds
// short sequences; with all CTAs on one head, long sequences are slower (docs/journal/forward.md).
// The last section has two tiles for each CTA, so that its short tiles balance the long ones. Tiles
// with lists read keys in no common order: a section has the heads whose keys L2 holds.
void set_sections(FwdSchedule& schedule, FwdProblem const& problem, int at_once) {
  constexpr int kCtasOfHead = 8;
  if (problem.is_packed || !schedule.longest_first || schedule.tiles == 0) {
    return;
  }
  int const pairs_of_head = problem.heads_q / problem.heads_k / schedule.pack;
  int const tiles_of_head = schedule.m_tiles * pairs_of_head;
  int const heads = problem.heads_k * problem.batch;
  int const usual = problem.kind.has_lists()
                        ? choose_section_heads(problem, schedule.pack) / pairs_of_head
                        : clamp(at_once / min_of(tiles_of_head, kCtasOfHead), 1, heads);
  int const last = clamp(ceil_div(2 * at_once, tiles_of_head), 1, heads);
  schedule.section_pairs = usual * pairs_of_head;
  schedule.least_last_pairs = last * pairs_of_head;
}

// (query, key) pairs that one head of one batch sees.
double visible_pairs(FwdProblem const& problem) {
  return count_visible(SeqlenPair{problem.seqlen_q, problem.seqlen_k}, problem.mask);
}

// How one variant splits the queries of a head into tiles.
struct Cut {
  int pack;
  int lead;  // core/row_packing.h
};

// The cost of a tile in (query, key) pairs: those that it computes, and `fixed_keys` more keys.
double tile_cost(FwdProblem const& problem, FwdConfig const& config, Cut cut, int m,
                 int fixed_keys) {
  int const positions = RowPacking{cut.pack}.positions_per_tile(config.consumer_warpgroups);
  SeqlenPair const len{problem.seqlen_q, problem.seqlen_k};
  int const begin = m * positions - cut.lead;
  BlockRange const range =
      block_range(max_of(0, begin), begin + positions, len, config.tile_n, problem.mask);
  double const keys = double(max_of(range.end - range.begin, 1)) * config.tile_n + fixed_keys;
  return keys * config.consumer_warpgroups * kWarpgroupRows;
}

// Mean cost of the tiles of a row head, from every `step`-th one, counted from the last.
double mean_tile_cost(FwdProblem const& problem, FwdConfig const& config, Cut cut, int step,
                      int fixed_keys) {
  int const m_tiles = m_tiles_of(problem, config, cut.pack);
  double sum = 0;
  int count = 0;
  for (int m = m_tiles - 1; m >= 0; m -= step, ++count) {
    sum += tile_cost(problem, config, cut, m, fixed_keys);
  }
  return sum / count;
}

double estimated_tile_cost(FwdProblem const& problem, FwdConfig const& config, Cut cut) {
  int const m_tiles = m_tiles_of(problem, config, cut.pack);
  // Tiles of full attention all cost the same.
  bool const all_equal = problem.kind == kFullKernel;
  int const step = all_equal ? m_tiles : ceil_div(m_tiles, kMostSamples);
  return mean_tile_cost(problem, config, cut, step, config.measured.fixed_keys);
}

int most_lead(FwdProblem const& problem, FwdConfig const& config, int pack) {
  return lead_positions(m_tiles_of(problem, config, pack), problem.seqlen_q,
                        config.consumer_warpgroups, RowPacking{pack}.positions_per_warpgroup());
}

// The cost of all tiles of a head, for comparisons of leads. Many tiles are sampled: the last one
// and some from the middle.
double cost_of_lead(FwdProblem const& problem, FwdConfig const& config, Cut cut) {
  constexpr int kSamples = 16;
  int const others = m_tiles_of(problem, config, cut.pack) - 1;
  int const count = std::min(others, kSamples);
  double sum = 0;
  for (int m = (others - count) / 2; m < (others + count) / 2; ++m) {
    sum += tile_cost(problem, config, cut, m, config.measured.fixed_keys);
  }
  return tile_cost(problem, config, cut, others, config.measured.fixed_keys) +
         (count > 0 ? sum / count * others : 0);
}

// Positions by which the first tile of a sequence begins before it; 0 where a lead gains nothing.
// With a lead long tiles have fewer empty rows, but may end in the middle of a K tile.
int lead_of(FwdProblem const& problem, FwdConfig const& config, int pack) {
  int const most = most_lead(problem, config, pack);
  bool const may_gain =
      most > 0 && grows(problem, RowPacking{pack}.positions_per_tile(config.consumer_warpgroups));
  return may_gain && cost_of_lead(problem, config, {pack, most}) <
                         cost_of_lead(problem, config, {pack, 0})
             ? most
             : 0;
}

// The time of one query head, up to a factor.
double time_of_pack(FwdProblem const& problem, FwdConfig const& config, int pack) {
  Cut const cut{pack, lead_of(problem, config, pack)};
  return estimated_tile_cost(problem, config, cut) * m_tiles_of(problem, config, pack) / pack;
}

int choose_pack(FwdProblem const& problem, FwdConfig const& config) {
  int const group = problem.heads_q / problem.heads_k;
  if (problem.pack_gqa == PackGqa::kNever || problem.kind.has_lists() || group <= 1 ||
      problem.seqlen_q == 0) {
    return 1;
  }
  int const pack = largest_pack(group);
  if (problem.pack_gqa == PackGqa::kAlways) {
    return pack;
  }
  double const unpacked = time_of_pack(problem, config, 1);
  double const packed = time_of_pack(problem, config, pack);
  return packed * 100 < unpacked * (100 - kPackGainPercent) ? pack : 1;
}

// The smallest lead that gains in a long sequence with as many keys as queries.
int least_lead_of(FwdProblem const& packed, FwdConfig const& config, int pack) {
  constexpr int kTiles = 16;
  RowPacking const rows{pack};
  int const step = rows.positions_per_warpgroup();
  int const tile_positions = rows.positions_per_tile(config.consumer_warpgroups);
  FwdProblem one = packed;
  for (int lead = step; lead < tile_positions; lead += step) {
    one.seqlen_q = one.seqlen_k = kTiles * tile_positions - lead;
    if (lead_of(one, config, pack) > 0) {
      return lead;
    }
  }
  return tile_positions;
}

// Time of one head alone with a tile form, up to a factor. It does not depend on the number of
// CTAs, heads and batch entries.
double time_of_head(FwdProblem const& problem, FwdConfig const& config) {
  return time_of_pack(problem, config, 1) / config.measured.relative_speed;
}

// The tiles to expect. Tables of packed sequences have room for more than the longest length
// allows.
double expected_tiles(FwdProblem const& problem, FwdSchedule const& schedule) {
  double const longest_tiles =
      double(schedule.m_tiles) * problem.batch * (problem.heads_q / schedule.pack);
  return problem.is_packed ? std::min<double>(schedule.tiles, longest_tiles) : schedule.tiles;
}

// Time of a plan, up to a factor: the work of the busiest CTA over its share of the tile's speed.
// Causal tiles are distributed evenly, but no tile is split.
double time_of_plan(FwdProblem const& problem, FwdPlan const& plan) {
  FwdConfig const& config = kFwdVariants[plan.variant];
  FwdSchedule const& schedule = plan.schedule;
  Cut const cut{schedule.pack, schedule.lead};
  double const mean = estimated_tile_cost(problem, config, cut);
  double const tiles = expected_tiles(problem, schedule);
  double const speed = double(config.measured.relative_speed) / config.measured.ctas_per_sm;
  int const at_once = tiles_at_once(schedule, config);
  if (!schedule.longest_first) {
    return mean * std::ceil(tiles / at_once) / speed;
  }
  double const longest =
      tile_cost(problem, config, cut, schedule.m_tiles - 1, config.measured.fixed_keys);
  return std::max(longest, mean * tiles / at_once) / speed;
}

// Keys per tile of the form that suits the lengths of the sequences best.
int choose_tile_n(FwdProblem const& problem, FwdCandidates const& candidates) {
  int best = candidates.variant[0];
  double best_time = time_of_head(problem, kFwdVariants[best]);
  for (int i = 1; i < candidates.count; ++i) {
    double const time = time_of_head(problem, kFwdVariants[candidates.variant[i]]);
    if (time < best_time) {
      best_time = time;
      best = candidates.variant[i];
    }
  }
  return kFwdVariants[best].tile_n;
}

FwdPlan plan_with(FwdProblem const& problem, int variant) {
  return FwdPlan{variant, schedule_forward(problem, kFwdVariants[variant])};
}

}  // namespace

int usable_sms(FwdProblem const& problem) {
  return std::max(1, problem.device.sm_count - problem.sm_margin);
}

FwdSchedule schedule_forward(FwdProblem const& problem, FwdConfig const& config) {
  FwdSchedule schedule;
  schedule.pack = choose_pack(problem, config);
  schedule.m_tiles = m_tiles_of(problem, config, schedule.pack);
  int const rows = RowPacking{schedule.pack}.positions_per_tile(config.consumer_warpgroups);
  schedule.longest_first = problem.kind.has_lists() || grows(problem, rows);
  int64_t head_tiles = int64_t(schedule.m_tiles) * problem.batch;
  if (problem.is_packed) {
    schedule.least_lead = least_lead_of(problem, config, schedule.pack);
    int const most = most_lead(problem, config, schedule.pack);
    schedule.lead = most < schedule.least_lead ? 0 : most;
    head_tiles = most_tiles(problem.total_q, problem.entries(), rows);
    schedule.section_heads = choose_section_heads(problem, schedule.pack);
    schedule.workspace_ints = PackedTables::workspace_ints(head_tiles, problem.entries());
  } else {
    schedule.lead = lead_of(problem, config, schedule.pack);
  }
  schedule.tiles = int(head_tiles * (problem.heads_q / schedule.pack));
  int const ctas = usable_sms(problem) * config.measured.ctas_per_sm;
  schedule.grid =
      std::min(schedule.tiles, max_of(1, ctas / config.column_ctas())) * config.column_ctas();
  set_sections(schedule, problem, tiles_at_once(schedule, config));
  if (config.folds()) {
    schedule.part_tiles = ceil_div(problem.split_size, config.tile_n);
    schedule.total_floats = int64_t(schedule.grid) * config.consumer_warpgroups *
                            (config.head_dim_v / 2 + 4) * kWarpgroupThreads;
  }
  return schedule;
}

// INVARIANT: no bit of a query's result depends on batch, heads, packing or the number of CTAs. A
// row adds up its keys in the order of its K tiles, so the keys per tile are chosen by the lengths
// alone. Among tiles with as many keys, the rows are chosen by time.
FwdPlan plan_forward(FwdProblem const& problem) {
  FwdCandidates const candidates = fwd_candidates(problem);
  if (problem.kind.has_lists()) {
    int i = 0;
    while (i + 1 < candidates.count &&
           kFwdVariants[candidates.variant[i]].consumer_warpgroups * kWarpgroupRows !=
               problem.listed_rows) {
      ++i;
    }
    return plan_with(problem, candidates.variant[i]);
  }
  bool const is_empty = problem.batch == 0 || problem.heads_q == 0 || problem.seqlen_q == 0;
  if (candidates.count == 1 || is_empty) {
    return plan_with(problem, candidates.variant[0]);
  }
  int const tile_n = choose_tile_n(problem, candidates);
  FwdPlan best;
  double best_time = 0;
  for (int i = 0; i < candidates.count; ++i) {
    int const variant = candidates.variant[i];
    if (kFwdVariants[variant].tile_n != tile_n) {
      continue;
    }
    FwdPlan const plan = plan_with(problem, variant);
    double const time = time_of_plan(problem, plan);
    if (best.variant < 0 || time < best_time) {
      best = plan;
      best_time = time;
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
  FwdConfig const& config = kFwdVariants[plan.variant];
  double const useful = visible_pairs(problem) * heads;
  Cut const cut{schedule.pack, schedule.lead};
  double const tile = mean_tile_cost(problem, config, cut, /*step=*/1, 0);
  double const computed = tile * schedule.tiles;
  double const dims = problem.head_dim + problem.head_dim_v;
  double const computed_dims = double(config.head_dim + config.head_dim_v) *
                               value_launches(problem.head_dim, problem.head_dim_v);
  double const q_rows = heads * problem.seqlen_q;
  double const k_rows = double(problem.batch) * problem.heads_k * problem.seqlen_k;
  double const tile_rows = config.consumer_warpgroups * kWarpgroupRows;
  double const all_keys = round_up(max_of(1, problem.seqlen_k), config.tile_n);
  cost.waves = double(schedule.tiles) / tiles_at_once(schedule, config);
  cost.useful_share = useful * dims / (computed * computed_dims);
  cost.visited_share = tile / (tile_rows * all_keys);
  cost.flops = 2 * dims * useful;
  constexpr int kOutBytes = 2;
  double const inputs = problem.head_dim * q_rows + dims * k_rows;
  cost.bytes = element_bytes(problem.dtype) * inputs +
               (kOutBytes * problem.head_dim_v + double(sizeof(float))) * q_rows;
  return cost;
}

}  // namespace fa3
