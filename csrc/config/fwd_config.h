// The choices of a forward variant: one constexpr value. A variant is a named struct that holds it
// as `k`: a tile of config/fwd_tiles.h with head dims, dtypes and kind, generated from
// csrc/plan/variants.py. Plain C++: the planner, explain() and the tests read the same value.
#pragma once

#include "config/shared_memory.h"
#include "config/slices.h"
#include "core/block_range.h"
#include "core/problem.h"

namespace fa3 {

// Slots: each enumerator is a type of csrc/forward (forward/slots.h).

// kDirect: V as loaded is an operand of PV. kTransposed: two warps transpose it in shared memory.
// kConverted: K and V are loaded as e4m3, and a warpgroup converts both to the dtype of Q.
enum class ValuesKind { kDirect, kTransposed, kConverted };

// kBlocks: q, k and v of e4m3 have one scale per block of rows or per head. kHeads: k and v have
// one scale per (sequence, KV head) or per page. kKeys: latent columns have one scale per key.
enum class ScalesKind { kNone, kBlocks, kHeads, kKeys };

// kPromoted: PV of a K tile is added to O in fp32, since the tensor cores accumulate e4m3 with
// about 14 bits.
enum class SumsKind { kFast, kPromoted };

// kSkewed: S of a K tile is issued together with PV of the K tile before (paper, section 3.2).
// kSerial: the GEMMs of a warpgroup do not overlap its own softmax.
enum class OverlapKind { kSkewed, kSerial };

// What the GEMMs of a warpgroup overlap with.
struct Overlap {
  OverlapKind kind = OverlapKind::kSkewed;  // its own softmax
  // The softmax of another warpgroup: two of them alternate in issuing GEMMs (paper, section 3.1).
  bool ping_pong = true;
  // The end of its tile: the last PV is issued together with the first S of the next tile, so that
  // the tensor cores are busy while O is divided and stored.
  bool tiles = false;
};

// How O is stored. kOverQueries: over the rows of Q in shared memory, copied out by a store warp.
// kStaged, kSent: through its own buffer in shared memory, copied out by the consumers or by the
// scale warp. kRegisters: from registers. kParts: on a cache, from registers, as parts that are
// combined where several CTAs share the keys. kFolded: as kOverQueries, after the parts of the keys
// have been folded into one another (forward/folded_parts.h).
enum class OutputKind { kOverQueries, kStaged, kSent, kRegisters, kParts, kFolded };

// Registers of the producer warpgroup; FwdConfig::producer_registers() has the numbers.
enum class ProducerSize { kNarrow, kUsual, kWide };

// A ring in front of the ring that the GEMMs read, of 8-bit kernels. kTransposed: stages of V as
// loaded, and the parts of a stage, which are loaded and transposed one after the other.
// kConverted: stages of K and of V as loaded.
struct RawRing {
  int stages = 0;
  int parts = 1;
};

// Numbers that measurements decided. Skip them on a first reading, as PtxasTuning.
struct Measured {
  // How much a row maximum may grow, in powers of two of P, before O is rescaled to it; 0: at once.
  // Where one key dominates a row, its P is then no longer exactly 1 and gets a rounding error.
  // H200, 2026-11-21, against 0: 2 was 0 to 5 % faster, 8 was 0 to 8 % faster (by head dim and
  // mask; 3 was not timed in that run). RMSE on outlier data: 3 has 0.2 % more than 0, 8 has 0.7 %
  // more.
  float lazy_rescale_log2 = 3.f;
  int ctas_per_sm = 1;
  // How the planner compares tiles of one head dim (H200, 2026-11-21; fitted to their speeds at S =
  // 512 to 16k, to 1 to 4 %): the speed per computed (query, key) pair, in percent of the fastest
  // tile; and the cost of starting and ending a tile, in keys of its loop.
  int relative_speed = 100;
  int fixed_keys = 0;
};

// Choices that change no result and no order of steps, only what ptxas (13.0) makes of a kernel.
struct PtxasTuning {
  ProducerSize producer = ProducerSize::kUsual;
  // In 16 bits: a step waits for PV after most of its exponentials (OnlineSoftmax::update).
  bool late_wait = false;
  // Masked kernels: the exponentials of a thread's first row follow the maxima of both rows. WHY:
  // otherwise small changes anywhere in the kernel decide whether ptxas interleaves the two.
  bool maxima_first = false;
  // Full kernels: k-steps of S whose Q stays in registers for a whole tile.
  int query_steps = 0;
  // kPromoted and kSkewed: the fp32 values of O that a thread keeps in shared memory, because its
  // registers do not suffice.
  int shared_sums = 0;
};

struct FwdConfig {
  // What a variant adds to a tile.
  char const* name = "";
  Dtype dtype_q = Dtype::kBFloat16;  // Q and P
  KernelKind kind = {};
  int head_dim = 0;
  int head_dim_v = 0;

