#include "plan/registry.h"

#include <algorithm>

#include "bwd_variants.h"
#include "call/text.h"
#include "plan/variants.h"

namespace fa3 {
namespace {

Dtype dtype_of(FwdConfig const& config) { return config.dtype_q; }
Dtype dtype_of(BwdConfig const& config) { return config.dtype; }

// How alike two variants are. Users change the dtype more easily than the head dim, and the kind
// least easily.
template <class Config>
int likeness(Config const& a, Config const& b) {
  return (a.kind == b.kind ? 4 : 0) + (a.head_dim == b.head_dim ? 2 : 0) +
         (dtype_of(a) == dtype_of(b) ? 1 : 0);
}

template <class Config>
std::string missing_text(char const* op, std::span<Config const> variants, int variant,
                         std::span<bool const> built) {
  Config const& missing = variants[variant];
  int best = -1;
  std::string nearest;
  for (size_t i = 0; i < built.size(); ++i) {
    int const now = built[i] ? likeness(missing, variants[i]) : -1;
    if (now > best) {
      best = now;
      nearest = variants[i].name;
    } else if (now >= 0 && now == best) {
      nearest += text(", ", variants[i].name);
    }
  }
  std::string const got = nearest.empty() ? "a build without any kernel"
                                          : text("a build without it (nearest: ", nearest, ")");
  return error_text(
      op, text("the kernel ", missing.name, " in this build"), got,
      text("rebuild without FLASH_ATTN3_VARIANTS, or with FLASH_ATTN3_VARIANTS=", missing.name));
}

}  // namespace

std::string missing_variant_text(char const* op, int variant, std::span<bool const> built) {
  return missing_text<FwdConfig>(op, kFwdVariants, variant, built);
}

std::string missing_backward_text(int variant, std::span<bool const> built) {
  return missing_text<BwdConfig>("bwd", kBwdVariants, variant, built);
}

}  // namespace fa3
