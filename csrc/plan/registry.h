// The error for a variant that is listed but not in this build (FLASH_ATTN3_VARIANTS). The table of
// launchers, fwd_registry.inc, is generated next to fwd_variants.h; only csrc/ops reads it.
#pragma once

#include <span>
#include <string>

namespace fa3 {

// The error text for a missing variant: names it, its nearest relatives that are built, and the way
// to build it. built[i] says whether variant i of kFwdVariants has a launcher.
std::string missing_variant_text(char const* op, int variant, std::span<bool const> built);

// That text for a variant of kBwdVariants.
std::string missing_backward_text(int variant, std::span<bool const> built);

}  // namespace fa3
