// Attention of one call, for every layout of the keys. The constructor plans, allocates and makes
// the views, and run() launches: a call that appends launches nothing until all is allocated.
#pragma once

#include <optional>

#include "attention_ops.h"
#include "call/combine_call.h"
#include "plan/plan.h"
#include "ops/cuda_call.h"
#include "ops/launch_share.h"

namespace fa3 {

struct ForwardResults {
  OwnedTensor out;
  OwnedTensor lse;         // written if call.splits.return_lse
  OwnedTensor max_logits;  // written if call.execution.return_max_logits
  OwnedTensor rotated;     // queries
};

// As q, with the head_dim of v.
OwnedTensor allocate_out(AttentionCall const& call);

class ForwardRun {
 public:
  // The call has passed its checks and has queries. Copies replace inputs that the kernels cannot
  // read. Inputs and results must live until the launch. stream: the current one of q's device.
  ForwardRun(AttentionCall& call, OpTensors& inputs, ForwardResults const& results, void* stream);

  void run(void* stream) const;

 private:
  struct Launch {
    FwdParams params;
    int variant = 0;
    HeadGroups groups;
    OwnedTensor workspace;

    // used_counters: counters of the stream that earlier launches of the call use.
    void plan(AttentionCall const& call, int64_t& used_counters, void* stream);
    void run_group(int group, void* stream) const;
  };

  // For sequences that share their first keys: one part attends to the other keys of each sequence,
  // the other to the shared keys, with all queries as one sequence.
  struct Parts {
    ForwardResults results[2];
    OwnedTensor unread_lse;  // null: the call asks for the LSE
    MergeCall merge;
  };

  void add_parts(AttentionCall& call, OpTensors& inputs, void* stream);
  void add(AttentionCall const& call, OpTensors& inputs, ForwardResults const& results,
           TensorView const& out, void* stream);

  ForwardResults const& results_;
  std::optional<Target> target_;  // none: parts are merged into the results
  std::optional<Parts> parts_;
  std::optional<Launch> launches_[4];  // on a cache a part may have two
  int count_ = 0;
  int64_t used_counters_ = 0;  // counters of the stream that the launches so far use
};

}  // namespace fa3
