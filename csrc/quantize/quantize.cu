// A CTA has a tile of rows, of one head after the other: it loads, rotates, finds the largest
// value, casts and writes. The next head is on its way while one is worked on. There are as many
// CTAs as the GPU has room for, and each goes on with the next tile. CTAs of a cluster share a
// tile, for blocks of more rows than a CTA has. Where a scale has more rows than that, exchange.cu
// does it; where it has too many for that as well, two passes here.
#include "device/barriers.h"
#include "launch/launch.h"
#include "quantize/cluster_maximum.h"
#include "quantize/exchange.h"
#include "quantize/heads.h"
#include "quantize/kernel_dim.h"
#include "quantize/quantize.h"
#include "quantize/residency.h"
#include "quantize/rows.h"
#include "quantize/tiles_with_rows.h"

namespace fa3 {
namespace {

// What a launch does: everything in one pass over x, with CTAs for themselves or in clusters, of
// dense batches or of packed sequences, or the first or second of two.
enum class Pass { kOnly, kCluster, kPackedCluster, kMaxima, kCast };

constexpr bool is_cluster(Pass pass) {
  return pass == Pass::kCluster || pass == Pass::kPackedCluster;
}

// The largest of what the threads of a CTA have; bits of floats that are not negative are ordered
// as the floats are.
struct Maximum {
  uint32_t of_warps[2][kMostCtaWarps];

  CUTE_DEVICE void start(int) {}

