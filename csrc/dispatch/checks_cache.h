// Checks of append_cache.
#pragma once

#include <string>

#include "dispatch/attention_call.h"

namespace fa3 {

// Empty when the op serves the call, else the error text.
std::string check_append(AttentionCall const& call);

}  // namespace fa3
