// A call whose sequences share their first keys, as two: all queries on the shared keys, and each
// sequence on the keys after them.
#pragma once

#include "call/cache_form.h"
#include "call/given_tensor.h"

namespace fa3 {

// A prefix of one sequence is not shared.
inline bool has_shared_prefix(AttentionCall const& call) {
  return call.prefix.shared_prefix > 0 && call.batch() > 1;
}

// Whether the rows of a batch (batch, rows, heads, columns) are evenly spaced.
inline bool has_one_sequence(TensorMeta const& meta) {
  return meta.rank == 3 || meta.size[0] <= 1 || meta.size[1] <= 1 ||
         meta.stride[0] == meta.size[1] * meta.stride[1];
}

// Queries as one sequence, (1, all rows, heads, columns).
inline TensorMeta as_one_sequence(TensorMeta const& queries) {
  TensorMeta meta = with_batch(queries);
  meta.stride[1] = meta.size[1] == 1 ? meta.stride[0] : meta.stride[1];
  meta.size[1] *= meta.size[0];
  meta.size[0] = 1;
  meta.stride[0] = meta.size[1] * meta.stride[1];
  return meta;
}

// Into how many equal parts the shared keys are split, so that a launch has a tile of queries on a
// part for about each multiprocessor. 1: the launch splits them itself. q: of as_one_sequence().
int prefix_parts(AttentionCall const& call, TensorMeta const& q);

// The call of all queries on the shared keys: they see all of them, whatever the mask. q: of
// as_one_sequence(). Scales and keys of sequences are those of the first. parts: of
// prefix_parts(), each as a sequence with the same queries.
AttentionCall call_of_prefix(AttentionCall const& call, TensorMeta const& q, int parts = 1);

}  // namespace fa3
