#include "plan/plan_cache.h"

#include <algorithm>
#include <optional>

#include "core/packed_tiles.h"
#include "core/row_packing.h"
#include "plan/variants.h"

namespace fa3 {
namespace {

// Cost of a K tile with two consumer warpgroups relative to one, as log2 (docs/journal/cache.md).
constexpr int kWeightLog2OfTwo = 1;

// The fixed cost of a tile of two warpgroups, in units of half a K tile (1400 cycles): the last PV,
// the store of O and the wait for the next Q take 6400 cycles, more where O is stored in parts.
// Without this cost a CTA gets 3 to 15 tiles: one sequence of 2048 queries and keys, 32 and 8
// heads, takes 142 us without and 114 us with it (H200, 2026-11-27).
constexpr int kTileUnitsOfTwo = 5;

// Time of a K tile of a step / half a K tile of a prompt: 1.17 us / 0.9 to 1.3 us, each on half of
// the multiprocessors (H200, 2026-11-27).
constexpr float kCostOfStep = 1.1f;

// tiles: output tiles of a line.
KeySplits splits_of(FwdProblem const& problem, int tile_n, int64_t tiles, int weight_log2,
                    int& tile_units) {
  CacheProblem const& cache = problem.cache;
  KeySplits splits;
  if (problem.split_size > 0) {
    splits.kind = SplitKind::kSize;
    splits.count = ceil_div(problem.split_size, tile_n);
  } else if (cache.num_splits > 0) {
    splits.kind = SplitKind::kParts;
    splits.count = cache.num_splits;
  } else {
    int const k_tiles = ceil_div(cache.capacity, tile_n);
    while (tiles * (splits.units(k_tiles, weight_log2) + tile_units) > kMostUnits &&
           k_tiles >> splits.count > 0) {
      ++splits.count;
      tile_units = 0;
    }
  }
  tile_units = splits.is_even() ? tile_units : 0;
  return splits;
}

// Whether two warpgroups would have so few K tiles of 128 keys that their later start costs more
// than they gain. Times of a shared prefix with one warpgroup / two: 2 K tiles a CTA, 8 query heads
// and one KV head, 44 / 50 us; 8 K tiles, 8 and 1 heads, 58 / 60; 32 and 8 heads, 88 / 83 (H100,
// 2026-11-26).
bool has_few_keys(FwdProblem const& problem, RowPacking rows, int sms) {
  constexpr int kFewTiles = 4;
  int const keys = problem.cache.keys_of_all;
  int64_t const tiles = int64_t(ceil_div(problem.seqlen_q, rows.positions_per_tile(2))) *
                        (problem.heads_q / rows.pack);
  return keys > 0 && tiles * ceil_div(keys, 128) < int64_t(kFewTiles) * sms;
}

// A call with enough queries to fill a tile with one head does not pack heads, unless it asks for
// it. Packed / not packed: 4 x 512 queries, 2048 keys, 8 heads and one KV head 62 us / 40; 2048
// queries and keys, 32 and 8 heads 114 / 97; 2048 queries, 16k keys 814 / 854 (H200, 2026-11-27).
RowPacking packing_of(FwdProblem const& problem) {
  constexpr int kManyQueries = 256;
  int const group = problem.heads_q / problem.heads_k;
  if (problem.cache.is_chosen && !problem.kind.is_latent) {
    return RowPacking{largest_divisor_below(group, kFastRows + 1)};  // every decode kernel has them
  }
  bool const fills_tiles = problem.pack_gqa == PackGqa::kHeuristic &&
                           problem.seqlen_q >= kManyQueries && !problem.kind.is_latent;
  bool const packs = problem.pack_gqa != PackGqa::kNever && !fills_tiles;
  return RowPacking{packs ? largest_pack(group) : 1};
}

// Whether the decode kernel is faster than csrc/mla for latents: if queries choose their keys and
// there are so many tiles that few are split, with e4m3 latents a few tiles. 16 heads, 2048 keys
// per query (H200, 2026-11-28), us:
//
//   queries                    1     16     64    128    4096
//   decode kernel                           61     86    1543
//   csrc/mla                                59     91    2001
//   e4m3: decode kernel     29.3   33.8   67.8  101.6
//   csrc/mla                23.2   35.9   77.0  121.6
bool has_enough_tiles(FwdProblem const& problem, RowPacking rows) {
  int const sms = usable_sms(problem);
  int64_t const tiles = int64_t(problem.batch) * (problem.heads_q / rows.pack);
  return problem.cache.is_chosen && tiles >= (problem.converts ? sms / 16 : sms - sms / 16);
}

// The decode kernel, or -1. It takes up to 32 rows of a KV head: 64 x 4k 251 us, the tile of one
// warpgroup 268 (H200, 2026-11-27). With 64 rows it is slower (286, 275) but where pages are too
// small for boxes, and for head dims above 64 up to 96, which the others compute as 128. WHY not in
// one pass or with split_size: it sums a row in another order, and their bits are promised. Other
// tiles of K and V do not know chosen keys.
int decode_variant(FwdProblem const& problem, RowPacking rows) {
  CacheProblem const& cache = problem.cache;
  bool const may_split = problem.split_size == 0 && cache.num_splits != 1;
  bool const may_decode = problem.kind.is_latent ? may_split && has_enough_tiles(problem, rows)
                                                 : may_split || cache.is_chosen;
  if (!may_decode || problem.dtype == Dtype::kFloat8E4M3) {
    return -1;
  }
  HeadDims const dims{problem.head_dim, launch_columns(problem)};
  int const widest = max_of(dims.qk, dims.v);
  bool const has_boxes = cache.page_size == cache.capacity || cache.page_size % 8 == 0;
  bool const is_wasteful =
      cache.is_chosen || !has_boxes || (widest > 64 && widest <= 96);  // the other tile
  FwdCandidates const decoders = search_candidates(problem.dtype, problem.kind, dims, false,
                                                   problem.converts, /*decodes=*/true);
  if (decoders.count == 0) {
    return -1;
  }
  int const variant = decoders.variant[0];
  int const all_rows = kFwdVariants[variant].decode_rows();
  int const most_rows = is_wasteful ? all_rows : min_of(all_rows, kFastRows);
  return rows.pack <= most_rows && problem.seqlen_q <= most_rows / rows.pack ? variant : -1;
}

// The tile of one warpgroup, or of two where that is not enough for the longest queries. Both
// compute a row in the same order.
int variant_for(FwdProblem const& problem, RowPacking rows, int sms) {
  int const decode = decode_variant(problem, rows);
  if (decode >= 0) {
    return decode;
  }
  FwdCandidates const candidates = fwd_candidates(problem);
  bool const is_long =
      problem.seqlen_q > rows.positions_per_warpgroup() && !has_few_keys(problem, rows, sms);
  return candidates.variant[is_long ? candidates.count - 1 : 0];
}

// Heads whose keys are read at the same time: the largest divisor of all of them that leaves hardly
// a CTA idle. is_shared: two launches share the CTAs of each lane, so a lane needs many.
int lanes_of(int heads, int ctas, bool is_shared) {
  constexpr int kLeastPercent = 96;
  constexpr int kMostShared = 4;
  int lanes = std::max(1, heads);
  while (lanes > 1 && (ctas / lanes * lanes * 100 < ctas * kLeastPercent ||
                       (is_shared && lanes > kMostShared))) {
    lanes = largest_divisor_below(heads, lanes);
  }
  return lanes;
}

// The most parts of all output tiles together. tiles: output tiles.
int64_t most_parts(CacheProblem const& cache, KeySplits const& splits, int64_t tiles, int tile_n,
                   int grid) {
  if (splits.is_even()) {
    return 2 * int64_t(grid);
  }
  int const k_tiles = max_of(1, ceil_div(cache.capacity, tile_n));
  int const tile_parts =
      splits.kind == SplitKind::kParts ? min_of(splits.count, k_tiles) : splits.units(k_tiles);
  return tile_parts == 1 ? 1 : tiles * tile_parts;
}

// The number of equal parts per output tile, one part per CTA. Returns 0 if the host does not know
// the number of keys, or if the even split, in which a CTA may end one tile and begin another,
// takes less time. tiles, ctas: output tiles and CTAs of a line.
int equal_parts(FwdProblem const& problem, int tile_n, int tiles, int ctas) {
  int const keys = problem.cache.keys_of_all;
  if (keys == 0 || problem.cache.num_splits > 0 || problem.split_size > 0) {
    return 0;
  }
  int const k_tiles = ceil_div(keys, tile_n);
  int const most = min_of(ctas / tiles, k_tiles);
  if (most < 2) {
    return 0;
  }
  int const part_k_tiles = ceil_div(k_tiles, most);
  int const even_k_tiles = ceil_div(tiles * k_tiles, ctas);
  return part_k_tiles <= even_k_tiles + 1 ? ceil_div(k_tiles, part_k_tiles) : 0;
}

// The workspace holds parts of a fixed size or number for sequences that fill their capacity. 2048
// packed queries of 256 sequences, 32 heads, 128k keys and split_size=2048 would take 37 GB.
constexpr int64_t kMostPartBytes = int64_t(2) << 30;

// The problem of one of `groups` groups of heads; none if the heads cannot be divided like that.
std::optional<FwdProblem> heads_of_group(FwdProblem const& problem, int groups) {
  bool const is_whole = problem.heads_k % groups == 0 || groups % problem.heads_k == 0;
  if (!is_whole || problem.heads_q % groups != 0) {
    return std::nullopt;
  }
  FwdProblem group = problem;
  group.heads_q /= groups;
  group.heads_k = max_of(1, problem.heads_k / groups);
  return group;
}

int64_t part_bytes(FwdProblem const& problem) {
  FwdPlan const plan = plan_cache(problem);
  CacheSchedule const& parts = plan.schedule.cache;
  return parts.slots * parts.rows * kFwdVariants[plan.variant].part_row_floats() *
         int64_t(sizeof(float));
}

// The problem of one group of heads.
FwdProblem with_fewer_heads(FwdProblem const& problem) {
  bool const is_even = problem.split_size == 0 && problem.cache.num_splits < 2;
  FwdProblem fewest = problem;
  if (is_even || problem.kind.is_latent || part_bytes(problem) <= kMostPartBytes) {
    return fewest;
  }
  for (int groups = 2; groups <= problem.heads_q; ++groups) {
    if (auto const group = heads_of_group(problem, groups)) {
      fewest = *group;
      if (part_bytes(fewest) <= kMostPartBytes) {
        break;
      }
    }
  }
  return fewest;
}

}  // namespace

std::vector<FwdProblem> launches_of_cache(FwdProblem const& problem) {
  FwdProblem prompts = problem;
  FwdProblem steps = problem;
  steps.seqlen_q = 1;
  RowPacking const rows = packing_of(prompts);
  RowPacking const step_rows = packing_of(steps);
  int const most = kFastRows / step_rows.pack;
  bool const has_steps = problem.is_packed && problem.batch > 1 && most > 0 &&
                         !problem.kind.is_latent && problem.seqlen_q > most &&
                         problem.cache.num_splits == 0 &&
                         problem.head_dim_v <= launch_columns(problem) &&
                         4 * int64_t(problem.total_q) <= int64_t(problem.batch) * problem.seqlen_q;
  steps.seqlen_q = most;
  int const variant = has_steps ? decode_variant(steps, step_rows) : -1;
  if (variant < 0) {
    return {with_fewer_heads(problem)};
  }
  FwdConfig const& step_config = kFwdVariants[variant];
  FwdConfig const& prompt_config = kFwdVariants[variant_for(prompts, rows, usable_sms(problem))];
  if (prompt_config.is_swapped || step_config.tile_n != prompt_config.tile_n) {
    return {problem};
  }
  bool const has_two = prompt_config.consumer_warpgroups > 1;
  // The two launches pack different numbers of heads, and units are counted per packed head.
  float const cost = kCostOfStep * float(rows.pack) / float(step_rows.pack);
  prompts.cache.fewest_queries = most + 1;
  prompts.cache.most_queries = IntervalMask::kNoLimit;
  prompts.cache.other_positions = step_config.decode_rows() / step_rows.pack;
  prompts.cache.other_cost = cost;
  steps.cache.is_second = true;
  steps.cache.fewest_queries = 1;
  steps.cache.most_queries = most;
  steps.cache.other_positions = rows.positions_per_tile(prompt_config.consumer_warpgroups);
  steps.cache.other_weight_log2 = has_two ? kWeightLog2OfTwo : 0;
  steps.cache.other_tile_units = has_two ? kTileUnitsOfTwo : 0;
  steps.cache.other_cost = 1.f / cost;
  return {prompts, steps};
}

FwdPlan plan_cache(FwdProblem const& problem) {
  FwdPlan plan;
  FwdSchedule& schedule = plan.schedule;
  RowPacking const rows = packing_of(problem);
  schedule.pack = rows.pack;
  int const sms = usable_sms(problem);
  plan.variant = variant_for(problem, rows, sms);
  FwdConfig const& config = kFwdVariants[plan.variant];
  int const positions = config.is_swapped ? config.decode_rows() / rows.pack
                                          : rows.positions_per_tile(config.consumer_warpgroups);
  schedule.m_tiles = ceil_div(problem.seqlen_q, positions);
  int64_t const head_tiles = problem.is_packed
                                 ? most_tiles(problem.total_q, problem.batch, positions)
                                 : int64_t(schedule.m_tiles) * problem.batch;
  int64_t const tiles = head_tiles * (problem.heads_q / schedule.pack);
  CacheSchedule& cache = schedule.cache;
  bool const is_shared = problem.cache.most_queries > 0;
  int const packed_heads = problem.heads_q / schedule.pack;
  int const most_ctas = max_of(1, sms * config.measured.ctas_per_sm / config.column_ctas());
  cache.lanes = config.is_swapped ? 1 : lanes_of(packed_heads, most_ctas, is_shared);
  int const ctas = max_of(1, most_ctas / cache.lanes) * cache.lanes;  // whole clusters
  schedule.grid = ctas * config.column_ctas();
  cache.weight_log2 = config.consumer_warpgroups > 1 ? kWeightLog2OfTwo : 0;
  cache.tile_units = config.consumer_warpgroups > 1 ? kTileUnitsOfTwo : 0;
  cache.splits =
      splits_of(problem, config.tile_n, tiles / cache.lanes, cache.weight_log2, cache.tile_units);
  bool const is_long = problem.seqlen_q > rows.positions_per_warpgroup();
  int const parts =
      is_long ? equal_parts(problem, config.tile_n, int(tiles / cache.lanes), ctas / cache.lanes)
              : 0;
  if (parts > 1) {
    cache.splits = KeySplits{};
    cache.splits.kind = SplitKind::kParts;
    cache.splits.count = parts;
    cache.tile_units = 0;
  }
  cache.slots = most_parts(problem.cache, cache.splits, tiles, config.tile_n, ctas);
  if (!cache.splits.is_even() && cache.slots > 1) {
    cache.splits.most = cache.slots;
  }
  // Rows of a part are counted as those of a tile.
  int const all_rows = config.consumer_warpgroups * kWarpgroupRows;
  bool const is_short = !problem.is_packed && problem.seqlen_q < rows.positions_per_warpgroup();
  cache.rows = is_short ? problem.seqlen_q * schedule.pack : all_rows;
  if (config.is_swapped) {
    cache.rows = config.computed_rows(min_of(cache.rows, config.decode_rows()));
  } else {
    // Those of whole warps; the two rows of each lane that has one (forward/cache/parts.h).
    int const whole = round_up(cache.rows, 16);
    cache.rows = problem.kind.is_latent ? whole : min_of(whole, 2 * cache.rows);
  }
  return plan;
}

}  // namespace fa3
