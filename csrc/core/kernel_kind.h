// The kind of a kernel: the batches, masks and scores that it is compiled for. Everything else
// about a problem is a run-time value.
#pragma once

namespace fa3 {

// kDense: a batch of equal lengths. kAny: that or packed sequences, with sinks and row maxima at
// run time. kCache: either, on the keys of a cache, of which several CTAs may share those of a
// tile; with sinks.
enum class BatchKind : int { kDense, kAny, kCache };

// The masks of core/mask_limits.h. kLists: the K tiles of each tile of queries are listed
// (core/key_list.h).
enum class MaskKind : int { kFull, kCausal, kInterval, kLists };

// kSoftcap: scores become softcap * tanh(. / softcap).
enum class ScoreKind : int { kPlain, kSoftcap };

struct KernelKind {
  BatchKind batch = BatchKind::kDense;
  MaskKind mask = MaskKind::kFull;
  ScoreKind score = ScoreKind::kPlain;
  bool is_latent = false;  // absorbed MLA: V is a part of the keys too (csrc/mla)

  constexpr bool operator==(KernelKind const&) const = default;

  constexpr bool is_dense() const { return batch == BatchKind::kDense; }
  constexpr bool is_cache() const { return batch == BatchKind::kCache; }
  constexpr bool has_lists() const { return mask == MaskKind::kLists; }
  constexpr bool has_softcap() const { return score == ScoreKind::kSoftcap; }
};

inline constexpr KernelKind kFullKernel{};
inline constexpr KernelKind kCausalKernel{BatchKind::kDense, MaskKind::kCausal};
inline constexpr KernelKind kGeneralKernel{BatchKind::kAny, MaskKind::kInterval};
inline constexpr KernelKind kSoftcapKernel{BatchKind::kAny, MaskKind::kInterval,
                                           ScoreKind::kSoftcap};
inline constexpr KernelKind kListsKernel{BatchKind::kAny, MaskKind::kLists};
inline constexpr KernelKind kListsSoftcapKernel{BatchKind::kAny, MaskKind::kLists,
                                                ScoreKind::kSoftcap};
inline constexpr KernelKind kCacheKernel{BatchKind::kCache, MaskKind::kInterval};
inline constexpr KernelKind kCacheSoftcapKernel{BatchKind::kCache, MaskKind::kInterval,
                                                ScoreKind::kSoftcap};
inline constexpr KernelKind kLatentKernel{BatchKind::kCache, MaskKind::kInterval, ScoreKind::kPlain,
                                          /*is_latent=*/true};

// The kinds that are built, and their names in variants and in explain().
struct NamedKind {
  KernelKind kind;
  char const* name;
};

inline constexpr NamedKind kBuiltKinds[] = {{kFullKernel, "full"},
                                            {kCausalKernel, "causal"},
                                            {kGeneralKernel, "general"},
                                            {kSoftcapKernel, "softcap"},
                                            {kCacheKernel, "cache"},
                                            {kCacheSoftcapKernel, "cache, softcap"},
                                            {kLatentKernel, "latent"},
                                            {kListsKernel, "lists"},
                                            {kListsSoftcapKernel, "lists, softcap"}};
constexpr int kBuiltKindCount = 9;

// INVARIANT: the kind is in kBuiltKinds.
constexpr int kind_index(KernelKind kind) {
  int index = 0;
  while (!(kBuiltKinds[index].kind == kind)) {
    ++index;
  }
  return index;
}

}  // namespace fa3
