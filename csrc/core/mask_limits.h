// Which keys a query sees: columns [0, end). Causal is aligned bottom-right: query i of seqlen_q
// sees keys up to i + seqlen_k - seqlen_q.
#pragma once

#include "core/int_math.h"

namespace fa3 {

struct SeqlenPair {
  int q;
  int k;
};

// One past the last key that the query at `position` sees; 0 or less when it sees none.
FA3_HD constexpr int visible_end(int position, SeqlenPair len, bool causal) {
  return causal ? min_of(len.k, position + 1 + len.k - len.q) : len.k;
}

}  // namespace fa3