  ValuesKind values = ValuesKind::kDirect;
  SumsKind sums = SumsKind::kFast;
  OutputKind output = OutputKind::kOverQueries;
  int consumer_warpgroups = 2;  // 64 rows of Q each
  int tile_n = 0;               // keys of a K tile
  int stages = 2;               // in the K ring, and in the V ring
  int q_stages = 1;             // in the Q ring; 2: the next tile's Q is loaded ahead
  Overlap overlap = {};
  // csrc/decode: on a cache, S^T = K Q^T and O^T = V^T P^T of up to 64 rows, by two warpgroups.
  bool is_swapped = false;

  RawRing raw = {};
  Measured measured = {};
  PtxasTuning tuning = {};

  // As measured, but at most 1 under a causal mask with these head dims in 16 bits. On normal data
  // the error is then 1.00 to 1.02 times that with 0, otherwise 1.02 to 1.04 times; it takes 0 to
  // 0.35 % of the time (H100, 2026-11-26). With other head dims it would take up to 9 %.
  constexpr float lazy_log2(bool is_causal) const {
    bool const is_cheap =
        head_dim == head_dim_v && (head_dim == 64 || head_dim == 128 || head_dim == 256);
    return is_causal && is_cheap && !folds() && !is_fp8() && measured.lazy_rescale_log2 > 1.f
               ? 1.f
               : measured.lazy_rescale_log2;
  }

  constexpr bool is_fp8() const { return dtype_q == Dtype::kFloat8E4M3; }
  constexpr bool converts() const { return values == ValuesKind::kConverted; }
  constexpr bool is_skewed() const { return overlap.kind == OverlapKind::kSkewed; }
  constexpr bool is_promoted() const { return sums == SumsKind::kPromoted; }

  // split_size without a cache: a CTA computes the parts of a tile one after the other.
  constexpr bool folds() const { return output == OutputKind::kFolded; }
  constexpr bool writes_over_queries() const {
    return output == OutputKind::kOverQueries || folds();
  }

  // Absorbed MLA: one warpgroup computes P of 64 rows, two compute the halves of O.
  constexpr bool is_latent() const { return kind.is_latent; }
  constexpr bool is_mla() const { return is_latent() && !is_swapped; }  // csrc/mla

  // K and V in global memory. Rotary columns have the dtype of Q.
  constexpr Dtype dtype_kv() const { return converts() ? Dtype::kFloat8E4M3 : dtype_q; }
  constexpr Dtype dtype_k() const { return is_latent() ? dtype_q : dtype_kv(); }

  constexpr ScalesKind scales() const {
    ScalesKind const converted = is_latent() ? ScalesKind::kKeys : ScalesKind::kHeads;
    return converts() ? converted : is_fp8() ? ScalesKind::kBlocks : ScalesKind::kNone;
  }

  // Stages of the second half of the latent columns, and bytes of half of a K tile as loaded.
  constexpr int right_stages() const { return converts() ? stages : stages - 1; }
  constexpr int raw_half_bytes() const {
    return tile_n * head_dim_v / 2 * element_bytes(dtype_kv());
  }

  // Producer warpgroups: those of a decode kernel convert e4m3 latents.
  constexpr int producers() const { return is_swapped && is_latent() && converts() ? 2 : 1; }
  constexpr int warpgroups() const {
    return consumer_warpgroups + producers() + (is_mla() ? 2 : is_swapped || converts());
  }
  constexpr int threads() const { return warpgroups() * kWarpgroupThreads; }

  // Registers per thread after setmaxnreg, in steps of 8 per thread. The launch allocates at most
  // 64 Ki for the CTA. The producer computes coordinates and issues copies; with FP8 it also
  // transposes V and reads scales.
  constexpr int consumer_registers() const {
    ProducerSize const producer = tuning.producer;
    if (is_mla()) {
      return 144;  // the warpgroup that computes P
    }
    if (is_swapped) {
      return producers() > 1 ? 160 : 192;
    }
    if (consumer_warpgroups == 1) {
      return producer == ProducerSize::kWide ? 240 : measured.ctas_per_sm == 1 ? 256 : 216;
    }
    if (kind.is_cache()) {
      return 192;
    }
    if (consumer_warpgroups == 2) {
      return producer == ProducerSize::kNarrow ? 240 : producer == ProducerSize::kUsual ? 232 : 224;
    }
    return producer == ProducerSize::kUsual ? 160 : 152;
  }

