// Host side of the kernel that appends to a KV cache and rotates queries. The op append_and_attend
// calls it.
#pragma once

#include "core/append_rows.h"
#include "core/problem.h"

namespace fa3 {

// A tensor with contiguous columns. All strides are in bytes and multiples of 16.
struct ByteView {
  char* data = nullptr;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
};

// Source and target of the rows of new k, new v or q.
struct AppendRows {
  RowSchedule schedule;
  ByteView source;
  ByteView target;              // a cache; for q: (token, head)
  FastDiv by_entry;             // tokens per batch entry of the source; packed: all tokens
  int const* cu = nullptr;      // packed: batch + 1 offsets
  ScaleView scale;              // quantised rows are divided by it
  float* set_scales = nullptr;  // scales that the kernel sets, with the strides of `scale`
};

// The slots of a cache. In a dense cache each sequence has one page.
struct CacheSlots {
  int const* seqlens = nullptr;  // nullptr: all have `length`
  int length = 0;
  int capacity = 0;                 // slots per sequence
  int pages = 0;                    // dense: entries of the batch
  int const* batch_idx = nullptr;   // dense: entry of each sequence; nullptr: its index
  int const* page_table = nullptr;  // nullptr: dense
  int64_t page_table_stride = 0;    // between sequences
  FastDiv by_page;                  // slots per page
};

struct Rotary {
  char const* cos = nullptr;  // nullptr: nothing is rotated
  char const* sin = nullptr;
  int64_t cos_stride = 0;  // bytes between positions
  int64_t sin_stride = 0;
  int64_t positions = 0;
  int pairs = 0;                   // rotated pairs of chunks per row
  Dtype dtype = Dtype::kBFloat16;  // dtype of the tables; 16-bit tables also serve e4m3 rows
  bool is_interleaved = true;
  bool is_per_query = true;
  int const* seqlens = nullptr;  // the position of the first new token; nullptr: the length
};

// How 16-bit rows are quantised to e4m3: not at all; with given scales by head; with scales by
// page, which are set by the rows that begin a page; or (kLatents) only v, with scales by key,
// which are set.
enum class Quantising { kNone, kByHead, kByPage, kLatents };

// Columns of a latent row: two chunks per lane.
constexpr int kLatentColumns = 512;

struct AppendParams {
  Dtype dtype = Dtype::kBFloat16;  // dtype of new k, or of q without new keys
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
    int64_t const v_ctas = is_latent ? latent_ctas() : v.schedule.ctas;
    int64_t const kv_ctas =
        quantising == Quantising::kByPage ? 2 * pages.ctas : k.schedule.ctas + v_ctas;
    return kv_ctas + q.schedule.ctas;
  }
};

// Launches on the current device and the given stream (a cudaStream_t). There are 1 to 2^31 - 1
// CTAs.
void launch_append(AppendParams const& params, void* stream);

}  // namespace fa3
