// Attention of sequences that share their first keys: one launch on the shared keys, with all
// queries as one sequence, one on the keys of each sequence, and their merge.
#pragma once

#include "call/combine_call.h"
#include "ops/forward_run.h"

namespace fa3 {

class PrefixRun {
 public:
  // As ForwardRun.
  PrefixRun(AttentionCall const& call, ForwardInputs const& inputs, ForwardResults const& results,
            void* stream);

  void run(void* stream) const;

 private:
  ForwardResults const& results_;
  OwnedTensor unread_lse_;  // null: the call asks for the LSE
  OwnedTensor q_copy_;
  OwnedTensor qv_copy_;
  ForwardResults of_shared_;
  ForwardResults of_own_;
  MergeCall merge_;
  std::optional<ForwardRun> shared_;
  std::optional<ForwardRun> own_;
};

}  // namespace fa3
