// What a forward call of any dtype but e4m3 must look like: also with a window, chunks, softcap,
// sinks, or sequences of several lengths in one tensor. The counterpart of checks/checks.h, in
// the same words.
#pragma once

#include "checks/checks.h"
#include "call/given_tensor.h"

namespace fa3 {

// Empty when the call is fine, else the whole error text. Names the arguments as the public
// functions do: s_aux are the sinks. What cu_seqlens and seqused contain is not read.
std::string check_forward(AttentionCall const& call);

// The number of tiles of packed sequences: whole ones of 64 rows, and one more for each sequence.
std::string check_packed_tiles(AttentionCall const& call, NamedTensor const& rows);

}  // namespace fa3
