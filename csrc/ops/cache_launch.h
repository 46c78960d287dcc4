// A launch of attention on a cache, in two steps: the constructor plans and allocates, run()
// launches. A call that appends runs nothing before all of its launches are made.
#pragma once

#include <vector>

#include "call/attention_call.h"
#include "plan/plan.h"
#include "ops/cuda_call.h"

namespace fa3 {

// Tensors that the kernel cannot read are replaced by copies.
struct CacheInputs {
  OwnedTensor& q;
  OwnedTensor& k;
  OwnedTensor& v;
  OwnedTensor& qv;  // null: none
};

struct CacheOutputs {
  OwnedTensor const& out;
  OwnedTensor const& lse;  // null: not asked for
  Dtype dtype;             // the dtype of out
};

class CacheLaunch {
 public:
  // The call has passed its checks and has queries and keys. Throws if the variant is not in this
  // build. Inputs and outputs stay until the launch. stream: the current one of q's device.
  CacheLaunch(AttentionCall const& call, CacheInputs const& inputs, CacheOutputs const& outputs,
              void* stream);

  void run(void* stream) const;

 private:
  struct Launch {
    FwdParams params;
    FwdPlan plan;
    OwnedTensor parts;

    int64_t allocate_parts(int device, int64_t used, void* stream);
  };

  Target target_;
  std::vector<Launch> launches_;
};

}  // namespace fa3
