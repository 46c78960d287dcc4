// Tables of calls of attention: their tensors and which arguments go together, by public names.
#pragma once

#include "checks/table.h"
#include "call/attention_call.h"

namespace fa3 {

// The passes of a check; a row or rule belongs to one or several. kCallPass: every call. kKeyPass:
// no cache, or packed keys in its place, for which kPackedCachePass has further rules.
inline constexpr unsigned kCallPass = 1, kKeyPass = 2, kScalePass = 4, kGradientPass = 8,
                          kCachePass = 16, kCacheScalePass = 32, kLatentScalePass = 64,
                          kAppendPass = 128, kPackedCachePass = 256;

using Call = AttentionCall;
using Lengths = LengthArguments;
using Scales = ScaleArguments;
using Rotary = RotaryArguments;
using Cache = CacheArguments;

// A tensor of a call: its member, or that of one of its groups of arguments.
template <class Group, class Field>
Group group_type(Field Group::*);

template <auto kMember>
constexpr TensorMeta const* at(Call const& call) {
  return pointer_to(call.group<decltype(group_type(kMember))>().*kMember);
}

inline TensorMeta const* given_out(Call const& call) { return call.given_out(); }

// of: gives nullptr if the call lacks the tensor.
struct Row {
  unsigned passes;
  TensorMeta const* (*of)(Call const&);
  Form form;
};

inline constexpr char const* kBy64 = " for blocks of 64 rows";
inline constexpr char const* kBy384 = " for blocks of 384 rows";
static_assert(kScaleBlockQueries == 64 && kScaleBlockKeys == 384);

inline constexpr Row kTensors[] = {
    {kCallPass, at<&Call::q>, {"q", kAnchor, "b s Hq D", kColumns}},
    {kCallPass, at<&Lengths::cu_seqlens_q>, {"cu_seqlens_q", kInt32, "B+1", kList}},
    {kCallPass, at<&Lengths::seqused_q>, {"seqused_q", kInt32, "B", kList}},
    {kKeyPass, at<&Call::k>, {"k", kKeys, "bk sk Hk D", kColumns}},
    {kKeyPass, at<&Call::v>, {"v", kValues, "bk sk Hk Dv", kColumns}},
    {kKeyPass, at<&Lengths::cu_seqlens_k>, {"cu_seqlens_k", kInt32, "B+1", kList}},
    {kKeyPass, at<&Lengths::seqused_k>, {"seqused_k", kInt32, "B", kList}},
    {kCachePass, at<&Call::k>, {"k_cache", kKeys, "e c Hk D", kColumns}},
    {kCachePass, at<&Call::v>, {"v_cache", kValues, "e c Hk Dv", kColumns}},
    {kCachePass, at<&LatentArgument::qv>, {"qv", kOut, "b s Hq Dv", kColumns}},
    {kCachePass, at<&Cache::page_table>, {"page_table", kInt32, "bt Np", kList}},
    {kCachePass, at<&Cache::cache_seqlens>, {"cache_seqlens", kInt32, "B", kList}},
    {kCachePass, at<&Cache::cache_batch_idx>, {"cache_batch_idx", kInt32, "B", kList}},
    {kCachePass, at<&Cache::cache_leftpad>, {"cache_leftpad", kInt32, "B", kList}},
    {kCachePass, at<&Cache::cu_seqlens_k_new>, {"cu_seqlens_k_new", kInt32, "B+1", kList}},
    {kCachePass, at<&Rotary::rotary_seqlens>, {"rotary_seqlens", kInt32, "B", kList}},
    {kCallPass, &given_out, {"out", kOut, "b s Hq Dv", kOwnColumns}},
    {kCallPass, at<&ScoreArguments::sinks>, {"s_aux", kWide, "Hq", kList}},
    {kScalePass, at<&Scales::q_descale>, {"q_descale", kFloat32, "B Hk", kAny, "Bz Hq Zq", kBy64}},
    {kScalePass, at<&Scales::k_descale>, {"k_descale", kFloat32, "B Hk", kAny, "Bz Hk Zk", kBy384}},
    {kScalePass, at<&Scales::v_descale>, {"v_descale", kFloat32, "B Hk", kAny, "Bz Hk Zk", kBy384}},
    {kCacheScalePass, at<&Scales::q_descale>, {"q_descale", kFloat32, "B Hk"}},
    {kCacheScalePass, at<&Scales::k_descale>, {"k_descale", kFloat32, "bs Hk"}},
    {kCacheScalePass, at<&Scales::v_descale>, {"v_descale", kFloat32, "bs Hk"}},
    {kLatentScalePass, at<&Scales::v_descale>, {"v_descale", kFloat32, "e c Z"}},
    {kCallPass, at<&TreeArguments::tree_mask>, {"tree_mask", kInt32, "b s 4", kList}},
    {kGradientPass, at<&Call::dout>, {"dout", kOut, "b s Hq Dv"}},
    {kGradientPass, at<&Call::out>, {"out", kOut, "b s Hq Dv"}},
    {kGradientPass, at<&Call::lse>, {"lse", kWide, "b Hq s"}},
    {kGradientPass, at<&Call::dlse>, {"dlse", kWide, "b Hq s"}},
    {kGradientPass, at<&Call::dq>, {"dq", kOut, "b s Hq D", kOwnColumns}},
    {kGradientPass, at<&Call::dk>, {"dk", kOut, "bk sk Hk D", kOwnColumns}},
    {kGradientPass, at<&Call::dv>, {"dv", kOut, "bk sk Hk Dv", kOwnColumns}},
    {kAppendPass, at<&Call::k_new>, {"k", kNewKeys, "bn sn Hk D", kColumns}},
    {kAppendPass, at<&Call::v_new>, {"v", kNewValues, "bn sn Hk Dv", kColumns}},
    {kAppendPass, at<&Rotary::rotary_cos>, {"rotary_cos", kTables, "L Dr", kList}},
    {kAppendPass, at<&Rotary::rotary_sin>, {"rotary_sin", kTables, "L Dr", kList}},
};

// What else a rule may name: whether a call has it.
struct Condition {
  std::string_view name;
  bool (*holds)(Call const&);
};

inline constexpr Condition kConditions[] = {
    {"k", [](Call const& c) { return bool(c.k_new); }},
    {"v", [](Call const& c) { return bool(c.v_new); }},
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
    {"split_size", [](Call const& c) { return c.execution.split_size != 0; }},
    {"num_splits above 1", [](Call const& c) { return c.splits.num_splits > 1; }},
    {"q of float8_e4m3fn", [](Call const& c) { return c.q.dtype == Dtype::kFloat8E4M3; }},
    {"k_cache of float8_e4m3fn", [](Call const& c) { return c.k.dtype == Dtype::kFloat8E4M3; }},
    {"v_cache of float8_e4m3fn", [](Call const& c) { return c.v.dtype == Dtype::kFloat8E4M3; }},
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
    } else {
      of = std::ranges::find(kTensors, name, name_of)->of;  // an unknown name does not compile
    }
  }
  bool in(Call const& call) const { return holds ? holds(call) : of(call) != nullptr; }
};