  // INVARIANT: a barrier separates the use of a row of of_warps from its next use: they take turns.
  CUTE_DEVICE uint32_t of_all(uint32_t bits, int round, ClusterPlace const&) {
    int const turn = round % 2;
    int const lane = int(threadIdx.x) % 32;
    uint32_t const of_warp = __reduce_max_sync(0xffffffffu, bits);
    if (lane == 0) {
      of_warps[turn][threadIdx.x / 32] = of_warp;
    }
    __syncthreads();
    bool const is_one = lane < int(blockDim.x) / 32;
    return __reduce_max_sync(0xffffffffu, is_one ? of_warps[turn][lane] : 0);
  }
};

// What a first pass leaves for the second. A maximum of 0 is there already.
__device__ void add_maximum(QuantizeParams const& p, QuantizeTile const& tile, int head,
                            uint32_t bits) {
  if (threadIdx.x == 0 && bits > 0) {
    atomicMax(p.maxima + scale_place(p.shape, p.cu_seqlens, tile, head), bits);
  }
}

// The scale of this tile and head, in a second pass.
__device__ float scale_of_maxima(QuantizeParams const& p, QuantizeTile const& tile, int head) {
  QuantizeShape const& s = p.shape;
  bool const is_writer = writes_scale(s, tile, head);
  if (tile.used == 0 && !is_writer) {
    return 1.f;
  }
  int64_t const place = scale_place(s, p.cu_seqlens, tile, head);
  float const scale = scale_of(__ldg(p.maxima + place));
  if (is_writer && threadIdx.x == 0) {
    p.scales[place] = scale;
  }
  return scale;
}

// WHY not kPieces where a piece is narrow: a warp of it loads and stores from 32 rows at once (16k
// tokens, head dim 80 47 us for 42, 96 36 for 33; not rotated 50 for 34 and 37 for 31; H200,
// 2026-11-23).
constexpr LaneOrder lane_order_of(int dim) {
  return dim == kPlain            ? LaneOrder::kChunks
         : dim == 80 || dim == 96 ? LaneOrder::kRows
                                  : LaneOrder::kPieces;
}

// As few as there are without spills, in steps of 8: other warps work while one waits for its
// loads, or for the other CTAs of a cluster.
constexpr int registers_of_thread(int dim, Pass pass, bool is_wide) {
  if (is_wide) {
    return 72;  // with 64, the two passes spill
  }
  bool const is_tight =
      dim == kPlain || dim == 96 || (pass == Pass::kPackedCluster && (dim == 128 || dim == 192));
  if (is_cluster(pass)) {
    return dim == 80 ? 72 : is_tight ? 64 : 56;
  }
  return dim == 80 || dim == 96 || dim == 128 ? 72 : 64;
}

// Whether butterflies in a word are short. WHY not always: ptxas (13.0) then orders the
// rest otherwise, and some kernels spill, or take longer: head dim 64 1 to 3 %, 256 packed in
// clusters 2 %; of the others dense 0 to 4 % less, packed 1 to 5 % (H200, 2026-11-24).
constexpr bool has_short_butterflies(int dim, Pass pass) {
  return dim > 64 && !(dim == 256 && pass == Pass::kPackedCluster) &&
         !(dim == 80 && pass == Pass::kCluster);
}

// Whether CTAs or clusters may take the heads of a tile in turns: where it gains, and takes no
// registers.
constexpr bool takes_turns(int dim, Pass pass) {
  return dim == kPlain ? pass == Pass::kOnly || is_cluster(pass) : dim == 64 && pass == Pass::kOnly;
}

// The bits of the largest finite value of the rows of a CTA or cluster, normalised. Infinities are
// rare, and made NaN when there is one. WHY not by each thread, for its own: packed sequences that
// are not rotated take 7 to 10 % longer with that branch (H200, 2026-11-23).
template <class AnyRow, class AnyMaximum>
CUTE_DEVICE uint32_t largest_of_all(AnyRow& row, AnyMaximum& maximum, float norm, int& round,
                                    ClusterPlace const& cluster) {
  while (true) {
    uint32_t const own = __float_as_uint(row.largest(norm));
    uint32_t const bits = maximum.of_all(own, round, cluster);
    ++round;
    if (!AnyRow::kMayBeInfinite || bits != kInfinity) {
      return bits;
    }
    row.make_infinities_nan();
  }
}

// A launch that follows another may begin when all CTAs of that one have: what came before both is
// complete then.
CUTE_DEVICE void begin_launch(QuantizeParams const& p) {
  if (!p.follows) {
    wait_for_earlier_launches();
  }
  if (p.is_followed) {
    allow_later_launches();
  }
}

// Who waits for this launch has to find those complete that it follows: its last CTA waits for
// them.
CUTE_DEVICE void end_launch(QuantizeParams const& p) {
  if (p.follows && blockIdx.x + 1 == gridDim.x) {
    wait_for_earlier_launches();
  }
  allow_later_launches();
}

struct Nothing {};

template <class Element, int kDim, Pass kPass, Loads kLoads>
struct Quantizer {
  static constexpr bool kIsCluster = is_cluster(kPass);
  static constexpr bool kIsPacked = kPass == Pass::kPackedCluster;
  static constexpr bool kIsRotated = kDim != kPlain;
  static constexpr LaneOrder kOrder = lane_order_of(kDim);
  using OwnRow = RowOf<Element, kDim>;
  using Place = std::conditional_t<kOrder == LaneOrder::kChunks, ChunkPlace, ThreadPlace>;
  using AnyWriter = std::conditional_t<kOrder == LaneOrder::kRows && kDim == 80, RowWriterInSectors,
                                       RowWriter<Place>>;
  using AnyMaximum =
      std::conditional_t<kIsCluster, ClusterMaximum<kMostCtaWarps, kIsPacked>, Maximum>;

  // Of the CTA, in shared memory.
  struct Shared {
    AnyMaximum maximum;
    HeadSigns signs;
    BlockScales scales;                                       // here because registers are short
    int next_item;                                            // for the same reason
    std::conditional_t<kIsPacked, TeamTiles, Nothing> teams;  // in clusters
  };

  QuantizeParams const& p;
  Shared& shared;
  ClusterPlace cluster;
  Place place;
  using Rotation = RotationOf<kOrder, kDim, has_short_butterflies(kDim, kPass)>;
  Rotation rotation;
  int round = 0;  // of the maxima

  CUTE_DEVICE Quantizer(QuantizeParams const& p_, Shared& shared_)
      : p(p_),
        shared(shared_),
        cluster{kIsCluster && !kIsPacked ? cluster_rank() : 0, kIsCluster ? p.cluster_ctas : 1, 0},
        place(place_of_thread<kOrder, kDim>(p.shape, p.cta_rows)),
        rotation(place) {}

