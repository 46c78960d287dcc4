// Tables of calls of attention: their tensors and which arguments go together, by public names.
#pragma once

#include "checks/table.h"
#include "call/attention_call.h"
#include "core/tree_mask.h"

namespace fa3 {

// The passes of a check; a row or rule belongs to one or several. kCallPass: every call. kKeyPass:
// no cache, or packed keys in its place, for which kPackedPass has further rules.
inline constexpr unsigned kCallPass = 1, kKeyPass = 2, kScalePass = 4, kCachePass = 8,
                          kLatentScalePass = 16, kAppendPass = 32, kPackedPass = 64;

using Call = AttentionCall;

// A tensor of a call: its member, or that of one of its groups of arguments.
template <class Group, class Field>
Group group_type(Field Group::*);

template <auto kMember>
constexpr TensorMeta const* at(Call const& call) {
  return pointer_to(call.group<decltype(group_type(kMember))>().*kMember);
}

// of: gives nullptr if the call lacks the tensor.
struct Row {
  unsigned passes;
  TensorMeta const* (*of)(Call const&);
  Form form;
};

inline constexpr Memory kResult = kOwn | kColumns, kCache = kColumns | kWhole | kChunks,
                        kTable = kList | kChunks;

static_assert(kListHeader + 1 == 5 && kTreeWords == 4);
inline constexpr Row kTensors[] = {
    {kCallPass, at<&Call::q>, {"q", kAnchor, "b s Hq D", kColumns}},
    {kCallPass, at<&LengthArguments::cu_seqlens_q>, {"cu_seqlens_q", kInt32, "B+1"}},
    {kCallPass, at<&LengthArguments::seqused_q>, {"seqused_q", kInt32, "B"}},
    {kKeyPass, at<&Call::k>, {"k", kKeys, "bk sk Hk D", kColumns}},
    {kKeyPass, at<&Call::v>, {"v", kValues, "bk sk Hk Dv", kColumns}},
    {kKeyPass, at<&LengthArguments::cu_seqlens_k>, {"cu_seqlens_k", kInt32, "B+1"}},
    {kKeyPass, at<&LengthArguments::seqused_k>, {"seqused_k", kInt32, "B"}},
    {kCachePass, at<&Call::k>, {"k_cache", kKeys, "e c Hk D", kCache}},
    {kCachePass, at<&Call::v>, {"v_cache", kValues, "e c Hk Dv", kCache}},
    {kCachePass, at<&LatentArgument::qv>, {"qv", kOut, "b s Hq Dv", kColumns}},
    {kCachePass, at<&CacheArguments::page_table>, {"page_table", kInt32, "bt Np"}},
    {kCachePass, at<&CacheArguments::cache_seqlens>, {"cache_seqlens", kInt32, "B"}},
    {kCachePass, at<&CacheArguments::cache_batch_idx>, {"cache_batch_idx", kInt32, "B"}},
    {kCachePass, at<&CacheArguments::cache_leftpad>, {"cache_leftpad", kInt32, "B"}},
    {kCachePass, at<&CacheArguments::cu_seqlens_k_new>, {"cu_seqlens_k_new", kInt32, "B+1"}},
    {kCachePass, at<&RotaryArguments::rotary_seqlens>, {"rotary_seqlens", kInt32, "B"}},
    {kCallPass, [](Call const& c) { return c.given_out(); }, {"out", kOut, "b s Hq Dv", kResult}},
    {kCallPass, at<&LargestArgument::max_logits_out>, {"max_logits_out", kWide, "b Hq s", kOwn}},
    {kCallPass, at<&ScoreArguments::sinks>, {"s_aux", kWide, "Hq", kList}},
    {kScalePass, at<&ScaleArguments::q_descale>, {"q_descale", kFloat, "B Hk", kAny, "bz Hq Zq"}},
    {kScalePass, at<&ScaleArguments::k_descale>, {"k_descale", kFloat, "bs Hk", kAny, "bz Hk Zk"}},
    {kScalePass, at<&ScaleArguments::v_descale>, {"v_descale", kFloat, "bs Hk", kAny, "bz Hk Zk"}},
    {kLatentScalePass, at<&ScaleArguments::v_descale>, {"v_descale", kFloat, "e c Z?"}},
    {kCallPass, at<&TreeArguments::tree_mask>, {"tree_mask", kInt32, "b s 4", kInt4Rows}},
    {kKeyPass, at<&MaskArguments::mask_rows>, {"mask_rows", kInt32, "b? s 4", kInt4Rows}},
    {kKeyPass, at<&MaskArguments::mask_blocks>, {"mask_blocks", kBool, "B? Hq? Mq Mk"}},
    {kKeyPass, at<&MaskArguments::key_lists>, {"key_lists", kInt32, "Bz? Hq? Lq Wk+5"}},
    {kKeyPass, at<&MaskArguments::query_lists>, {"query_lists", kInt32, "Bz? Hq? Lk Wq+5"}},
    {kKeyPass, at<&Call::dout>, {"dout", kOut, "b s Hq Dv"}},
    {kKeyPass, at<&Call::out>, {"out", kOut, "b s Hq Dv"}},
    {kKeyPass, at<&Call::lse>, {"lse", kWide, "b Hq s"}},
    {kKeyPass, at<&Call::dlse>, {"dlse", kWide, "b Hq s"}},
    {kKeyPass, at<&Call::dq>, {"dq", kOut, "b s Hq D", kResult}},
    {kKeyPass, at<&Call::dk>, {"dk", kOut, "bk sk Hk D", kResult}},
    {kKeyPass, at<&Call::dv>, {"dv", kOut, "bk sk Hk Dv", kResult}},
    {kAppendPass, at<&Call::k_new>, {"k", kNewK, "bn sn Hk D", kColumns}},
    {kAppendPass, at<&Call::v_new>, {"v", kNewV, "bn sn Hk Dv", kColumns}},
    {kAppendPass, at<&RotaryArguments::rotary_cos>, {"rotary_cos", kTables, "L Dr", kTable}},
    {kAppendPass, at<&RotaryArguments::rotary_sin>, {"rotary_sin", kTables, "L Dr", kTable}},
};

inline bool is_fp8(TensorMeta const& meta) { return meta.dtype == Dtype::kFloat8E4M3; }
inline bool runs_in_fp8(Call const& c) { return is_fp8(c.q) && c.q.device == DeviceType::kCuda; }

// Latents alone become e4m3: k_cache keeps 16 bits, and new rows have its dtype.
inline bool quantises_latents(Call const& call) {
  return call.v_new && is_fp8(call.v) && !is_fp8(*call.v_new) && !is_fp8(call.k);
}

// What else a rule may name: whether a call has it.
struct Condition {
  std::string_view name;
  bool (*holds)(Call const&);
};

inline constexpr Condition kConditions[] = {
    {"appended keys", [](Call const& c) { return c.cache.cu_seqlens_k_new || c.cache.appended; }},
    {"cache_seqlens",
     [](Call const& c) { return c.cache.cache_seqlens || c.cache.cache_length >= 0; }},
    {"shared_prefix", [](Call const& c) { return c.prefix.shared_prefix != 0; }},
    {"descale_by_page", [](Call const& c) { return c.by_page.descale_by_page; }},
    {"indices", [](Call const& c) { return c.choice.keys_chosen; }},
    {"causal", [](Call const& c) { return c.score.causal; }},
    {"window_size", [](Call const& c) { return c.score.window_left + c.score.window_right > -2; }},
    {"attention_chunk", [](Call const& c) { return c.score.attention_chunk != 0; }},
    {"softcap", [](Call const& c) { return c.has_softcap(); }},
    {"mask", [](Call const& c) { return c.mask.mask_rows || c.mask.mask_blocks; }},
    {"return_max_logits", [](Call const& c) { return bool(c.largest.max_logits_out); }},
    {"split_size", [](Call const& c) { return c.execution.split_size != 0; }},
    {"num_splits above 1", [](Call const& c) { return c.splits.num_splits > 1; }},
    {"q of float8_e4m3fn", [](Call const& c) { return is_fp8(c.q); }},
    {"float8_e4m3fn and mask on a GPU",
     [](Call const& c) { return runs_in_fp8(c) && c.mask.key_lists; }},
    {"softcap or fp8_accum of 'promote'",
     [](Call const& c) { return c.has_softcap() || c.fp8.promote; }},
    {"16-bit v for latents of float8_e4m3fn", quantises_latents},
    {"k_cache of float8_e4m3fn", [](Call const& c) { return is_fp8(c.k); }},
    {"v_cache of float8_e4m3fn", [](Call const& c) { return is_fp8(c.v); }},
    {"q of 16 bits and a cache of float8_e4m3fn", [](Call const& c) { return c.converts(); }},
};

// Whether a call has an argument of kTensors or meets a condition, by its name.
struct Given {
  char const* name;
  bool (*holds)(Call const&) = nullptr;
  TensorMeta const* (*of)(Call const&) = nullptr;