// What the first argument is to each other one. kIsFor: kNeeds in other words. kWith: all or none.
enum Relation { kNeeds, kIsFor, kExcludes, kWith };

struct Rule {
  unsigned passes;
  Given first;
  Relation relation;
  std::initializer_list<Given> others;
};

inline constexpr Rule kRules[] = {
    {kKeyPass, "cu_seqlens_q", kWith, {"cu_seqlens_k"}},
    {kCallPass, "seqused_q", kNeeds, {"cu_seqlens_q"}},
    {kCallPass, "seqused_k", kNeeds, {"cu_seqlens_k"}},
    {kKeyPass, "split_size", kExcludes, {"q of float8_e4m3fn"}},
    {kKeyPass, "mask", kExcludes, {"causal", "window_size", "attention_chunk", "split_size"}},
    {kKeyPass, "mask", kExcludes, {"seqused_q", "seqused_k", "q of float8_e4m3fn"}},
    {kGradientPass, "mask", kExcludes, {"softcap"}},
    {kCachePass, "shared_prefix", kExcludes, {"cache_leftpad", "window_size", "attention_chunk"}},
    {kCachePass, "qv", kExcludes, {"softcap", "q of float8_e4m3fn", "descale_by_page"}},
    {kCachePass, "descale_by_page", kNeeds, {"q of 16 bits and a cache of float8_e4m3fn"}},
    {kCachePass, "descale_by_page", kNeeds, {"page_table", "k_descale", "v_descale"}},
    {kCachePass, "page_table", kExcludes, {"cache_batch_idx"}},
    {kCachePass, "q_descale", kIsFor, {"q of float8_e4m3fn"}},
    {kCachePass, "k_descale", kIsFor, {"k_cache of float8_e4m3fn"}},
    {kCachePass, "v_descale", kIsFor, {"v_cache of float8_e4m3fn"}},
    {kCachePass | kPackedCachePass, "split_size", kExcludes, {"num_splits above 1"}},
    {kPackedCachePass, "cu_seqlens_k", kExcludes, {"page_table", "cache_batch_idx", "qv"}},
    {kPackedCachePass, "cu_seqlens_k", kExcludes, {"cache_leftpad", "cache_seqlens"}},
    {kPackedCachePass, "cu_seqlens_k", kExcludes, {"shared_prefix", "descale_by_page"}},
    {kPackedCachePass, "cu_seqlens_k", kExcludes, {"appended keys"}},
    {kCachePass, "indices", kExcludes, {"causal", "window_size", "attention_chunk", "tree_mask"}},
    {kCachePass, "indices", kExcludes, {"cache_leftpad", "shared_prefix", "q of float8_e4m3fn"}},
    {kAppendPass, "k", kWith, {"v"}},
    {kAppendPass, "cu_seqlens_k_new", kNeeds, {"k"}},
    {kAppendPass, "rotary_cos", kWith, {"rotary_sin"}},
};

