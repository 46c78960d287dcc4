// What an op does to append new keys and values to a cache and to rotate queries. It allocates in
// its constructor, so that nothing is written for a call that fails.
#pragma once

#include "kvcache/append.h"
#include "ops/forward_call.h"

namespace fa3 {

// Whether a call asks for it.
inline bool appends(AttentionCall const& call) {
  return call.k_new || call.v_new || call.rotary.rotary_cos || call.rotary.rotary_sin;
}

// The tensors that only an append has; null: none. Scales are those that it sets.
struct AppendTensors {
  OwnedTensor k;
  OwnedTensor v;
  OwnedTensor k_scales;
  OwnedTensor v_scales;
};

class AppendLaunch {
 public:
  // Copies new rows that the kernel cannot read, or that share memory with the cache. The tensors
  // stay until the launch.
  AppendLaunch(ForwardCall const& args, AppendTensors const& tensors);

  // On the current stream of the cache's device.
  void run(void* stream) const;

  OwnedTensor rotated;  // q, contiguous; null where nothing rotates

 private:
  void set_pages(AttentionCall const& call, AppendTensors const& tensors);

  AppendParams params_;
  OwnedTensor copies_[3];
};

}  // namespace fa3
