#include "plan/plan_backward.h"

#include <algorithm>
#include <iterator>

#include "bwd_variants.h"
#include "core/int_math.h"
#include "core/packed_tiles.h"
#include "plan/plan.h"
#include "plan/variants.h"

namespace fa3 {
namespace {

// Share of L2 that Q, dO and the accumulator of dQ of one section should fit into; each half of L2
// keeps what its CTAs read (docs/journal/backward.md).
constexpr int kSectionL2Percent = 30;

// Whether far more queries see the first keys of a sequence than the last ones.
bool shrinks(FwdProblem const& problem) {
  IntervalMask const mask = problem.mask;
  int const half = problem.seqlen_q / 2;
  bool const is_cut = mask.is_chunked || mask.left < half;
  return !is_cut && (mask.right == 0 || mask.right < half);
}

// KV heads of a section (core/tile_order.h); a head counts once for each batch entry.
struct SectionHeads {
  int64_t usual;
  int64_t least_last;  // the fewest of the last section
};

// n_tiles: tiles of keys of a head. A section has the heads that fit into L2, and at least about
// one tile for each running CTA or cluster. The last section has 7/4 tiles for each, so that its
// short tiles balance the long ones (H100, docs/journal/backward.md). With `deterministic` each
// section has two tiles for each multiprocessor, so that few CTAs of a head wait for each other at
// the start.
SectionHeads heads_of_section(FwdProblem const& problem, BwdConfig const& config, int n_tiles) {
  int64_t const row_bytes = int64_t(config.head_dim) * (2 + 4) + int64_t(config.head_dim_v) * 2;
  int64_t const head_bytes =
      std::max(1, problem.seqlen_q) * row_bytes * (problem.heads_q / problem.heads_k);
  int64_t const fitting = problem.device.l2_bytes * kSectionL2Percent / 100 / head_bytes;
  int const tiles = max_of(1, n_tiles);
  int const running = problem.device.sm_count / config.cluster_size;
  int64_t const last = problem.deterministic ? ceil_div(2 * problem.device.sm_count, tiles)
                                             : ceil_div(7 * running, 4 * tiles);
  int64_t const least = problem.deterministic ? last : running / tiles;
  return {std::max<int64_t>({fitting, least, 1}), last};
}

// Ranks the variants that serve a problem; the least is best. It counts the columns of a step's
// five GEMMs (those of q and k for S, dQ and dK, those of v for dP and dV), then prefers the same
// kind.
int cost_of(BwdConfig const& config, KernelKind kind) {
  int const columns = 3 * config.head_dim + 2 * config.head_dim_v;
  return 2 * columns + (config.kind == kind ? 0 : 1);
}

// Most queries that see a tile of keys: those of a key's window or chunk, and one more for each
// key.
int most_queries(FwdProblem const& problem, int tile_n) {
  IntervalMask const mask = problem.mask;
  int64_t most = int64_t(mask.left) + mask.right + tile_n;
  if (mask.is_chunked) {
    most = std::min(most, int64_t(mask.chunk.divisor) + tile_n);
  }
  return int(std::min<int64_t>(most, IntervalMask::kNoLimit));
}

int clusters_of_tile(BwdConfig const& config) { return config.order_keys() / config.tile_n(); }

void schedule_dense(BwdSchedule& schedule, FwdProblem const& problem, BwdConfig const& config) {
  int const pairs = problem.heads_k * problem.batch;
  schedule.m_tiles = ceil_div(problem.seqlen_q, config.tile_m);
  schedule.n_tiles = ceil_div(problem.seqlen_k, config.order_keys());
  schedule.works = schedule.n_tiles * pairs * clusters_of_tile(config);
  schedule.rows = int64_t(schedule.m_tiles) * config.tile_m * problem.heads_q * problem.batch;
  SectionHeads const section = heads_of_section(problem, config, schedule.n_tiles);
  schedule.section_pairs = int(std::min<int64_t>(section.usual, max_of(1, pairs)));
  schedule.least_last_pairs = int(section.least_last);
}

// Sequences are processed one after another, so a section consists of heads.
void schedule_packed(BwdSchedule& schedule, FwdProblem const& problem, BwdConfig const& config) {
  schedule.m_tiles = int(most_tiles(problem.total_q, problem.entries(), config.tile_m));
  schedule.n_tiles = int(most_tiles(problem.total_k, problem.entries(), config.order_keys()));
  schedule.works = schedule.n_tiles * problem.heads_k * clusters_of_tile(config);
  schedule.rows = int64_t(schedule.m_tiles) * config.tile_m * problem.heads_q;
  schedule.most_queries = most_queries(problem, config.order_keys());
  schedule.table_ints = PackedTables::table_ints(
      PackedTables::workspace_ints(schedule.n_tiles, problem.entries(), schedule.m_tiles));
  if (schedule.in_sections) {
    int const n_tiles = ceil_div(problem.seqlen_k, config.order_keys());
    SectionHeads const section = heads_of_section(problem, config, n_tiles);
    int64_t const heads =
        std::min<int64_t>(std::max(section.usual, section.least_last), problem.heads_k);
    schedule.section_heads = largest_divisor_below(problem.heads_k, int(heads) + 1);
  }
}

}  // namespace

int find_backward_variant(Dtype dtype, KernelKind kind, int64_t head_dim, int64_t head_dim_v) {
  int best = -1;
  for (int i = 0; i < int(std::size(kBwdVariants)); ++i) {
    BwdConfig const& config = kBwdVariants[i];
    bool const fits = config.dtype == dtype && serves(config.kind, kind) &&
                      config.head_dim >= head_dim && config.head_dim_v >= head_dim_v;
    if (fits && (best < 0 || cost_of(config, kind) < cost_of(kBwdVariants[best], kind))) {
      best = i;
    }
  }
  return best;
}

char const* dq_order(FwdProblem const& problem, BwdSchedule const& schedule) {
  return problem.deterministic   ? "in a fixed order"
         : schedule.dq_is_zeroed ? "in any order, onto zeros"
                                 : "in any order; the first is stored";
}

BwdPlan plan_backward(FwdProblem const& problem) {
  BwdPlan plan;
  plan.variant =
      find_backward_variant(problem.dtype, problem.kind, problem.head_dim, problem.head_dim_v);
  BwdConfig const& config = kBwdVariants[plan.variant];
  BwdSchedule& schedule = plan.schedule;
  schedule.tile_m = config.tile_m;
  schedule.tile_n = config.order_keys();
  schedule.in_sections = problem.deterministic || problem.kind.has_lists() || shrinks(problem);
  if (problem.is_packed) {
    schedule_packed(schedule, problem, config);
  } else {
    schedule_dense(schedule, problem, config);
  }
  // By keys a CTA goes from one tile to the next.
  schedule.grid = config.by_keys() ? min_of(schedule.works, usable_sms(problem))
                                   : schedule.works * config.cluster_size;
  schedule.dq_floats = schedule.rows * config.dq_columns();
  schedule.flags = schedule.rows / config.tile_m * config.dq_adders() + 1;
  schedule.dq_is_zeroed = !problem.deterministic &&
                          min_of(problem.seqlen_k, most_queries(problem, 0)) > config.stored_keys();
  return plan;
}

}  // namespace fa3
