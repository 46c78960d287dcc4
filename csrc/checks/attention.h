// What calls of attention must look like: their tensors, and which arguments go together. Names are
// those of the public functions.
#pragma once

#include "checks/table.h"
#include "call/attention_call.h"

namespace fa3 {

// The passes in which a call is checked: without a cache queries, keys and the rest; then scales or
// gradients; on a cache the caches and their scales, or those of latents.
enum Pass : unsigned {
  kQueryPass = 1 << 0,
  kKeyPass = 1 << 1,
  kInputPass = 1 << 2,  // q, k and v
  kRestPass = 1 << 3,
  kBlockScalePass = 1 << 4,
  kGradientPass = 1 << 5,
  kCachePass = 1 << 6,
  kCacheScalePass = 1 << 7,
  kLatentScalePass = 1 << 8,
  kAppendPass = 1 << 9,
  kPackedCachePass = 1 << 10,  // packed keys in the place of a cache
};

namespace attention {

using Call = AttentionCall;
using Lengths = LengthArguments;
using Scales = ScaleArguments;
using Rotary = RotaryArguments;
using Cache = CacheArguments;

inline TensorMeta const* qv_of(Call const& call) { return pointer_to(call.latent.qv); }
inline TensorMeta const* given_out(Call const& call) { return call.given_out(); }

inline constexpr char const* kOfQueries = " for blocks of 64 rows";
inline constexpr char const* kOfKeys = " for blocks of 384 rows";
static_assert(kScaleBlockQueries == 64 && kScaleBlockKeys == 384);

inline constexpr Row<Call> kTensors[] = {
    {kQueryPass | kInputPass, at<&Call::q>, {"q", kAnchor, "b s Hq D", kColumns}},
    {kQueryPass, at<&Lengths::cu_seqlens_q>, {"cu_seqlens_q", kInt32, "B+1", kList}},
    {kQueryPass, at<&Lengths::seqused_q>, {"seqused_q", kInt32, "B", kList}},
    {kKeyPass | kInputPass, at<&Call::k>, {"k", kKeys, "bk sk Hk D", kColumns}},
    {kKeyPass | kInputPass, at<&Call::v>, {"v", kValues, "bk sk Hk Dv", kColumns}},
    {kKeyPass, at<&Lengths::cu_seqlens_k>, {"cu_seqlens_k", kInt32, "B+1", kList}},
    {kKeyPass, at<&Lengths::seqused_k>, {"seqused_k", kInt32, "B", kList}},
    {kCachePass, at<&Call::k>, {"k_cache", kKeys, "e c Hk D", kColumns}},
    {kCachePass, at<&Call::v>, {"v_cache", kValues, "e c Hk Dv", kColumns}},
    {kCachePass, &qv_of, {"qv", kOut, "b s Hq Dv", kColumns}},
    {kCachePass, at<&Cache::page_table>, {"page_table", kInt32, "bt Np", kList}},
    {kCachePass, at<&Cache::cache_seqlens>, {"cache_seqlens", kInt32, "B", kList}},
    {kCachePass, at<&Cache::cache_batch_idx>, {"cache_batch_idx", kInt32, "B", kList}},
    {kCachePass, at<&Cache::cache_leftpad>, {"cache_leftpad", kInt32, "B", kList}},
    {kCachePass, at<&Cache::cu_seqlens_k_new>, {"cu_seqlens_k_new", kInt32, "B+1", kList}},
    {kCachePass, at<&Rotary::rotary_seqlens>, {"rotary_seqlens", kInt32, "B", kList}},
    {kRestPass, &given_out, {"out", kOut, "b s Hq Dv", kOwnColumns}},
    {kRestPass, at<&ScoreArguments::sinks>, {"s_aux", kWide, "Hq", kList}},
    {kBlockScalePass,
     at<&Scales::q_descale>,
     {"q_descale", kFloat32, "B Hk", kAny, "Bz Hq Zq", kOfQueries}},
    {kBlockScalePass,
     at<&Scales::k_descale>,
     {"k_descale", kFloat32, "B Hk", kAny, "Bz Hk Zk", kOfKeys}},
    {kBlockScalePass,
     at<&Scales::v_descale>,
     {"v_descale", kFloat32, "B Hk", kAny, "Bz Hk Zk", kOfKeys}},
    {kCacheScalePass, at<&Scales::q_descale>, {"q_descale", kFloat32, "B Hk"}},
    {kCacheScalePass, at<&Scales::k_descale>, {"k_descale", kFloat32, "bs Hk"}},
    {kCacheScalePass, at<&Scales::v_descale>, {"v_descale", kFloat32, "bs Hk"}},
    {kLatentScalePass, at<&Scales::v_descale>, {"v_descale", kFloat32, "e c Z"}},
    {kRestPass, at<&TreeArguments::tree_mask>, {"tree_mask", kInt32, "b s 4"}},
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

template <auto kMember>
bool is_fp8(Call const& call) {
  return (call.*kMember).dtype == Dtype::kFloat8E4M3;
}

inline constexpr Condition kConditions[] = {
    {"k", [](Call const& c) { return bool(c.k_new); }},
    {"v", [](Call const& c) { return bool(c.v_new); }},
    {"appended keys",
     [](Call const& c) { return c.cache.cu_seqlens_k_new || c.cache.appended != 0; }},
    {"cache_seqlens",
     [](Call const& c) { return c.cache.cache_seqlens || c.cache.cache_length >= 0; }},
    {"shared_prefix", [](Call const& c) { return c.prefix.shared_prefix != 0; }},
    {"descale_by_page", [](Call const& c) { return c.by_page.descale_by_page; }},
    {"softcap", [](Call const& c) { return c.score.softcap != 0.0; }},
    {"split_size", [](Call const& c) { return c.execution.split_size != 0; }},
    {"num_splits above 1", [](Call const& c) { return c.splits.num_splits > 1; }},
    {"q of float8_e4m3fn", &is_fp8<&Call::q>},
    {"k_cache of float8_e4m3fn", &is_fp8<&Call::k>},
    {"v_cache of float8_e4m3fn", &is_fp8<&Call::v>},
    {"q of 16 bits and a cache of float8_e4m3fn", [](Call const& c) { return c.converts(); }},
};

// kIsFor: as kNeeds, in other words. kWith: both or none.
enum Relation { kNeeds, kIsFor, kExcludes, kWith };

struct Rule {
  unsigned passes;
  std::string_view first;
  Relation relation;
  std::string_view second;
};

inline constexpr Rule kRules[] = {
    {kKeyPass, "cu_seqlens_q", kWith, "cu_seqlens_k"},
    {kQueryPass, "seqused_q", kNeeds, "cu_seqlens_q"},
    {kQueryPass, "seqused_k", kNeeds, "cu_seqlens_k"},
    {kKeyPass, "split_size", kExcludes, "q of float8_e4m3fn"},
    {kCachePass, "shared_prefix", kExcludes, "cache_leftpad"},
    {kCachePass, "qv", kExcludes, "softcap"},
    {kCachePass, "qv", kExcludes, "q of float8_e4m3fn"},
    {kCachePass, "qv", kExcludes, "descale_by_page"},
    {kCachePass, "descale_by_page", kNeeds, "page_table"},
    {kCachePass, "descale_by_page", kNeeds, "q of 16 bits and a cache of float8_e4m3fn"},
    {kCachePass, "descale_by_page", kNeeds, "k_descale"},
    {kCachePass, "descale_by_page", kNeeds, "v_descale"},
    {kCachePass, "q_descale", kIsFor, "q of float8_e4m3fn"},
    {kCachePass, "k_descale", kIsFor, "k_cache of float8_e4m3fn"},
    {kCachePass, "v_descale", kIsFor, "v_cache of float8_e4m3fn"},
    {kCachePass | kPackedCachePass, "split_size", kExcludes, "num_splits above 1"},
    {kPackedCachePass, "cu_seqlens_k", kExcludes, "page_table"},
    {kPackedCachePass, "cu_seqlens_k", kExcludes, "cache_batch_idx"},
    {kPackedCachePass, "cu_seqlens_k", kExcludes, "cache_leftpad"},
    {kPackedCachePass, "cu_seqlens_k", kExcludes, "cache_seqlens"},
    {kPackedCachePass, "cu_seqlens_k", kExcludes, "shared_prefix"},
    {kPackedCachePass, "cu_seqlens_k", kExcludes, "descale_by_page"},
    {kPackedCachePass, "cu_seqlens_k", kExcludes, "appended keys"},
    {kPackedCachePass, "cu_seqlens_k", kExcludes, "qv"},
    {kAppendPass, "k", kWith, "v"},
    {kAppendPass, "cu_seqlens_k_new", kNeeds, "k"},
    {kAppendPass, "rotary_cos", kWith, "rotary_sin"},
};

[[gnu::cold]] inline bool refuse(Solver& solver, Rule const& rule, bool has_first) {
  std::string const first(rule.first), second(rule.second);
  switch (rule.relation) {
    case kNeeds:
      return solver.refuse(text(second, " with ", first), text("no ", second));
    case kIsFor:
      return solver.refuse(text(first, " to be None"), "a tensor", text("it is for ", second));
    case kExcludes:
      return solver.refuse(text("no ", second, " with ", first), "both");
    case kWith:
      return solver.refuse(text(first, " and ", second, " together"),
                           text(has_first ? first : second, " alone"));
  }
  return false;
}

template <std::string_view const& kName>
[[gnu::always_inline]] inline bool is_given(Call const& call) {
  constexpr auto kCondition = std::ranges::find(kConditions, kName, &Condition::name);
  if constexpr (kCondition != std::end(kConditions)) {
    return kCondition->holds(call);
  } else {
    constexpr auto kRow =
        std::ranges::find(kTensors, kName, [](auto const& row) { return row.form.name; });
    return kRow->of(call) != nullptr;
  }
}

template <Rule const& kRule>
[[gnu::always_inline]] inline bool check_rule(Solver& solver, Call const& call) {
  bool const has_first = is_given<kRule.first>(call);
  bool const has_second = is_given<kRule.second>(call);
  bool const holds = kRule.relation == kWith
                         ? has_first == has_second
                         : !has_first || has_second == (kRule.relation != kExcludes);
  return holds || refuse(solver, kRule, has_first);
}

// Whether all rules of these passes hold.
template <unsigned kPasses>
bool check_rules(Solver& solver, Call const& call) {
  return [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    return ((!(kRules[kIndex].passes & kPasses) || check_rule<kRules[kIndex]>(solver, call)) &&
            ...);
  }(std::make_index_sequence<std::size(kRules)>());
}

}  // namespace attention

// In forward.cpp, for attention of any kind. Each may rely on those before it.
Solver solver_of(AttentionCall const& call, bool is_fp8);
bool check_device(Solver& solver);
bool check_limits(Solver& solver, AttentionCall const& call);
bool check_maxima(Solver& solver, AttentionCall const& call);
bool check_attention(Solver& solver, AttentionCall const& call);

}  // namespace fa3
