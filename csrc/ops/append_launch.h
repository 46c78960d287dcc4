// What an op does to append new keys and values to a cache and to rotate queries. It allocates in
// its constructor, so that nothing is written for a call that fails.
#pragma once

#include "attention_ops.h"
#include "kvcache/append.h"

namespace fa3 {

// Whether a call asks for it.
inline bool appends(AttentionCall const& call) {
  return call.k_new || call.v_new || call.rotary.rotary_cos || call.rotary.rotary_sin;
}

// What a call says of the cache after its append; before its checks.
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
  OwnedTensor given_q_;  // null: nothing rotates
};

}  // namespace fa3