  consteval Given(char const* its_name) : name(its_name) {
    auto const condition = std::ranges::find(kConditions, name, &Condition::name);
    auto const name_of = [](Row const& row) -> std::string_view { return row.form.name; };
    if (condition != std::end(kConditions)) {
      holds = condition->holds;
    } else {  // an unknown name does not compile; k and v are new ones
      of = std::ranges::find(std::rbegin(kTensors), std::rend(kTensors), name, name_of)->of;
    }
  }
  bool in(Call const& call) const { return holds ? holds(call) : of(call) != nullptr; }
};

// What the first argument does with each other one.
enum Relation { kNeeds, kExcludes };

struct Rule {
  unsigned passes;
  Given first;
  Relation relation;
  std::initializer_list<Given> others;
};

inline constexpr Rule kRules[] = {
    {kKeyPass, "cu_seqlens_q", kNeeds, {"cu_seqlens_k"}},
    {kKeyPass, "cu_seqlens_k", kNeeds, {"cu_seqlens_q"}},
    {kCallPass, "seqused_q", kNeeds, {"cu_seqlens_q"}},
    {kCallPass, "seqused_k", kNeeds, {"cu_seqlens_k"}},
    {kKeyPass, "mask", kExcludes, {"causal", "window_size", "attention_chunk", "split_size"}},
    {kKeyPass, "mask", kExcludes, {"seqused_q", "seqused_k"}},
    {kKeyPass, "q of float8_e4m3fn", kExcludes, {"split_size"}},
    {kKeyPass, "float8_e4m3fn and mask on a GPU", kExcludes, {"softcap or fp8_accum of 'promote'"}},
    {kPackedPass, "cu_seqlens_k", kExcludes, {"page_table", "cache_batch_idx", "qv"}},
    {kPackedPass, "cu_seqlens_k", kExcludes, {"cache_leftpad", "cache_seqlens", "appended keys"}},
    {kPackedPass, "cu_seqlens_k", kExcludes, {"shared_prefix", "descale_by_page"}},
    {kCachePass, "appended keys", kNeeds, {"cache_seqlens"}},
    {kCachePass, "shared_prefix", kExcludes, {"cache_leftpad", "window_size", "attention_chunk"}},
    {kCachePass, "qv", kExcludes, {"softcap", "q of float8_e4m3fn", "descale_by_page"}},
    {kCachePass, "descale_by_page", kNeeds, {"q of 16 bits and a cache of float8_e4m3fn"}},
    {kCachePass, "descale_by_page", kNeeds, {"page_table", "k_descale", "v_descale"}},
    {kCachePass, "return_max_logits", kExcludes, {"shared_prefix", "split_size"}},
    {kCachePass, "page_table", kExcludes, {"cache_batch_idx"}},
    {kCachePass, "q_descale", kNeeds, {"q of float8_e4m3fn"}},
    {kCachePass, "k_descale", kNeeds, {"k_cache of float8_e4m3fn"}},
    {kCachePass, "v_descale", kNeeds, {"v_cache of float8_e4m3fn"}},
    {kCachePass | kPackedPass, "split_size", kExcludes, {"num_splits above 1"}},
    {kCachePass, "indices", kExcludes, {"causal", "window_size", "attention_chunk", "tree_mask"}},
    {kCachePass, "indices", kExcludes, {"cache_leftpad", "shared_prefix", "q of float8_e4m3fn"}},
    {kAppendPass, "k", kNeeds, {"v"}},
    {kAppendPass, "v", kNeeds, {"k"}},
    {kAppendPass, "cu_seqlens_k_new", kNeeds, {"k"}},
    {kAppendPass, "rotary_cos", kNeeds, {"rotary_sin"}},
    {kAppendPass, "rotary_sin", kNeeds, {"rotary_cos"}},
    {kAppendPass, "16-bit v for latents of float8_e4m3fn", kNeeds, {"v_descale"}},
};

[[gnu::cold]] inline bool refuse(Solver& solver, Rule const& rule, Given const& other) {
  bool const excludes = rule.relation == kExcludes;
  return solver.refuse(text(excludes ? "no " : "", other.name, " with ", rule.first.name),
                       excludes ? "both" : text("no ", other.name));
}

// holds(row) for all rows of these passes.
template <auto const& kTable, unsigned kPasses, class Holds>
[[gnu::always_inline]] inline bool all_of(Holds const& holds) {
  return [&]<size_t... kIndex>(std::index_sequence<kIndex...>) __attribute__((always_inline)) {
    return (((kTable[kIndex].passes & kPasses) == 0 || holds(kTable[kIndex])) && ...);
  }(std::make_index_sequence<std::size(kTable)>());
}

// Whether all tensors of these passes fit their rows.
template <unsigned kPasses>
bool check_rows(Solver& solver, Call const& call) {
  return all_of<kTensors, kPasses>([&](Row const& row) __attribute__((always_inline)) {
    TensorMeta const* const meta = row.of(call);
    return meta == nullptr || solver.fits(row.form, *meta);
  });
}

// Whether all tensors of these passes lie where kernels can read them, and none that the call
// writes shares memory with another one.
template <unsigned kPasses>
bool check_memory(Solver& solver, Call const& call) {
  auto const is_apart = [&](char const* name, TensorMeta const* own) {
    return all_of<kTensors, kPasses>([&](Row const& row) __attribute__((always_inline)) {
      return solver.apart(name, own, row.form.name, row.of(call), row.form.memory & kWhole);
    });
  };
  return all_of<kTensors, kPasses>([&](Row const& row) __attribute__((always_inline)) {
    TensorMeta const* const meta = row.form.memory > kList ? row.of(call) : nullptr;
    return meta == nullptr || (solver.has_memory(row.form, *meta) &&
                               (!(row.form.memory & kOwn) || is_apart(row.form.name, meta)));
  });
}

// Whether all rules of these passes hold.
template <unsigned kPasses>
bool check_rules(Solver& solver, Call const& call) {
  return all_of<kRules, kPasses>([&](Rule const& rule) __attribute__((always_inline)) {
    bool const has_first = rule.first.in(call);
    for (Given const& other : rule.others) {
      if (has_first && other.in(call) == (rule.relation == kExcludes)) {
        return refuse(solver, rule, other);
      }
    }
    return true;
  });
}

}  // namespace fa3
