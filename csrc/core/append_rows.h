// Index arithmetic for appending to a KV cache (kvcache/append.cu): assigns rows to CTAs and chunks
// to threads, and finds the sequence of a token.
#pragma once

#include "core/int_math.h"

namespace fa3 {

constexpr int kAppendThreads = 128;
constexpr int kAppendChunkBytes = 16;

// The two chunks of a row that a thread processes. A row is one head of a token; token is -1 if the
// thread has none.
struct RowItem {
  int token;
  int head;
  int pair;  // index of the pair of chunks in the row
};

// Distributes rows of a tensor over CTAs and threads. A CTA has several tokens, or a part of one.
struct RowSchedule {
  int tokens = 0;
  int heads = 0;
  int chunks = 0;         // per row
  int tokens_of_cta = 1;  // at most
  int64_t ctas = 0;
  FastDiv by_parts;
  FastDiv by_token_threads;
  FastDiv by_row_threads;

  RowSchedule() = default;

  RowSchedule(int tokens_, int heads_, int chunks_)
      : tokens(tokens_), heads(heads_), chunks(chunks_) {
    int const row_threads = ceil_div(chunks, 2);
    int const token_threads = row_threads * heads;
    if (tokens == 0 || token_threads == 0) {
      return;
    }
    int const parts = ceil_div(token_threads, kAppendThreads);
    tokens_of_cta = max_of(1, kAppendThreads / token_threads);
    ctas = int64_t(ceil_div(tokens, tokens_of_cta)) * parts;
    by_parts = FastDiv(parts);
    by_token_threads = FastDiv(token_threads);
    by_row_threads = FastDiv(row_threads);
  }

  FA3_HD RowItem item_of(int cta, int thread) const {
    int const group = by_parts.div(cta);
    int const index = by_parts.mod(cta) * kAppendThreads + thread;
    int const in_group = by_token_threads.div(index);
    int const token = group * tokens_of_cta + in_group;
    if (in_group >= tokens_of_cta || token >= tokens) {
      return RowItem{-1, 0, 0};
    }
    int const in_token = by_token_threads.mod(index);
    return RowItem{token, by_row_threads.div(in_token), by_row_threads.mod(in_token)};
  }
};

struct ChunkPair {
  int first;
  int second;  // may be one past the last chunk of the row
};

// The chunks of a pair. In halves, a rotation takes columns rotary_dim / 2 apart, and so do the
// chunks of the first rotary_pairs pairs. The chunks of all other pairs are adjacent.
FA3_HD ChunkPair chunks_of_pair(int pair, int rotary_pairs, bool is_in_halves) {
  if (is_in_halves && pair < rotary_pairs) {
    return ChunkPair{pair, pair + rotary_pairs};
  }
  return ChunkPair{2 * pair, 2 * pair + 1};
}

// ------------------------------------------------------------------------------- scales by page
constexpr int kAppendWarps = kAppendThreads / 32;
// Upper bound of the scaled elements that set the scale of a page. WHY half of the largest e4m3:
// later rows may be twice as large.
constexpr float kLargestOfNewPage = 224.f;
constexpr float kLargestOfNewKey = 448.f;
constexpr float kLeastSetScale = 0x1p-60f;

// Distributes pages over warps. A unit is the new rows of one sequence and head in one page. A
// sequence has as many units as its rows can touch pages, wherever they begin, so some units have
// no rows.
struct PageSchedule {
  int total = 0;       // new rows of all sequences
  int new_tokens = 0;  // per sequence; -1: packed
  int units = 0;       // per sequence; packed: in addition to one per whole page
  int64_t ctas = 0;
  FastDiv by_heads;
  FastDiv by_page;

  PageSchedule() = default;

  // new_tokens: per sequence, or -1 if sequences are packed.
  PageSchedule(int batch, int total_, int new_tokens_, int heads, int page_size)
      : total(total_),
        new_tokens(new_tokens_),
        units(new_tokens < 0 ? 2 : pages_of(new_tokens, page_size)),
        by_heads(max_of(heads, 1)),
        by_page(page_size) {
    int64_t const all = first_unit(batch, total) * heads;
    ctas = total == 0 ? 0 : (all + kAppendWarps - 1) / kAppendWarps;
  }

  // The most pages that `slots` consecutive slots can touch.
  static int pages_of(int slots, int page_size) {
    return slots == 0 ? 0 : int((int64_t(slots) + page_size - 2) / page_size) + 1;
  }

  // start: first row of sequence b if sequences are packed.
  FA3_HD int64_t first_unit(int b, int start) const {
    return int64_t(b) * units + (new_tokens < 0 ? by_page.div(max_of(start, 0)) : 0);
  }
};

// The slots of a sequence in one page, from its length on.
struct PageSpan {
  int64_t number;  // index of the page in the sequence
  int64_t first;
  int64_t end;
};

// unit: index in the sequence. A unit past the last page has no slots.
FA3_HD PageSpan page_span(FastDiv const& by_page, int length, int64_t unit) {
  int64_t const page_size = by_page.divisor;
  int64_t const number = by_page.div(length) + unit;
  int64_t const begin = number * page_size;
  return PageSpan{number, begin < length ? length : begin, begin + page_size};
}

// Counts the numbers of a sorted list that are not above a given one. In each step 32 lanes probe
// one number each. The count is in [begin, begin + size]. For an unsorted list the count is
// arbitrary.
struct WarpSearch {
  int begin = 0;
  int size;

  FA3_HD explicit WarpSearch(int list_size) : size(list_size) {}

  FA3_HD int step() const { return ceil_div(size, 32); }

  // The index that a lane probes, or -1.
  FA3_HD int probe(int lane) const {
    int const offset = (lane + 1) * step() - 1;
    return offset < size ? begin + offset : -1;
  }

  // found: how many probes are not above the given number.
  FA3_HD void narrow(int found) {
    int const stride = step();
    begin += found * stride;
    size = min_of(stride - 1, size - found * stride);
  }
};

}  // namespace fa3