  // The items of as many CTAs or clusters as turns() says follow each other, of a tile all heads,
  // then of the next; those take them in turns.
  CUTE_DEVICE void run() {
    if constexpr (kIsPacked) {
      shared.teams.share_out(p);
    }
    int item = first_item(0);
    while (item < first_item(1)) {
      int const tile = p.by_heads.div(item);
      int const begin = item - tile * p.shape.heads;
      int const left = first_item(1) - item;
      int const end = min_of(begin + min_of(left, kMostCtaHeads * turns()), p.shape.heads);
      int const own = begin + place_in_turn(number(), item - first_item(0), turns());
      __syncthreads();  // what was shared has been read
      shared.next_item = item + end - begin;
      if (!takes_turns(kDim, kPass) || own < end) {
        work_through(tile, own, end);
      }
      item = shared.next_item;
    }
  }

 private:
  CUTE_DEVICE AnyWriter make_writer() const {
    if constexpr (kOrder == LaneOrder::kChunks) {
      return RowWriter<Place>(place, p.shape, dynamic_memory());
    } else if constexpr (kDim == 80) {
      return RowWriterInSectors(place);
    } else {
      return RowWriter<Place>(place, kDim > 0 || p.shape.head_dim % kSpanColumns == 0);
    }
  }

  // Of this CTA or cluster.
  static CUTE_DEVICE int number() {
    return int(kIsCluster ? cute::cluster_id_in_grid().x : blockIdx.x);
  }

  // Also from one head of this CTA or cluster to its next.
  CUTE_DEVICE int turns() const { return takes_turns(kDim, kPass) ? p.turns : 1; }

  // Of this CTA or cluster and those that it takes turns with, or of those one behind them.
  CUTE_DEVICE int first_item(int behind) const {
    int const number = (Quantizer::number() & -turns()) + behind * turns();
    if constexpr (kIsPacked) {
      return shared.teams.first_item(number);
    } else {
      return number * p.least_items + min_of(number, p.more_items);
    }
  }

  CUTE_DEVICE ClusterPlace own_team() const {
    if constexpr (kIsPacked) {
      return shared.teams.team;
    } else {
      return cluster;
    }
  }

  // Heads begin, begin + turns() .. end of a tile or a bundle.
  CUTE_DEVICE void work_through(int number, int begin, int end) {
    __builtin_assume(!kIsCluster || p.shape.is_packed == kIsPacked);
    if constexpr (kIsPacked) {
      TeamTile const part = shared.teams.find(p, number);
      if (part.number < 0) {
        return;
      }
      shared.maximum.make_team(part.team.ctas);
      if (threadIdx.x == 0) {
        shared.teams.team = part.team;
      }
      // Registers are short: these are not to be kept while a tile is looked for.
      place = place_of_thread<kOrder, kDim>(p.shape, p.cta_rows, thread_read_anew());
      rotation = Rotation(place);
      work_through(part.rows, part.number, part.team.rank, begin, end);
    } else {
      QuantizeTile const tile = tile_of_cta(p, number);
      work_through(kIsCluster ? part_of(tile, cluster.rank, p.cta_rows) : tile, number,
                   cluster.rank, begin, end);
    }
  }

  // rank: in the team.
  CUTE_DEVICE void work_through(QuantizeTile tile, int tile_number, int rank, int begin, int end) {
    Cursor<Element> cursor(p, place, tile, begin);
    int const heads = ceil_div(end - begin, turns());
    shared.scales.begin(p, tile, tile_number, begin, turns(), rank);
    if (kPass == Pass::kOnly && tile.written == 0) {
      shared.scales.write_ones(heads);
      __syncthreads();
      return;
    }
    RowsOfHeads<Element, kLoads, Place> rows(p, cursor, place, tile, begin);
    if (kIsRotated) {
      shared.signs.compute(p, begin, heads, turns());
    }
    if (kIsCluster && !kIsPacked && round == 0) {
      cute::cluster_wait();
    }
    __syncthreads();
    if (kIsPacked && !__any_sync(0xffffffffu, place.row < tile.written)) {
      only_exchange(heads);
      return;
    }
    AnyWriter writer = make_writer();
    int turn = 0;
    end = begin + heads * turns();
    for (int head = begin; head < end; head += turns(), ++turn) {
      OwnRow row;
      bool const is_last = head + turns() == end;
      rows.take(row, shared.signs.of_spans[kIsRotated ? turn : 0], rotation, head_step(), is_last);
      row.rotate(rotation);
      finish_row(row, writer, cursor.target, tile, head, head == begin, is_last);
      cursor.target += (kDim > 0 ? kDim : p.shape.head_dim) * turns();
    }
  }

