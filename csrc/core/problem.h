// The structs that cross the boundaries of the host side, as plain data: a call's tensors described
// by integers (TensorMeta), the problem (FwdProblem), the schedule of a variant (FwdSchedule) and
// the parameters of a launch (FwdParams).
#pragma once

#include <cstdint>

#include "core/key_list.h"
#include "core/key_splits.h"
#include "core/mask_limits.h"

namespace fa3 {

enum class Dtype : int {
  kFloat16 = 0,
  kBFloat16 = 1,
  kFloat8E4M3 = 2,
  kFloat32 = 3,
  kFloat64 = 4,
  kOther = 5
};
enum class DeviceType : int { kCpu = 0, kCuda = 1, kOther = 2 };

// Shape and device of a tensor; strides in elements.
struct TensorMeta {
  Dtype dtype = Dtype::kOther;
  DeviceType device = DeviceType::kOther;
  int device_index = 0;
  int rank = 0;
  int64_t size[5] = {};
  int64_t stride[5] = {};
  int64_t address = 0;           // the first element; 0 when unknown
  char const* dtype_name = "";   // as PyTorch writes it, for messages: "float16", "int32"
  char const* device_name = "";  // "cuda", "cpu", "mps"
};

// A pointer with strides in elements, order (batch, row, head, column); columns are contiguous.
struct TensorView {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
};

// FP8: rows that share a scale, where scales go by block.
constexpr int kScaleBlockQueries = 64;
constexpr int kScaleBlockKeys = 384;

// The scales of q, k or v; strides in elements. For packed sequences with scales by block, the
// blocks of sequence b begin at cu[b] / rows of a block + b, and batch_stride is 0.
struct ScaleView {
  float const* data = nullptr;      // nullptr: 1
  int64_t batch_stride = 0;         // between pages of scales by page, and of a latent cache
  int64_t head_stride = 0;          // a latent cache: between keys
  int64_t block_stride = 0;         // 0: per (sequence, KV head)
  int64_t head_in_pack_stride = 0;  // q only: between the heads in the rows of a tile
  bool by_kv_head = false;          // q only: heads are KV heads
};

enum class PackGqa : int { kNever = 0, kAlways = 1, kHeuristic = 2 };

// What the GPU offers; the defaults are those of an H100 or H200 SXM.
struct DeviceLimits {
  int sm_count = 132;
  int64_t l2_bytes = 50 << 20;
};

// K and V as a cache, by sizes. Without pages each sequence has an entry of `capacity` keys; packed
// sequences of keys are one entry.
struct CacheProblem {
  int entries = 0;     // pages, or entries
  int page_size = 0;   // keys of an entry of the tensors
  int capacity = 0;    // keys that a sequence can have
  int num_splits = 0;  // 0: even
  // Keys of the only sequence, if the host knows that each query sees all of them and no sink; else
  // 0.
  int keys_of_all = 0;
  // Queries choose their keys: entries of the page table outside the cache hold no key.
  bool is_chosen = false;
  // This launch of a decode kernel starts while the launch before it in the same call still runs,
  // and ends after it (is_second in decode/traits.h).
  bool is_second = false;
  // With is_second: how many CTAs the launch before it keeps busy, and an estimate of how many K
  // tiles a CTA of this launch computes meanwhile. At most 255 each.
  uint8_t earlier_ctas = 0;
  uint8_t earlier_k_tiles = 0;
  // Set if two launches share the call (SharedCall). This launch takes the sequences with
  // fewest_queries to most_queries queries. most_queries is 0 if one launch takes all sequences.
  int fewest_queries = 0;
  int most_queries = 0;
  int other_positions = 1;
  int other_weight_log2 = 0;
  int other_tile_units = 0;
  float other_cost = 1.f;
};

struct FwdProblem {
  Dtype dtype = Dtype::kBFloat16;
  int batch = 0;
  int seqlen_q = 0;
  int seqlen_k = 0;
  int heads_q = 0;
  int heads_k = 0;
  int head_dim = 0;
  int head_dim_v = 0;
  KernelKind kind;    // what kernels have to serve
  IntervalMask mask;  // in its most general form; right is 0 under a causal mask
  // Sequences of several lengths, one after the other: seqlen_q and seqlen_k are the longest, as
  // far as the host knows. The totals are the rows of the tensors.
  bool is_packed = false;
  int total_q = 0;
  int total_k = 0;
  bool has_unused = false;  // some rows of a sequence may not count
  bool promote = false;     // FP8: sums of PV in fp32
  bool converts = false;    // K and V are e4m3 under 16-bit Q
  PackGqa pack_gqa = PackGqa::kHeuristic;
  int sm_margin = 0;
  bool deterministic = false;  // the backward sums dQ in a fixed order
  int split_size = 0;          // keys of a part; 0: none
  int listed_rows = 0;         // kind.has_lists(): queries that share a list
  DeviceLimits device;
  CacheProblem cache;  // kind.is_cache()

