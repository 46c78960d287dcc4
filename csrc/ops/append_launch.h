// Appends new keys and values to a cache and rotates queries, for an op. The constructor allocates,
// so that a call that fails has written nothing.
#pragma once

#include "attention_ops.h"
#include "kvcache/append.h"

namespace fa3 {

// Whether a call asks to append or to rotate.
inline bool appends(AttentionCall const& call) {
  return call.k_new || call.v_new || call.rotary.rotary_cos || call.rotary.rotary_sin;
}

// Whether the next call attends, to chosen keys.
inline bool only_appends(AttentionCall const& call) {
  return call.choice.keys_chosen && appends(call);
}

// Sets the arguments of a call that describe the cache after its append. Call it before the checks.
void count_appended(AttentionCall& call, OpTensors const& tensors);

class AppendLaunch {
 public:
  // Copies new rows and queries that share memory with the cache, and new rows that the kernel
  // cannot read. From here on the queries of the call are the rotated ones, if any. The tensors
  // stay until the launch.
  AppendLaunch(AttentionCall& call, OpTensors& tensors);

  // On the current stream of the cache's device.
  void run(void* stream) const;

 private:
  void set_pages(AttentionCall const& call, OpTensors const& tensors);

  AppendParams params_;
  OwnedTensor copies_[3];
  OwnedTensor given_q_;  // null: no query is rotated
};

}  // namespace fa3
