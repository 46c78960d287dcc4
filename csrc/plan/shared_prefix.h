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

// How the launch on the shared keys is split.
struct PrefixParts {
  int count = 1;        // 1: the launch splits the keys itself
  int64_t keys = 0;     // keys of a part; the last part may have fewer
  int ctas = 0;         // CTAs that compute the parts
  int own_k_tiles = 0;  // estimate: K tiles of own keys that a CTA computes in that time

  // The lengths of the parts, of `all` shared keys.
  void set_lengths(CacheTensors& keys, int64_t all) const {
    keys.held_by_all = count > 1 ? int(all) : keys.held_by_all;
    keys.held_step = int(this->keys);
  }

  // The launch on own keys, which starts while that on the parts still runs.
  void set_second(CacheProblem& cache) const {
    cache.is_second = true;
    cache.earlier_ctas = uint8_t(min_of(ctas, 255));
    cache.earlier_k_tiles = uint8_t(min_of(own_k_tiles, 255));
  }
};

// The parts that take the least time by estimate, together with the launch on own keys. q: of
// as_one_sequence().
PrefixParts prefix_parts(AttentionCall const& call, TensorMeta const& q);

// The call of all queries on the shared keys: they see all of them, whatever the mask. q: of
// as_one_sequence(). Scales and keys of sequences are those of the first. Each part is a sequence
// with the same queries; CacheLengths::held_step gives the last one fewer keys.
AttentionCall call_of_prefix(AttentionCall const& call, TensorMeta const& q,
                             PrefixParts const& parts = {});

}  // namespace fa3
