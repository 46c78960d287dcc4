// The kernel that appends to a KV cache and rotates queries. Host side; the op append_and_attend
// calls it.
#pragma once

#include "kvcache/append_rows.h"
#include "core/problem.h"

namespace fa3 {

// A tensor of rows whose columns are contiguous; all strides are bytes and multiples of 16.
struct ByteView {
  char* data = nullptr;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
};

// New k, new v or q: where they are and where they go.
struct AppendRows {
  RowSchedule schedule;
  ByteView source;
  ByteView target;              // a cache; of q: (token, head)
  FastDiv by_entry;             // tokens of a batch entry of the source; packed: all
  int const* cu = nullptr;      // packed: batch + 1 numbers
  ScaleView scale;              // divides rows that are quantised
  float* set_scales = nullptr;  // those that are set, with the strides of `scale`
};

// What is in which slot. Dense: each sequence has one page.
struct CacheSlots {
  int const* seqlens = nullptr;  // nullptr: all have `length`
  int length = 0;
  int capacity = 0;                 // slots of a sequence
  int pages = 0;                    // dense: entries of the batch
  int const* batch_idx = nullptr;   // dense: the entry of a sequence; nullptr: its number
  int const* page_table = nullptr;  // nullptr: dense
  int64_t page_table_stride = 0;    // between sequences
  FastDiv by_page;                  // slots of a page
};

struct Rotary {
  char const* cos = nullptr;  // nullptr: nothing is rotated
  char const* sin = nullptr;
  int64_t cos_stride = 0;  // bytes between positions
  int64_t sin_stride = 0;
  int64_t positions = 0;
  int pairs = 0;                   // pairs of chunks in a row that are rotated
  Dtype dtype = Dtype::kBFloat16;  // the dtype of the tables; rows of e4m3 take 16 bits too
  bool is_interleaved = true;
  bool is_per_query = true;
  int const* seqlens = nullptr;  // the position of the first new token; nullptr: the length
};

// How 16-bit rows become e4m3: not, with the scales of heads, with those of pages, which are set
// where a page begins; kLatents: those of v with scales by key, which are set.
enum class Quantising { kNone, kByHead, kByPage, kLatents };

// Columns of latents: two chunks a lane.
constexpr int kLatentColumns = 512;

struct AppendParams {
  Dtype dtype = Dtype::kBFloat16;  // the dtype of new k; without new keys that of q
  Quantising quantising = Quantising::kNone;
  int batch = 0;
  AppendRows k;
  AppendRows v;
  AppendRows q;  // no tokens: no queries to rotate
  CacheSlots cache;
  Rotary rotary;
  PageSchedule pages;

  FA3_HD int64_t latent_ctas() const { return ceil_div(v.schedule.tokens, kAppendWarps); }

  int64_t ctas() const {
    bool const is_latent = quantising == Quantising::kLatents;
    int64_t const of_v = is_latent ? latent_ctas() : v.schedule.ctas;
    int64_t const of_both =
        quantising == Quantising::kByPage ? 2 * pages.ctas : k.schedule.ctas + of_v;
    return of_both + q.schedule.ctas;
  }
};

// On the current device and the given stream (a cudaStream_t). There are CTAs, at most 2^31 - 1.
void launch_append(AppendParams const& params, void* stream);

}  // namespace fa3
