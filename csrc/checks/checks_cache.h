// What a call on a KV cache must look like, in the words of checks/checks_general.h. The contents
// of lists and tables are not read: they are on the GPU.
#pragma once

#include <string>

#include "call/attention_call.h"

namespace fa3 {

// The most parts into which num_splits may divide the keys of a tile.
constexpr int64_t kMaxSplits = 256;

// Empty when the op attend_cache or, with out, attend_cache_out serves the call, else the whole
// error text.
std::string check_cache(AttentionCall const& call);

// What append_and_attend asks for besides: new rows and rotary. k and v are the cache.
std::string check_append(AttentionCall const& call);

}  // namespace fa3
