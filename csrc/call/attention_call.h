// One call of attention, of any op: what checks, planner and launches read. Plain data;
// flash_attn3/arguments.py generates the groups.
#pragma once

#include <cmath>
#include <tuple>

#include "attention_arguments.h"
#include "core/key_list.h"

namespace fa3 {

// Packed sequences, with one of cu_seqlens: tensors have no batch, (total, heads, head_dim).
struct AttentionCall : CallArguments {
  bool is_backward = false;
  DeviceLimits device = {0, 0};    // q's device; 0: unknown
  TensorMeta q;                    // (batch, seqlen_q, heads_q, head_dim)
  TensorMeta k;                    // (batch, seqlen_k, heads_k, head_dim)
  TensorMeta v;                    // (batch, seqlen_k, heads_k, head_dim_v)
  std::optional<TensorMeta> out;   // (batch, seqlen_q, heads_q, head_dim_v); forward: if given
  std::optional<TensorMeta> dout;  // backward, with out and lse: as out
  std::optional<TensorMeta> lse;   // (batch, heads_q, seqlen_q); packed (heads_q, total_q)
  std::optional<TensorMeta> dlse;  // as lse
  std::optional<TensorMeta> dq;    // all three or none: the op writes into them, as q, k, v
  std::optional<TensorMeta> dk;
  std::optional<TensorMeta> dv;
  bool on_cache = false;            // k and v are a cache: (batch, capacity, heads_k, head_dim), or
                                    // with a page_table (pages, page_size, heads_k, head_dim)
  std::optional<TensorMeta> k_new;  // appended: (batch, new, heads_k, head_dim), or packed
  std::optional<TensorMeta> v_new;

  // WHY: a defaulted constructor zeroes all 2.4 KB, 40 ns of each call (g++ 12, 2026-11-25).
  AttentionCall() {}

  // visitor(name, field) for each tensor and argument.
  template <class Visitor>
  void visit(Visitor&& visitor) {
    visitor("q", q);
    visitor("k", k);
    visitor("v", v);
    visitor("out", out);
    visitor("dout", dout);
    visitor("lse", lse);
    visitor("dlse", dlse);
    visitor("dq", dq);
    visitor("dk", dk);
    visitor("dv", dv);
    visitor("on_cache", on_cache);
    visitor("k_new", k_new);
    visitor("v_new", v_new);
    CallArguments::visit(visitor);
  }

  // A group of arguments, by its type.
  template <class Group>
  Group const& group() const {
    return std::get<Group const&>(
        std::tie(*this, lengths, score, scales, cache, rotary, tree, latent, largest, mask));
  }

  bool has_packed_queries() const { return bool(lengths.cu_seqlens_q); }
  bool is_packed() const { return lengths.cu_seqlens_q || lengths.cu_seqlens_k; }

  // Sequences, in a call that has passed its checks.
  int64_t batch() const {
    return lengths.cu_seqlens_q     ? lengths.cu_seqlens_q->size[0] - 1
           : q.rank == 4            ? q.size[0]
           : cache.cu_seqlens_k_new ? cache.cu_seqlens_k_new->size[0] - 1
           : k_new                  ? k_new->size[0]
                                    : 0;
  }

  bool is_paged() const { return bool(cache.page_table); }
  int64_t table_columns() const { return is_paged() ? cache.page_table->size[1] : 1; }
  bool has_softcap() const { return score.softcap != 0.0; }
  bool has_lists() const { return bool(is_backward ? mask.query_lists : mask.key_lists); }
  int64_t sink_count() const { return score.sinks ? score.sinks->size[0] : 0; }

  // Queries that share a list of keys. Kernels for lists of one block each take dense batches of
  // narrow heads of 16 bits, without a softcap.
  int listed_rows() const {
    constexpr int kMostColumns = 128;
    bool const may_be_blocks = mask.key_lists && !is_packed() && !has_softcap() && !is_fp8() &&
                               q.size[3] <= kMostColumns && v.size[3] <= kMostColumns;
    auto const has = [&](int rows) {
      return mask.key_lists->size[2] == ceil_div(int(q.size[1]), rows);
    };
    return may_be_blocks && has(kListedBlock) && !has(kListedRows) ? kListedBlock : kListedRows;
  }

  // Absorbed MLA: v_cache holds latents, which qv meets.
  bool has_latents() const { return bool(latent.qv); }

  // K and V are e4m3 under wider queries; with qv V alone.
  bool converts() const {
    Dtype const e4m3 = Dtype::kFloat8E4M3;
    return v.dtype == e4m3 && q.dtype != e4m3 && (latent.qv ? k.dtype == q.dtype : k.dtype == e4m3);
  }

  // Whether the rules of e4m3 hold, without a cache.
  bool is_fp8() const {
    return q.dtype == Dtype::kFloat8E4M3 || scales.q_descale || scales.k_descale ||
           scales.v_descale || fp8.float16_out || fp8.promote;
  }

  // The tensor that a forward op writes into, if it was given.
  TensorMeta const* given_out() const { return out && !is_backward ? &*out : nullptr; }

  // head_dim ** -0.5, if none was given; with qv of all columns that meet the keys.
  double softmax_scale() const {
    int64_t const head_dim = q.rank > 0 ? q.size[q.rank - 1] : 1;
    int64_t const latent_dim = latent.qv ? latent.qv->size[latent.qv->rank - 1] : 0;
    return score.softmax_scale ? *score.softmax_scale
                               : 1 / std::sqrt(double(head_dim + latent_dim));
  }

  // The score without its mask and its sinks.
  ScoreArguments unmasked_score() const {
    ScoreArguments own;
    own.softmax_scale = softmax_scale();
    own.softcap = score.softcap;
    return own;
  }

  // The public function of such calls, which errors name.
  char const* op() const {
    return on_cache && !lengths.cu_seqlens_k ? "flash_attn_with_kvcache"
           : is_packed()                     ? "flash_attn_varlen_func"
                                             : "flash_attn_func";
  }
};

}  // namespace fa3