  // A dense batch without further features.
  constexpr void set_dense(bool causal) {
    kind = causal ? kCausalKernel : kFullKernel;
    mask = IntervalMask{};
    mask.right = causal ? 0 : IntervalMask::kNoLimit;
  }

  // Parts follow one another in a CTA. On a cache they may have CTAs of their own.
  constexpr bool folds() const { return split_size > 0 && !kind.is_cache(); }

  // Packed: sequences, and runs of rows of no sequence (core/packed_tiles.h).
  int entries() const { return batch + 1 + (has_unused ? batch : 0); }
};

// Lengths of a packed batch, in device memory: sequence b has the rows from cu[b] up to cu[b + 1].
// Only the first used[b] count; all, if used is nullptr.
struct PackedLengths {
  int const* cu_q = nullptr;
  int const* cu_k = nullptr;
  int const* used_q = nullptr;
  int const* used_k = nullptr;
};

// What the kernel for a latent cache says of a tile that several CTAs share.
constexpr int kSharedTileBytes = 128;

// A cache in device memory; nullptr: not given (core/cache_keys.h).
struct CacheTensors {
  int const* held = nullptr;
  int const* leftpad = nullptr;
  int const* new_starts = nullptr;
  int const* entry_of = nullptr;
  int const* page_table = nullptr;  // (batch, pages)
  int64_t table_stride = 0;
  int held_by_all = 0;
  int appended = 0;
  int first_slot = 0;              // without `leftpad`
  int held_step = 0;               // CacheLengths::held_step
  uint32_t const* tree = nullptr;  // (batch, seqlen_q) or (total_q) rows of kTreeWords
  int64_t tree_stride = 0;         // rows of a batch entry
  float* parts = nullptr;          // workspace: slots * rows * (head_dim_v of the kernel + 2)
  int* arrived = nullptr;          // zeros, 2 for each slot and warpgroup; kind.is_latent: 2
  void* shared_tiles = nullptr;    // kind.is_latent, workspace: kSharedTileBytes for each slot
};

// How the keys of a cache are split, and what the parts need.
struct CacheSchedule {
  KeySplits splits;
  int lanes = 1;        // lines of work
  int weight_log2 = 0;  // CacheLine::weight_log2
  int tile_units = 0;   // CacheLine::tile_units
  int rows = 0;         // that a part has
  int64_t slots = 0;    // parts that there may be
};

// How the work of a problem is split into tiles for one variant: everything the launcher needs
// apart from pointers.
struct FwdSchedule {
  int pack = 1;     // query heads in the rows of a tile (core/row_packing.h)
  int m_tiles = 0;  // tiles along the queries
  int tiles = 0;    // m_tiles * (heads_q / pack) * batch
  bool longest_first = false;
  int lead = 0;  // positions by which the first tile begins before the first query; packed: in the
                 // longest sequence
  int section_pairs = 1;     // core/tile_order.h
  int least_last_pairs = 1;  // in the last section
  int grid = 0;              // CTAs
  // Packed: tiles is an upper bound; section_heads: the packed heads that go through a sequence
  // together (core/packed_tiles.h).
  int section_heads = 1;
  int least_lead = 0;  // a smaller lead is no gain
  int64_t workspace_ints = 0;
  // FwdConfig::folds(): K tiles of a part of the keys, and the workspace of the totals.
  int part_tiles = 0;
  int64_t total_floats = 0;
  CacheSchedule cache;
};

struct FwdParams {
  // FP8.
  ScaleView q_scale;
  ScaleView k_scale;
  ScaleView v_scale;
  bool scales_by_page = false;  // k_scale and v_scale: batch_stride is that of a page
  Dtype out_dtype = Dtype::kBFloat16;
  TensorView q;
  TensorView qv;  // kind.is_latent: what meets V, as q
  TensorView k;
  TensorView v;
  TensorView o;
  // (batch, heads_q, seqlen_q) or, packed, (heads_q, total_q), contiguous; nullptr: not wanted
  float* lse = nullptr;
  float* max_logits = nullptr;    // as lse; a general problem, or on a cache: -inf before
  int lse_heads = 0;              // heads of lse; more than those of the problem: a group of heads
  float const* sinks = nullptr;   // (heads_q); nullptr: none
  PackedLengths lengths;          // packed only
  int* workspace = nullptr;       // packed: schedule.workspace_ints
  int* ticket_counter = nullptr;  // dense: one of schedule/counters.h
  float* totals = nullptr;        // workspace: schedule.total_floats
  CacheTensors cache;
  MaskLists mask;  // kind.has_lists()
  FwdProblem problem;
  FwdSchedule schedule;
  float softmax_scale = 1.f;
  float softcap = 0.f;  // 0: none; else the problem is general
};

// How the work of a backward pass is split into tiles: everything the launcher needs apart from
// pointers.
struct BwdSchedule {
  int tile_m = 0;   // queries of a step
  int tile_n = 0;   // keys of a CTA, or of a cluster of them
  int m_tiles = 0;  // tiles along the queries: the steps of a CTA
  int n_tiles = 0;  // tiles along the keys
  int works = 0;    // clusters' tiles of keys, over KV heads and batch; packed: an upper bound
  int grid = 0;     // CTAs; 0 without keys
  bool in_sections = false;  // core/tile_order.h, with tiles of keys for those of queries
  int section_pairs = 1;
  int least_last_pairs = 1;   // in the last section
  int64_t rows = 0;           // queries of all heads and batches, padded to whole tiles
  int64_t dq_floats = 0;      // in the fp32 accumulator of dQ
  int64_t flags = 0;          // for dQ, in all tiles of queries; and the ticket
  bool dq_is_zeroed = false;  // the preprocess kernel does it, and all add, in any order
  // Packed: m_tiles and n_tiles are upper bounds for all sequences together; section_heads: the KV
  // heads that go through a sequence together (core/packed_tiles.h).
  int section_heads = 1;
  int most_queries = 0;    // that a tile of keys meets
  int64_t table_ints = 0;  // in the tables, a multiple of 8; else 0
};

struct BwdParams {
  TensorView q;
  TensorView k;
  TensorView v;
  TensorView o;
  TensorView dout;
  TensorView dq;
  TensorView dk;
  TensorView dv;
  // (batch, heads_q, seqlen_q) or, packed, (heads_q, total_q), contiguous, natural logarithm
  float const* lse = nullptr;
  float const* dlse = nullptr;   // as lse; nullptr: zero
  float const* sinks = nullptr;  // (heads_q); nullptr: none
  float* dsinks = nullptr;       // (heads_q), with sinks
  float* lse_log2 = nullptr;     // workspace: schedule.rows floats
  float* delta = nullptr;        // workspace: schedule.rows floats
  float* dq_sum = nullptr;       // workspace: schedule.dq_floats floats
  int* tables = nullptr;         // workspace of a packed problem: schedule.table_ints ints
  int* dq_flags = nullptr;       // workspace: schedule.flags ints
  int* ticket = nullptr;         // workspace
  PackedLengths lengths;         // packed only
  FwdProblem problem;
  MaskLists mask;  // kind.has_lists()
  BwdSchedule schedule;
  float softmax_scale = 1.f;
  float softcap = 0.f;  // 0: none; else the problem is general
};

}  // namespace fa3