  constexpr int producer_registers() const {
    ProducerSize const producer = tuning.producer;
    if (is_mla()) {
      return 48;
    }
    if (is_swapped) {
      return producers() > 1 ? 96 : 120;
    }
    if (consumer_warpgroups == 1) {
      return producer == ProducerSize::kWide ? 168 : measured.ctas_per_sm == 1 ? 56 : 40;
    }
    if (kind.is_cache()) {
      return 120;
    }
    switch (producer) {
      case ProducerSize::kNarrow:
        return 24;
      case ProducerSize::kUsual:
        return consumer_warpgroups == 2 ? 40 : 32;
      default:
        return 56;
    }
  }

  // Registers of the converting warpgroup, and of the warpgroups that compute O of a latent cache,
  // whose GEMMs ptxas (13.0) serialises with fewer.
  static constexpr int converter_registers() { return 96; }
  static constexpr int output_registers() { return 160; }

  // CTAs of a cluster that split the columns of Q, K, V and O (forward/column_ctas.h), and their
  // head dims.
  constexpr int column_ctas() const { return head_dim > 256 ? 2 : 1; }
  constexpr int cta_head_dim() const { return head_dim / column_ctas(); }
  constexpr int cta_head_dim_v() const { return head_dim_v / column_ctas(); }

  // Columns of a slice, and of a CTA's head dims padded to whole slices; and those of K and V as
  // loaded.
  constexpr int slice() const { return slice_columns(dtype_q, head_dim); }
  constexpr int columns() const { return padded_columns(cta_head_dim(), slice()); }
  constexpr int columns_v() const { return padded_columns(cta_head_dim_v(), slice()); }
  constexpr int raw_slice() const {
    return !converts() ? slice() : head_dim % 128 == 0 && head_dim_v % 128 == 0 ? 128 : 64;
  }

  // is_swapped: the rows of a tile, as many as registers allow; the columns of K or V in a stage.
  constexpr int decode_rows() const {
    return is_latent()                      ? kWarpgroupRows / 4
           : converts() || head_dim_v > 128 ? kWarpgroupRows / 2
                                            : kWarpgroupRows;
  }
  // Rows that shared memory of a decode kernel has.
  constexpr int decode_buffer_rows() const { return is_latent() ? decode_rows() : kWarpgroupRows; }
  // The rows of Q that the GEMMs of a decode kernel compute for `rows` that exist.
  constexpr int computed_rows(int rows) const {
    return rows <= 8 && !is_latent() ? 8 : rows <= 16 ? 16 : rows <= 32 ? 32 : 64;
  }
  // What a row of a part of the keys has in its buffer: O, its LSE and that of a group of parts,
  // which each of the 8 warps of a decode kernel has for itself.
  constexpr int part_row_floats() const {
    return is_swapped ? round_up(head_dim_v, part_columns()) + 2 * 8
                      : head_dim_v + 2 * column_ctas();
  }
  // Counters of the complete parts of a tile or a group; a decode kernel has a byte a warp.
  constexpr int part_counters() const {
    return is_swapped ? 2 : consumer_warpgroups * column_ctas();
  }
  constexpr int part_columns() const { return head_dim <= 64 && head_dim_v <= 64 ? 64 : 128; }
  constexpr int stage_columns() const { return is_latent() ? 192 : part_columns(); }
  // A K tile of e4m3 latents as loaded, with its rotary columns.
  constexpr int raw_latent_bytes() const {
    return is_latent() && converts() ? tile_n * (head_dim_v + head_dim * element_bytes(dtype_q))
                                     : 0;
  }
  constexpr int stage_bytes() const {
    return tile_n * stage_columns() * element_bytes(is_latent() ? dtype_q : dtype_kv());
  }

  // The most K tiles, at either end of a tile, that a warpgroup skips if none of its rows sees a
  // key of them. WHY only with three warpgroups, and not in 16-bit causal kernels: 0 to 1 % slower
  // there.
  constexpr int most_skipped() const {
    bool const has_masked_ends =
        kind.mask == MaskKind::kInterval || (is_fp8() && kind.mask == MaskKind::kCausal);
    return consumer_warpgroups == 3 && overlap.tiles && has_masked_ends && !folds()
               ? most_skipped_tiles(stages, raw.stages)
               : 0;
  }

