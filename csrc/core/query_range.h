// The tiles of queries that a tile of keys meets in the backward pass. The loop runs upwards: tiles
// [begin, free_begin) need the mask, tiles [free_begin, end) see every key of the tile.
#pragma once

#include "core/mask_limits.h"

namespace fa3 {

// The first query that sees a key of the sequence.
FA3_HD constexpr int first_position(int key, SeqlenPair len, bool causal) {
  return causal ? max_of(0, key + len.q - len.k) : 0;
}

struct QueryRange {
  int begin;
  int free_begin;
  int end;
};

// Keys [key_begin, key_begin + tile_n) against tiles of tile_m queries. A tile of keys that goes on
// past the end of the sequence is masked throughout: a filled-up key has score 0, and 2^(0 - LSE)
// may be infinite. Queries past the end need no mask: their LSE makes P zero.
FA3_HD constexpr QueryRange query_range(int key_begin, SeqlenPair len, int tile_m, int tile_n,
                                        bool causal) {
  int const end = ceil_div(len.q, tile_m);
  int const begin = min_of(first_position(key_begin, len, causal) / tile_m, end);
  int const key_end = key_begin + tile_n;
  int const seen_by_all = ceil_div(first_position(key_end - 1, len, causal), tile_m);
  return QueryRange{begin, key_end <= len.k ? clamp(seen_by_all, begin, end) : end, end};
}

// The last tile of keys whose QueryRange has tile m of queries; negative when there is none. The
// tiles before it have m too: who sees a key sees those before it.
FA3_HD constexpr int last_key_tile(int m, SeqlenPair len, int tile_m, int tile_n, bool causal) {
  int const seen = causal ? min_of(len.k, (m + 1) * tile_m - len.q + len.k) : len.k;
  return floor_div(seen - 1, tile_n);
}

}  // namespace fa3