  // Elements of x.
  CUTE_DEVICE int64_t head_step() const {
    if constexpr (kIsPacked) {
      return shared.teams.head_step();
    } else {
      return p.head_step;
    }
  }

  // Of a warp without rows.
  CUTE_DEVICE void only_exchange(int heads) {
    for (; heads > 0; ++round) {
      uint32_t const bits = shared.maximum.of_all(0, round, own_team());
      heads -= !OwnRow::kMayBeInfinite || bits != kInfinity;
    }
  }

  CUTE_DEVICE void finish_row(OwnRow& row, AnyWriter& writer, uint8_t* target,
                              QuantizeTile const& tile, int head, bool is_first, bool is_last) {
    bool const counts = place.row < tile.used;
    float scale = 1.f;
    if constexpr (kPass == Pass::kCast) {
      row.make_infinities_nan();
      scale = scale_of_maxima(p, tile, head);
    } else {
      uint32_t const bits = largest_of_all(row, shared.maximum, rotation.norm, round, own_team());
      if constexpr (kPass == Pass::kMaxima) {
        add_maximum(p, tile, head, bits);
        return;
      }
      scale = scale_of(bits);
      // Between the blocks of packed sequences, scales are 1. Who writes has the first row.
      shared.scales.write(counts ? scale : 1.f);
    }
    CastRow const cast = row.cast(factor_of(rotation.norm, scale));
    writer.write(cast, target, tile, is_first, is_last);
  }
};

template <class Element, int kDim, Pass kPass, Loads kLoads>
__global__ void __maxnreg__(registers_of_thread(kDim, kPass, sizeof(Element) == 4))
    quantize_kernel(QuantizeParams const __grid_constant__ p) {
  using Own = Quantizer<Element, kDim, kPass, kLoads>;
  __shared__ typename Own::Shared shared;
  shared.maximum.start(p.cluster_ctas);
  begin_launch(p);
  Own(p, shared).run();
  end_launch(p);
}

// ----------------------------------------------------------------------------------------- launch
constexpr int kTwoPassTile = 32;

// Heads of a tile that a CTA has at least, if that leaves threads enough to fill the GPU. What they
// share, and that the next one is loaded while one is worked on, gains up to a fifth (H200,
// 2026-11-22).
int least_heads(QuantizeParams const& params, int threads, int sm_count) {
  constexpr int kEnough = 4;
  constexpr int64_t kThreadsPerSm = 480;
  int heads = min_of(kEnough, params.shape.heads);
  int64_t const all = int64_t(params.items) * params.cluster_ctas * threads;
  while (heads > 1 && all < kThreadsPerSm * sm_count * heads) {
    heads /= 2;
  }
  return heads;
}

// How many CTAs or clusters take the heads of a tile in turns. Narrow heads that lie next to each
// other are then read at the same time, and a tile of few rows is shared by more CTAs (without and
// with turns: q of head dim 64, sequences of 98 to 5361 rows, 66 and 58 us; v of 96, 62 and 60;
// dense q 32 and 31; H200, 2026-11-24). WHY not of wider heads: a CTA then has few heads of a tile,
// and a new tile takes time to begin.
int turns_of(QuantizeShape const& s, int clusters) {
  constexpr int kMostDim = 96;
  constexpr int kMost = 8;
  constexpr int kLeastClusters = 12;  // so that few are left over
  if (s.head_dim > kMostDim || s.head_dim % kSectorBytes != 0) {
    return 1;
  }
  int turns = kMost;
  while (turns > 1 && (5 * turns > 2 * s.heads || clusters < kLeastClusters * turns)) {
    turns /= 2;
  }
  return turns;
}

template <class Element, int kDim, Pass kPass, Loads kLoads>
void launch_pass(QuantizeParams params, int sm_count, void* stream) {
  static std::atomic<uint64_t> known_room{0};
  int const ctas = params.cluster_ctas;
  int const warps = warps_of_tile(lane_order_of(kDim), params.shape.head_dim, params.cta_rows);
  LaunchShape shape{"quantize_fp8", 0, 32 * warps, 0};
  if (kLoads == Loads::kShared) {
    shape.shared_bytes = warps * NextRows<Element>::kWarpBytes;
  }
  if (lane_order_of(kDim) == LaneOrder::kChunks &&
      shares_sectors(params.shape.head_dim, ceil_div(params.cta_rows, kChunkRows))) {
    shape.shared_bytes = shape.threads * RowWriter<ChunkPlace>::kThreadBytes;
  }
  auto* const kernel = quantize_kernel<Element, kDim, kPass, kLoads>;
  int const room = room_for(kernel, shape, ctas, known_room) * (ctas == 1 ? sm_count : 1);
  int const least = least_heads(params, shape.threads, sm_count);
  int clusters = clamp(ceil_div(params.items, least), 1, max_of(1, room));
  params.turns = takes_turns(kDim, kPass) ? turns_of(params.shape, clusters) : 1;
  params.head_step = params.turns * params.x.head_stride;
  clusters -= clusters % params.turns;
  shape.grid = clusters * ctas;
  params.least_items = params.items / clusters;
  params.more_items = params.items % clusters;
  params.by_clusters = FastDiv(clusters);
  if constexpr (is_cluster(kPass)) {
    launch_in_clusters(ctas, kernel, shape, params, stream);
  } else {
    launch_early(kernel, shape, params, stream);
  }
}

// WHY not kAhead of head dim 256, packed in clusters: it takes 64 registers, and 2 CTAs fit on an
// SM for 3 (sequences of 98 to 5361 rows: 65.5 us for 61.5; H200, 2026-11-23).
constexpr Loads loads_of(int dim, bool is_wide, Pass pass) {
  bool const is_shared = dim == 64 || (dim == 256 && pass == Pass::kPackedCluster);
  return is_wide ? Loads::kNow : is_shared ? Loads::kShared : Loads::kAhead;
}

// Of a head dim without a kernel of its own there is none in clusters.
template <class Element, Pass kPass>
void launch_one_pass(QuantizeParams const& params, int sm_count, void* stream) {
  run_with_dim(kernel_dim(params), DimsOf<Element>(), [&]<int kDim>(KernelDim<kDim>) {
    if constexpr (kDim != 0 || !is_cluster(kPass)) {
      constexpr Loads kLoads = loads_of(kDim, sizeof(Element) == 4, kPass);
      launch_pass<Element, kDim, kPass, kLoads>(params, sm_count, stream);
    }
  });
}

template <class Element>
void launch_two_passes(QuantizeParams const& params, int sm_count, void* stream) {
  int const dim = params.is_rotated ? 0 : kPlain;
  run_with_dim(dim, GeneralDims(), [&]<int kDim>(KernelDim<kDim>) {
    launch_pass<Element, kDim, Pass::kMaxima, Loads::kNow>(params, sm_count, stream);
    launch_pass<Element, kDim, Pass::kCast, Loads::kNow>(params, sm_count, stream);
  });
}

template <class Element>
void launch_passes(QuantizeParams const& params, bool is_one, int sm_count, void* stream) {
  if (!is_one) {
    launch_two_passes<Element>(params, sm_count, stream);
  } else if (params.cluster_ctas == 1) {
    launch_one_pass<Element, Pass::kOnly>(params, sm_count, stream);
  } else if constexpr (sizeof(Element) == 2) {
    params.shape.is_packed
        ? launch_one_pass<Element, Pass::kPackedCluster>(params, sm_count, stream)
        : launch_one_pass<Element, Pass::kCluster>(params, sm_count, stream);
  }
}

int64_t count_scales(QuantizeShape const& s) {
  if (s.block == kScalePerTensor) {
    return 1;
  }
  if (s.block == kScalePerHead) {
    return int64_t(s.batch) * (s.heads / s.group);
  }
  return s.heads * (s.is_packed ? s.places(s.block) : int64_t(s.batch) * ceil_div(s.rows, s.block));
}

bool has_cluster_kernel(QuantizeParams const& params) {
  return params.dtype != Dtype::kFloat32 && kernel_dim(params) != 0;
}

// WHY the smallest teams only where sequences have no more rows than a CTA, in the mean: else there
// are more bundles that lack tiles (sequences of 98 to 5361 rows, blocks of 384, head dim 256: 67
// us for 65.5; H200, 2026-11-23).
void share_block(QuantizeParams& params, int ctas) {
  QuantizeShape const& s = params.shape;
  params.cta_rows = s.block / ctas;
  params.cluster_ctas = ctas;
  bool const are_short = s.rows <= int64_t(params.cta_rows) * s.batch;
  for (int size = 0; size < (are_short ? kTeamSizes : kTeamSizes - 1); ++size) {
    params.team_sizes[size] = TeamSize(ctas, params.cta_rows, size);
  }
}

// Whether a cluster has the rows of a block; fills in how its CTAs share them. As many CTAs as do
// without idle lanes, else with few: of 16 warps they are slower than exchange.cu (H200,
// 2026-11-22, blocks of 384 at head dim 128: 49 us, there 45; of 6 warps 39). Head dim 80 takes so
// many registers that 3 CTAs of 9 warps fit on an SM, but 4 of 6 (sequences of 98 to 5361 rows: 72
// us for 75; H200, 2026-11-23).
bool fits_cluster(QuantizeParams& params) {
  int const fewest_warps = kernel_dim(params) == 80 ? 8 : 4;
  constexpr int kMostClusterWarps = 12;
  QuantizeShape const& s = params.shape;
  if (s.block <= 0 || s.block > kMostClusterCtas * kMostThreads || !has_cluster_kernel(params)) {
    return false;
  }
  LaneOrder const order = lane_order_of(kernel_dim(params));
  int const block_warps = warps_of_tile(order, s.head_dim, s.block);
  for (int idle : {0, block_warps / 8}) {
    for (int ctas = kMostClusterCtas; ctas > 1; --ctas) {
      int const warps = warps_of_tile(order, s.head_dim, s.block / ctas);
      if (s.block % ctas == 0 && warps * ctas <= block_warps + idle && warps >= fewest_warps &&
          warps <= kMostClusterWarps) {
        share_block(params, ctas);
        return true;
      }
    }
  }
  return false;
}

}  // namespace

QuantizePlan plan_quantize(QuantizeParams& params, int sm_count) {
  QuantizeShape const& shape = params.shape;
  if (shape.block > 0 && shape.block <= kMostThreads &&
      warps_of_tile(lane_order_of(kernel_dim(params)), shape.head_dim, shape.block) <=
          kMostCtaWarps) {
    params.cta_rows = shape.block;
    return {QuantizeMethod::kBlocks, 0};
  }
  if (fits_cluster(params)) {
    return {QuantizeMethod::kBlocks, 0};
  }
  if (fits_exchange(params, sm_count)) {
    return {QuantizeMethod::kExchange, params.items};
  }
  return {QuantizeMethod::kTwoPasses, count_scales(shape)};
}

void launch_quantize(QuantizePlan const& plan, QuantizeParams params, int sm_count, void* stream) {
  if (plan.method == QuantizeMethod::kExchange) {
    return launch_exchange(params, sm_count, stream);
  }
  bool const is_one = plan.method == QuantizeMethod::kBlocks;
  QuantizeShape& shape = params.shape;
  shape.set_tile(is_one ? shape.block : kTwoPassTile);
  if (!is_one) {
    params.cta_rows = kTwoPassTile;
  }
  params.items = int(shape.tiles() * shape.heads);
  params.by_heads = FastDiv(shape.heads);
  bind_thread("quantize_fp8", 1, 0);
  if (!is_one) {
    clear_words(params.maxima, plan.words, stream);
  }
  switch (params.dtype) {
    case Dtype::kFloat16:
      return launch_passes<cutlass::half_t>(params, is_one, sm_count, stream);
    case Dtype::kBFloat16:
      return launch_passes<cutlass::bfloat16_t>(params, is_one, sm_count, stream);
    default:
      return launch_passes<float>(params, is_one, sm_count, stream);
  }
}

}  // namespace fa3
