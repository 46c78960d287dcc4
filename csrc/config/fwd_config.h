// What a forward variant may choose. A variant is a named struct: a tile of config/fwd_tiles.h plus
// dtype and mask, generated from csrc/instances/variants.py. Plain constants: g++ reads them too,
// so that the planner, explain() and the tests know every variant without CUDA.
#pragma once

#include "core/problem.h"
#include "core/row_packing.h"

namespace fa3 {

// Columns of a slice of 16-bit elements: 128 bytes, what a TMA box brings and the swizzle permutes.
constexpr int kSliceColumns = 64;

constexpr int element_bytes(Dtype dtype) { return dtype == Dtype::kFloat8E4M3 ? 1 : 2; }

// Of q, k and v as they come. Head dims of up to 64 bytes have slices of 64 bytes.
constexpr int slice_columns(Dtype dtype, int head_dim) {
  return dtype == Dtype::kFloat8E4M3 && head_dim > 64 ? 128 : kSliceColumns;
}

// FP8: V lies transposed, in slices of so many keys.
constexpr int slice_keys(int tile_n) { return tile_n % 128 == 0 || tile_n % 128 > 64 ? 128 : 64; }

// Head dims lie in shared memory as whole slices.
constexpr int padded_columns(int head_dim, int slice = kSliceColumns) {
  return (head_dim + slice - 1) / slice * slice;
}

// fwd_producer_registers() says how many these are.
enum class ProducerSize { kNarrow, kUsual, kWide };

struct FwdDefaults {
  // Consumer warpgroups, of 64 rows of Q each.
  static constexpr int kConsumerWarpgroups = 2;
  // Buffers of the K ring and of the V ring.
  static constexpr int kStages = 2;
  // FP8: buffers of V as it comes; those of the V ring hold it transposed (forward/transpose.h).
  static constexpr int kRawStages = 0;
  // Parts of such a buffer, of as many keys each, that are loaded and transposed in turn: one is on
  // its way while another is worked on.
  static constexpr int kRawParts = 1;
  // FP8: O leaves through shared memory of its own; else, where there is no room, from registers.
  static constexpr bool kStageOutput = false;
  // Registers of the producer warpgroup; the others have what it leaves.
  static constexpr ProducerSize kProducerSize = ProducerSize::kUsual;
  // FP8: the sum of PV of a K tile is added to O in fp32, since that of the tensor cores has fewer
  // bits.
  static constexpr bool kPromote = false;
  // Where that has overlap in a warpgroup: of a thread's values of O in fp32, those that lie in
  // shared memory, for there are not registers for all.
  static constexpr int kSharedSums = 0;
  // Buffers of the Q ring; 2: the next tile's Q is loaded while this one is worked on.
  static constexpr int kQStages = 1;
  // Two warpgroups take turns at issuing their products (paper, section 3.1).
  static constexpr bool kPingPong = true;
  // k-steps of PV still to be issued when the turn is passed on.
  static constexpr int kTurnLead = 2;
  // S of a tile is issued beside PV of the tile before (paper, section 3.2); how much of its
  // softmax then runs beside that product is up to ptxas (TRAP in forward/mma.h).
  static constexpr bool kIntraOverlap = true;
  // The last PV of a tile is issued beside the first S of the next tile, so that the tensor cores
  // have work while O is divided and stored. Needs kIntraOverlap and the next tile's Q (kQStages).
  static constexpr bool kTileOverlap = false;
  // How much a row maximum may grow, in powers of two of P, before O is rescaled to it; 0: at once.
  // Where one key dominates a row, its P is then no longer exactly 1 and gets a rounding error.
  // H200, 2026-11-21, against 0: 2 was 0 to 5 % faster, 8 was 0 to 8 % (by head dim and mask; 3 was
  // not timed beside them). RMSE on outlier data: 3 has 0.2 % more than 0, 8 has 0.7 %.
  static constexpr float kLazyRescaleLog2 = 3.f;
  // Of masked kernels: the exponentials of a thread's first row come after the maxima of both.
  // Without a word about it ptxas (13.0) interleaves the two or not, by small changes anywhere in
  // the kernel.
  static constexpr bool kMaximaFirst = false;
  // k-steps of S whose part of Q is in registers while a tile is worked on; the others read it from
  // shared memory. Of full kernels (forward/traits.h).
  static constexpr int kQuerySteps = 0;
  // CTAs that a multiprocessor runs beside each other.
  static constexpr int kCtasPerSm = 1;
  // How the planner compares tiles of one head dim (H200, 2026-11-21; fitted to their speeds at
  // S = 512 to 16k, to 1 to 4 %): speed over the computed (query, key) pairs, in percent of the
  // fastest one; and what starting and ending a tile costs, in keys of its loop.
  static constexpr int kRelativeSpeed = 100;
  static constexpr int kFixedKeys = 0;
};

constexpr int kWarpgroupThreads = 128;

// FP8: of the producer warpgroup.
constexpr int kTransposingWarps = 2;

template <class Config>
constexpr int fwd_threads() {
  return (Config::kConsumerWarpgroups + 1) * kWarpgroupThreads;
}

// Registers per thread after setmaxnreg. The pool is what the launch had, in steps of 8 per thread
// and at most 64 Ki; the producer warpgroup computes coordinates and issues copies (where it is
// narrow, tickets of packed sequences spill), at FP8 it also turns V round and reads scales.
template <class Config>
constexpr int fwd_consumer_registers() {
  static_assert(
      Config::kCtasPerSm == 1 || (Config::kCtasPerSm == 2 && Config::kConsumerWarpgroups == 1),
      "two CTAs share the registers of a multiprocessor");
  if (Config::kConsumerWarpgroups == 1) {
    return Config::kCtasPerSm == 1 ? 256 : 216;
  }
  constexpr ProducerSize kProducer = Config::kProducerSize;
  if (Config::kConsumerWarpgroups == 2) {
    return kProducer == ProducerSize::kNarrow ? 240 : kProducer == ProducerSize::kUsual ? 232 : 224;
  }
  static_assert(kProducer != ProducerSize::kNarrow || Config::kConsumerWarpgroups == 2,
                "only of two warpgroups is there a use for what a narrow producer leaves");
  return kProducer == ProducerSize::kUsual ? 160 : 152;
}

template <class Config>
constexpr int fwd_producer_registers() {
  if (Config::kConsumerWarpgroups == 1) {
    return Config::kCtasPerSm == 1 ? 56 : 40;
  }
  switch (Config::kProducerSize) {
    case ProducerSize::kNarrow:
      return 24;
    case ProducerSize::kUsual:
      return Config::kConsumerWarpgroups == 2 ? 40 : 32;
    default:
      return 56;
  }
}

// On sm_90, of a CTA and of a multiprocessor, of which each CTA takes 1 KiB more than it asks for.
constexpr int kMaxSharedBytes = 232448;
constexpr int kSharedBytesPerSm = 228 * 1024;

template <class Config>
constexpr int fwd_columns(int head_dim) {
  return padded_columns(head_dim, slice_columns(Config::kDtype, Config::kHeadDim));
}

// O leaves through the buffers of Q. FP8: it does not.
template <class Config>
constexpr int q_buffer_bytes() {
  constexpr bool kFp8 = Config::kDtype == Dtype::kFloat8E4M3;
  int const of_q = fwd_columns<Config>(Config::kHeadDim);
  int const of_o = fwd_columns<Config>(Config::kHeadDimV);
  return kWarpgroupRows * element_bytes(Config::kDtype) * (of_q > of_o || kFp8 ? of_q : of_o);
}

template <class Config>
constexpr int v_buffer_bytes() {
  int const slice = slice_keys(Config::kTileN);
  return Config::kDtype == Dtype::kFloat8E4M3
             ? Config::kHeadDimV * padded_columns(Config::kTileN, slice)
             : Config::kTileN * fwd_columns<Config>(Config::kHeadDimV) * 2;
}

// FP8: where O is staged.
template <class Config>
constexpr int fwd_output_bytes() {
  int const of_warpgroup = kWarpgroupRows * 2 * padded_columns(Config::kHeadDimV);
  return Config::kStageOutput ? Config::kConsumerWarpgroups * of_warpgroup : 0;
}

// FP8: a warp of the producer warpgroup sends what is staged, and the LSE.
template <class Config>
constexpr bool sends_results() {
  return Config::kStageOutput && Config::kConsumerWarpgroups == 2;
}

// FP8: of what lies beside the barriers: scales of K tiles and of Q, the tiles at hand, the LSE on
// its way out.
template <class Config>
constexpr int fwd_small_bytes() {
  constexpr int kTileBytes = 128;
  int const of_keys = 2 * Config::kStages * 16;
  int const of_warpgroup = kTileBytes + kWarpgroupRows * int(sizeof(float));
  int const of_tiles = Config::kQStages * (Config::kConsumerWarpgroups * of_warpgroup + 8);
  int const of_rows = Config::kConsumerWarpgroups * (kWarpgroupRows * int(sizeof(float)) + 8);
  return Config::kDtype == Dtype::kFloat8E4M3
             ? of_keys + of_tiles + (sends_results<Config>() ? of_rows : 0)
             : 0;
}

// Shared memory of a variant: the Q ring, the K ring, the V ring, the mbarriers and what is small.
// forward/launch.h asserts that this is what the kernel's struct takes.
template <class Config>
constexpr int fwd_shared_bytes() {
  int const key_bytes = Config::kTileN * element_bytes(Config::kDtype);
  int const q_bytes = Config::kQStages * Config::kConsumerWarpgroups * q_buffer_bytes<Config>();
  int const k_bytes = Config::kStages * key_bytes * fwd_columns<Config>(Config::kHeadDim);
  int const raw_v_bytes = Config::kRawStages * key_bytes * fwd_columns<Config>(Config::kHeadDimV);
  int const v_bytes = Config::kStages * v_buffer_bytes<Config>();
  int const barriers = 3 * Config::kQStages * Config::kConsumerWarpgroups + 4 * Config::kStages +
                       2 * Config::kRawStages * Config::kRawParts;
  int const sum_bytes = Config::kConsumerWarpgroups * kWarpgroupThreads * Config::kSharedSums * 4;
  int const small = barriers * 8 + fwd_small_bytes<Config>();
  return q_bytes + k_bytes + v_bytes + raw_v_bytes + fwd_output_bytes<Config>() + sum_bytes +
         (small + 1023) / 1024 * 1024;
}

// A variant's constants as values, for the planner.
struct FwdVariantFacts {
  char const* name;
  Dtype dtype;
  MaskKind mask;
  int head_dim;
  int head_dim_v;
  int tile_n;
  int consumer_warpgroups;
  int stages;
  int raw_stages;
  int output_stages;
  int shared_sums;
  int q_stages;
  bool promotes;
  bool ping_pong;
  bool intra_overlap;
  bool tile_overlap;
  int ctas_per_sm;
  int relative_speed;
  int fixed_keys;
  int threads;
  int producer_registers;
  int consumer_registers;
  int shared_bytes;
};

template <class Config>
constexpr FwdVariantFacts fwd_facts(char const* name) {
  static_assert(Config::kTileN % 16 == 0 && Config::kTileN <= 256,
                "PV reads keys in steps of 16; a product has 256 columns");
  static_assert(Config::kHeadDim % 16 == 0 && Config::kHeadDimV % 16 == 0,
                "S reads the head dim in steps of 16, O is stored in steps of 16");
  static_assert(fwd_shared_bytes<Config>() <= kMaxSharedBytes,
                "the tile does not fit into shared memory");
  static_assert(Config::kCtasPerSm * (fwd_shared_bytes<Config>() + 1024) <= kSharedBytesPerSm,
                "so many CTAs do not fit into shared memory");
  static_assert(Config::kDtype != Dtype::kFloat8E4M3 || kScaleBlockKeys % Config::kTileN == 0,
                "a K tile has one scale");
  static_assert(!Config::kPromote || !Config::kIntraOverlap || Config::kLazyRescaleLog2 == 0.f,
                "O in fp32 is rescaled with every K tile");
  static_assert(Config::kSharedSums == 0 || (Config::kPromote && Config::kIntraOverlap),
                "without overlap O in fp32 has the registers of O");
  static_assert(!Config::kPingPong || Config::kConsumerWarpgroups == 2,
                "taking turns is between two warpgroups");
  static_assert(Config::kQuerySteps == 0 || Config::kIntraOverlap,
                "a tile begins with an S of its own where its Q comes into registers");
  static_assert(!Config::kTileOverlap || (Config::kIntraOverlap && Config::kQStages >= 2),
                "the first S of the next tile needs its Q, while O leaves through this tile's");
  return FwdVariantFacts{name,
                         Config::kDtype,
                         Config::kMask,
                         Config::kHeadDim,
                         Config::kHeadDimV,
                         Config::kTileN,
                         Config::kConsumerWarpgroups,
                         Config::kStages,
                         Config::kRawStages,
                         Config::kStageOutput ? 1 : 0,
                         Config::kSharedSums,
                         Config::kQStages,
                         Config::kPromote,
                         Config::kPingPong,
                         Config::kIntraOverlap,
                         Config::kTileOverlap,
                         Config::kCtasPerSm,
                         Config::kRelativeSpeed,
                         Config::kFixedKeys,
                         fwd_threads<Config>(),
                         fwd_producer_registers<Config>(),
                         fwd_consumer_registers<Config>(),
                         fwd_shared_bytes<Config>()};
}

}  // namespace fa3
