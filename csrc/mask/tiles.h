// The tiles of a list as bits, 32 a step, and the order of entries.
#pragma once

#include "device/math.h"
#include "mask/sequences.h"

namespace fa3 {

CUTE_DEVICE uint32_t ballot(bool vote) { return __ballot_sync(kWholeWarp, vote); }

CUTE_DEVICE uint32_t bits_below(int n) {
  return n <= 0 ? 0u : n >= kWordBits ? ~0u : (1u << n) - 1;
}

CUTE_DEVICE uint32_t bits_between(int first, int after) {
  return bits_below(after) & ~bits_below(first);
}

// Of the 32 blocks from one on: those of which some key is in the interval, and all keys are.
CUTE_DEVICE uint32_t met_blocks(Interval keys, int block) {
  return bits_between(keys.begin / kMaskBlock - block, ceil_div(keys.end, kMaskBlock) - block);
}

CUTE_DEVICE uint32_t covered_blocks(Interval keys, int block) {
  return bits_between(ceil_div(keys.begin, kMaskBlock) - block, keys.end / kMaskBlock - block);
}

// Bits of a step's 32 tiles: listed, and free.
struct Listed {
  uint32_t listed;
  uint32_t free;
};

// The same for each half of the queries, where a tile that is not listed may be free; and which
// halves of the keys mask_blocks shows.
struct StepWords {
  uint32_t some[2];
  uint32_t all[2];
  uint32_t shown[kListBlockBits];
  int own_bits;  // those of the lane's tile

  CUTE_DEVICE Listed of_list() const {
    uint32_t const listed = some[0] | some[1];
    return Listed{listed, listed & all[0] & all[1]};
  }
  CUTE_DEVICE Listed of_half(int half) const { return Listed{some[half], some[half] & all[half]}; }
};

// The K tiles of a list of a head. Each lane has one of 32.
struct KeyTiles {
  MaskListParams const& p;
  ListQueries queries;
  SeenBlocks const* seen;       // nullptr: all keys
  uint8_t const* block_row[2];  // of each half of the queries; nullptr: outside of the blocks

  CUTE_DEVICE KeyTiles(MaskListParams const& p_, int batch, int head, int list)
      : p(p_), queries(queries_of_list(p_, batch, list)), seen(nullptr), block_row{} {
    if (p.interval_count > 0) {
      int const of_batch = p.interval_batch > 1 ? batch : 0;
      seen = p.seen + (int64_t(of_batch) * p.lists() + list) * p.block_words();
    }
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      int const row = p.tile_rows == kMaskBlock ? queries.tile : 2 * queries.tile + half;
      if (p.has_blocks && queries.rows > 0 && row < p.block_rows) {
        block_row[half] = p.blocks + queries.sequence * p.block_stride[0] +
                          head / p.sharing_heads * p.block_stride[1] + row * p.block_stride[2];
      }
    }
  }

  // Bits of the 32 blocks of keys from one on.
  CUTE_DEVICE SeenBlocks seen_blocks(int block) const {
    if (seen != nullptr) {
      return seen[block / kWordBits];
    }
    Interval const keys{0, queries.keys};
    SeenBlocks found{{0, 0}, {~0u, ~0u}};
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (queries.rows_of_half(half) > 0) {
        found.some[half] = met_blocks(keys, block);
        found.all[half] = covered_blocks(keys, block);
      }
    }
    return found;
  }

  // Bits of both halves of a tile's keys.
  CUTE_DEVICE uint32_t shown(int half, int block, int blocks) const {
    if (!p.has_blocks) {
      return 3;
    }
    uint32_t bits = 0;
    for (int i = 0; i < blocks && block_row[half] != nullptr && block + i < p.block_columns; ++i) {
      bits |= uint32_t(block_row[half][(block + i) * p.block_stride[3]] != 0) << i;
    }
    return blocks == 1 ? 3 * bits : bits;
  }

  CUTE_DEVICE StepWords step(int first) const {
    int const tile = first + lane_of_warp();
    int const blocks = p.tile_keys / kMaskBlock;
    int const block = tile * blocks;
    uint32_t const whole = (1u << blocks) - 1;
    bool const exists = tile < p.tiles();
    SeenBlocks const found = exists ? seen_blocks(block / kWordBits * kWordBits) : SeenBlocks{};
    StepWords words{};
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      uint32_t const own = exists ? shown(half, block, blocks) : 0;
      uint32_t const some = found.some[half] >> block % kWordBits & own & whole;
      uint32_t const all = found.all[half] >> block % kWordBits &
                           (queries.rows_of_half(half) > 0 ? own : whole) & whole;
      words.some[half] = ballot(some != 0);
      words.all[half] = ballot(all == whole);
      words.shown[2 * half] = ballot((own & 1) != 0);
      words.shown[2 * half + 1] = ballot((own & 2) != 0);
      words.own_bits |= int(own) << 2 * half;
    }
    return words;
  }
};

// The marks of the tiles of queries of a list, for all steps.
struct MarkWriter {
  MaskListParams const& p;
  QueryMarks* at;  // of the first tile of queries and the first step
  int later[2] = {};

  CUTE_DEVICE MarkWriter(MaskListParams const& p_, int of_head, int list) : p(p_), at(p_.marks) {
    if (at != nullptr) {
      at += int64_t(of_head) * p.tile_words() * p.lists() * p.tiles_of_list() +
            list * p.tiles_of_list();
    }
  }

  CUTE_DEVICE Listed words_of(StepWords const& step, int i) const {
    return p.tiles_of_list() == 1 ? step.of_list() : step.of_half(i);
  }

  // In a first pass over all steps.
  CUTE_DEVICE void count(StepWords const& step) {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      later[i] += __popc(words_of(step, i).listed);
    }
  }

  // In a second one.
  CUTE_DEVICE void write(StepWords const& step, int number) {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      Listed const words = words_of(step, i);
      later[i] -= __popc(words.listed);
      if (i < p.tiles_of_list() && is_first_lane()) {
        uint32_t const* const own = step.shown + 2 * i;
        uint32_t const keep = p.tiles_of_list() == 1 ? ~0u : 0;
        at[int64_t(number) * p.lists() * p.tiles_of_list() + i] =
            QueryMarks{words.listed,
                       words.free,
                       later[i],
                       0,
                       {own[0], own[1], step.shown[2] & keep, step.shown[3] & keep}};
      }
    }
  }
};

// Where entries of a list go: free ones first.
struct Places {
  int free = 0;
  int masked;

  // The place of the lane's entry, -1 if its tile is not listed. Each step asks once.
  CUTE_DEVICE int next(Listed const& words) {
    int const lane = lane_of_warp();
    uint32_t const before = bits_below(lane);
    uint32_t const others = words.listed & ~words.free;
    int const own = words.free >> lane & 1 ? free + __popc(words.free & before)
                    : others >> lane & 1   ? masked + __popc(others & before)
                                           : -1;
    free += __popc(words.free);
    masked += __popc(others);
    return own;
  }
};

}  // namespace fa3
