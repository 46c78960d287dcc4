// The types that a kernel for gradients of chosen keys implies, and its shared memory.
#pragma once

#include "chosen/gradients.h"
#include "config/slices.h"
#include "core/softmax_math.h"
#include "device/async_copy.h"
#include "device/fragments.h"
#include "device/gemm.h"
#include "device/global_add.h"
#include "device/math.h"
#include "device/products.h"

namespace fa3 {

constexpr int kTileKeys = 64;
constexpr int kSlice = 64;                          // columns, 128 bytes
constexpr int kSliceElements = kHeadRows * kSlice;  // elements of a slice of 64 rows
constexpr int kMathThreads = 2 * kWarpgroupThreads;

// A tile of keys has slices of K, then of V. All tiles have 64 rows in slices of 64 columns with
// the 128-byte swizzle, one after the other.
template <class Element_, int kWidthK, int kWidthV, bool kHasLatents_>
struct ChosenTraits {
  using Element = Element_;
  static constexpr bool kHasLatents = kHasLatents_;
  static constexpr int kSlicesK = kWidthK / kSlice;
  static constexpr int kSlicesV = kWidthV / kSlice;
  static constexpr int kSlices = kSlicesK + kSlicesV;
  static constexpr int kSlicesQ = kHasLatents ? kSlices : kSlicesK;  // that scores multiply
  // The slices of dQ, and of the gradients of keys, that warpgroup 0 computes; 1 has the others.
  static constexpr int kOwnDq = (kSlicesQ + 1) / 2;
  static constexpr int kOwnKeys = kHasLatents ? (kSlices - 1) / 2 : kSlices / 2;

  // (rows, columns) with columns contiguous, and its transpose.
  template <int kColumns>
  using Tile =
      decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Element>{},
                                   cute::Shape<cute::Int<kHeadRows>, cute::Int<kColumns>>{}));
  template <int kColumns>
  using Transposed = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_MN_SW128_Atom<Element>{},
      cute::Shape<cute::Int<kColumns>, cute::Int<kHeadRows>>{}, cute::Step<cute::_2, cute::_1>{}));

  // A product of 64 rows and kColumns columns.
  template <Major kMajorA, Major kMajorB, int kColumns = 64>
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float,
                                 cute::Shape<cute::_64, cute::Int<kColumns>, cute::_16>, kMajorA,
                                 kMajorB>()));
  using MmaScores = Mma<Major::K, Major::K>;
  template <int kColumns>
  using MmaDq = Mma<Major::K, Major::MN, kColumns>;
  template <int kColumns>
  using MmaKeys = Mma<Major::MN, Major::MN, kColumns>;
};

template <class Traits>
struct ChosenStorage {
  using Element = typename Traits::Element;

  struct alignas(1024) {
    Element q[Traits::kSlicesQ * kSliceElements];
    Element dout[Traits::kSlicesV * kSliceElements];
    Element keys[Traits::kSlices * kSliceElements];
    union {
      Element scores[2][kSliceElements];  // P and dS, (heads, keys)
      // P of warpgroup 0 for 1, in the order of their threads.
      float4 exchange[kTileKeys / 8][kWarpgroupThreads];
    };
  };
  float lse_log2[kHeadRows];
  float delta[kHeadRows];

  // Name: what becomes true. Who arrives (arrivals) -> who waits.
  Mbarrier q_full;      // Q and dO have arrived: gathering threads (128) -> math warpgroups
  Mbarrier keys_full;   // so has a tile of keys: the same
  Mbarrier keys_empty;  // no product reads the tile any more: a thread of each math warpgroup (2)
                        // -> gathering threads

  CUTE_DEVICE void init_barriers() {
    q_full.init(kWarpgroupThreads);
    keys_full.init(kWarpgroupThreads);
    keys_empty.init(2);
    fence_barrier_init();
  }
};

// Named barriers of the math warpgroups: 128 arrive and 128 wait, or all 256 wait.
enum ChosenBarrier : int {
  kRowsReady = 0,      // LSE and delta are in shared memory (256)
  kScoresUnread = 1,   // 1 has no product that reads P and dS of the last tile: 1 arrives, 0 waits
  kProbabilities = 2,  // P is in `exchange`: 0 arrives, 1 waits
  kExchanged = 3,      // and has been read: 1 arrives, 0 waits
  kScoresReady = 4,    // P and dS are in `scores` (256)
  kReadByAll = 5,      // all threads of 1 have read `exchange`, where dS goes (128)
};

// The work of a CTA: a query, up to 64 query heads of a KV head.
struct ChosenWork {
  int query;
  int head_k;
  int head;   // first query head
  int heads;  // up to 64

  CUTE_DEVICE explicit ChosenWork(ChosenGradientParams const& p) {
    int const blocks = p.head_blocks();
    int const pair = int(blockIdx.x) / blocks;
    int const block = int(blockIdx.x) % blocks;
    query = pair / p.heads_k;
    head_k = pair % p.heads_k;
    head = head_k * p.group() + block * kHeadRows;
    heads = min_of(kHeadRows, p.group() - block * kHeadRows);
  }
};

// The list of a CTA's query and KV head.
struct ChosenList {
  int const* indices;
  int slots;  // rows that it names
  int block_log2;
  int blocks;  // that k has

  CUTE_DEVICE ChosenList(ChosenGradientParams const& p, ChosenWork const& work)
      : indices(p.indices + work.query * p.index_strides[0] + work.head_k * p.index_strides[1]),
        block_log2(p.block_log2),
        blocks(p.rows >> p.block_log2) {
    int const count =
        p.counts == nullptr ? p.indices_of_list : clamp(p.counts[work.query], 0, p.indices_of_list);
    slots = count << block_log2;
  }

  CUTE_DEVICE int tiles() const { return ceil_div(slots, kTileKeys); }

  // The row of k, or -1.
  CUTE_DEVICE int row_of(int slot) const {
    int const index = slot < slots ? indices[slot >> block_log2] : -1;
    return uint32_t(index) < uint32_t(blocks)
               ? (index << block_log2) + (slot & ((1 << block_log2) - 1))
               : -1;
  }
};

template <class Element>
CUTE_DEVICE char const* row_at(TensorView const& t, int row, int head) {
  return static_cast<char const*>(t.data) +
         (row * t.row_stride + head * t.head_stride) * int64_t(sizeof(Element));
}

}  // namespace fa3