  constexpr SharedMemory shared_memory() const;
  constexpr int shared_bytes() const { return shared_memory().total(); }

 private:
  constexpr int small_bytes() const;
};

// ---------------------------------------------------------------------------------- shared memory

// With kOverQueries O is written over the rows of Q.
constexpr int q_buffer_bytes(FwdConfig const& c) {
  bool const holds_output = c.writes_over_queries() && c.columns_v() > c.columns();
  return kWarpgroupRows * element_bytes(c.dtype_q) * (holds_output ? c.columns_v() : c.columns());
}

constexpr int v_buffer_bytes(FwdConfig const& c) {
  return c.values == ValuesKind::kTransposed
             ? c.head_dim_v * padded_columns(c.tile_n, slice_keys(c.tile_n))
             : c.tile_n * c.columns_v() * element_bytes(c.dtype_q);
}

// Staged O of a warpgroup, which has 16 bits.
constexpr int staged_bytes(FwdConfig const& c) {
  bool const is_staged = c.output == OutputKind::kStaged || c.output == OutputKind::kSent;
  return is_staged ? kWarpgroupRows * 2 * padded_columns(c.head_dim_v) : 0;
}

// S that another CTA of a cluster sends to a warpgroup: fp32.
constexpr int sent_scores_bytes(FwdConfig const& c) {
  return c.column_ctas() > 1 ? kWarpgroupRows * c.tile_n * int(sizeof(float)) : 0;
}

// Barriers; with kBlocks also the scales, the current tiles and the staged LSE; with kHeads the
// scales of pages.
constexpr int FwdConfig::small_bytes() const {
  constexpr int kRowBytes = kWarpgroupRows * int(sizeof(float));
  constexpr int kTileBytes = 128;
  int const raw_rings = converts() ? 2 : raw.parts;
  int const barriers = 3 * q_stages * consumer_warpgroups + 4 * stages + 2 * raw.stages * raw_rings;
  int const key_scales = 2 * stages * 16;
  int const tiles = q_stages * (consumer_warpgroups * (kTileBytes + kRowBytes) + 8);
  int const sent_rows = output == OutputKind::kSent ? consumer_warpgroups * (kRowBytes + 8) : 0;
  int const page_scales = converts() ? 2 * raw.stages * tile_n * int(sizeof(float)) : 0;
  return barriers * 8 + page_scales +
         (scales() == ScalesKind::kBlocks ? key_scales + tiles + sent_rows : 0);
}

// What the list calls barriers, scales, coordinates of tiles and other small data.
inline constexpr char const* kSmallData = "small data";

// Absorbed MLA: the halves of the latent columns, the rotary columns, and the columns of Q that are
// not in registers; with a cache of e4m3 also halves as loaded.
constexpr SharedMemory latent_shared_memory(FwdConfig const& c) {
  int const element = element_bytes(c.dtype_q);
  int const half = c.head_dim_v / 2;
  return SharedMemory{}
      .add("Q", 1, kWarpgroupRows * (half + c.head_dim) * element)
      .add("left half", c.stages, c.tile_n * half * element)
      .add("right half", c.right_stages(), c.tile_n * half * element)
      .add("rotary", c.stages, c.tile_n * c.head_dim * element)
      .add("raw half", c.raw.stages, c.raw_half_bytes())
      .add(kSmallData, 1, (c.converts() ? c.tile_n * 16 : 0) + 3072);
}

// K and V share a ring. Small data: scales of pages; the limits, the maximum and eight sums of each
// row; a sequence for each thread; tiles and barriers.
constexpr SharedMemory decode_shared_memory(FwdConfig const& c) {
  int const rows = c.decode_buffer_rows() * element_bytes(c.dtype_q);
  int const scales = c.converts() ? c.stages * c.tile_n * int(sizeof(float)) : 0;
  int const sequences = 28 * c.threads();
  int const small = kWarpgroupRows * (20 + 8 * int(sizeof(float))) + c.q_stages * 160 + sequences;
  return SharedMemory{}
      .add("Q", c.q_stages, rows * (c.columns() + c.is_latent() * c.head_dim_v))
      .add("K and V", c.stages, c.stage_bytes())
      .add("P", c.is_latent() ? 2 : 1, rows * c.tile_n)
      .add("raw latents", c.is_latent() && c.converts(), c.raw_latent_bytes())
      .add(kSmallData, 1, round_up(scales + small + 16 * (c.stages + c.q_stages), 1024));
}

// forward/storage.h asserts that its members have these sizes.
constexpr SharedMemory FwdConfig::shared_memory() const {
  if (is_mla()) {
    return latent_shared_memory(*this);
  }
  if (is_swapped) {
    return decode_shared_memory(*this);
  }
  int const raw_keys = tile_n * element_bytes(dtype_kv());
  return SharedMemory{}
      .add("Q", q_stages * consumer_warpgroups, q_buffer_bytes(*this))
      .add("K", stages, tile_n * element_bytes(dtype_q) * columns())
      .add("V", stages, v_buffer_bytes(*this))
      .add("raw K", converts() ? raw.stages : 0, raw_keys * columns())
      .add("raw V", raw.stages, raw_keys * columns_v())
      .add("staged O", consumer_warpgroups, staged_bytes(*this))
      .add("O in fp32", consumer_warpgroups,
           kWarpgroupThreads * tuning.shared_sums * int(sizeof(float)))
      .add("S of the other CTA", consumer_warpgroups, sent_scores_bytes(*this))
      .add(kSmallData, 1, round_up(small_bytes(), 1024));
}

// ------------------------------------------------------------------------------------ the variants

struct HeadDims {
  int qk;
  int v;
};

// The value of a variant. A choice that no kernel can run is an error of compilation.
constexpr FwdConfig fwd_variant(char const* name, FwdConfig tile, HeadDims dims, Dtype dtype,
                                KernelKind kind) {
  FwdConfig c = tile;
  c.name = name;
  c.head_dim = dims.qk;
  c.head_dim_v = dims.v;
  c.dtype_q = dtype;
  c.kind = kind;
  c.tuning.query_steps = kind == kFullKernel ? tile.tuning.query_steps : 0;
  c.output = kind.is_cache() ? OutputKind::kParts : tile.output;
  auto const require = [](bool holds, char const* what) {
    if (!holds) {
      throw what;
    }
  };
  require(c.tile_n % 16 == 0 && c.tile_n <= 256, "PV reads keys in steps of 16, at most 256");
  require(c.head_dim % 16 == 0 && c.head_dim_v % 16 == 0, "head dims are multiples of 16");
  require(c.shared_bytes() <= kMaxSharedBytes, "the tile does not fit into shared memory");
  require(c.measured.ctas_per_sm * (c.shared_bytes() + 1024) <= kSharedBytesPerSm,
          "the CTAs of a multiprocessor do not fit into its shared memory");
  require(
      c.measured.ctas_per_sm == 1 || (c.measured.ctas_per_sm == 2 && c.consumer_warpgroups == 1),
      "two CTAs share the registers of a multiprocessor");
  require(c.tuning.producer != ProducerSize::kNarrow || c.consumer_warpgroups == 2,
          "only two warpgroups can use what a narrow producer leaves");
  require(c.scales() == ScalesKind::kNone || kScaleBlockKeys % c.tile_n == 0,
          "a K tile has one scale");
  require(!c.converts() || (kind.is_cache() && c.consumer_warpgroups == 1 && !c.is_fp8()),
          "K and V of a cache are converted, for one warpgroup of 16 bits");
  require(!c.is_swapped || (kind.is_cache() && c.consumer_warpgroups == 1 &&
                            c.tile_n == (c.is_latent() ? 64 : 128)),
          "each of two warpgroups has 64 keys of a K tile, or all of them");
  require(!c.is_promoted() || !c.is_skewed() || c.measured.lazy_rescale_log2 == 0.f,
          "O in fp32 is rescaled with every K tile");
  require(c.tuning.shared_sums == 0 || (c.is_promoted() && c.is_skewed()),
          "without overlap O in fp32 is in the registers of O");
  require(
      c.column_ctas() == 1 || (c.is_skewed() && !c.overlap.tiles && !c.is_fp8() && !c.is_swapped),
      "two CTAs add up the S of a K tile of 16 bits");
  require(!c.overlap.ping_pong || c.consumer_warpgroups == 2, "two warpgroups alternate");
  require(!c.is_latent() || (c.consumer_warpgroups == 1 && c.head_dim == 64 && c.head_dim_v == 512),
          "a latent cache has 64 rotary and 512 latent columns");
  require(c.tuning.query_steps == 0 || c.is_skewed(),
          "Q is loaded into registers with the first S of a tile");
  require(!c.overlap.tiles || (c.is_skewed() && c.q_stages >= 2),
          "the first S of the next tile needs its Q while O is stored through that of this tile");
  require(c.output != OutputKind::kSent || c.q_stages == 2,
          "the number of a stage of Q is the parity of its tile");
  return c;
}

}  // namespace fa3