[[gnu::cold]] inline bool refuse(Solver& solver, Rule const& rule, Given const& other,
                                 bool has_first) {
  char const *const first = rule.first.name, *const second = other.name;
  switch (rule.relation) {
    case kNeeds:
      return solver.refuse(text(second, " with ", first), text("no ", second));
    case kIsFor:
      return solver.refuse(text(first, " to be None"), "a tensor", text("it is for ", second));
    case kExcludes:
      return solver.refuse(text("no ", second, " with ", first), "both");
    default:
      return solver.refuse(text(first, " and ", second, " together"),
                           text(has_first ? first : second, " alone"));
  }
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

// Whether a tensor that is written, if it is given, shares memory with none of these passes.
template <unsigned kPasses>
bool check_apart(Solver& solver, Call const& call, char const* name, TensorMeta const* own) {
  return own == nullptr ||
         all_of<kTensors, kPasses>([&](Row const& row) __attribute__((always_inline)) {
           return solver.apart(name, own, row.form.name, row.of(call));
         });
}

// Whether all rules of these passes hold.
template <unsigned kPasses>
bool check_rules(Solver& solver, Call const& call) {
  return all_of<kRules, kPasses>([&](Rule const& rule) __attribute__((always_inline)) {
    bool const has_first = rule.first.in(call);
    if (!has_first && rule.relation != kWith) {
      return true;
    }
    for (Given const& other : rule.others) {
      if (other.in(call) != (has_first && rule.relation != kExcludes)) {
        return refuse(solver, rule, other, has_first);
      }
    }
    return true;
  });
}

// In forward.cpp, for attention of any kind. Each may rely on those before it.
Solver solver_of(AttentionCall const& call, bool is_fp8);
bool check_limits(Solver& solver, AttentionCall const& call);
bool check_attention(Solver& solver, AttentionCall const& call);

}  // namespace fa3
