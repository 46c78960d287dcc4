// What the forward ops do to launch a planned problem.
#pragma once

#include "plan/plan.h"
#include "ops/cuda_call.h"

namespace fa3 {

// Throws if the variant is not in this build.
void require_built(int variant);

// A launch for each part of v's columns that one can take: mostly one. params and its schedule are
// complete.
void launch_variant(FwdParams const& params, int variant, void* stream);

class ForwardLaunch {
 public:
  // Plans params.problem and fills in the schedule. Throws if the variant is not in this build.
  explicit ForwardLaunch(FwdParams& params);

  // Ints that params.workspace needs; 0: none.
  int64_t workspace_ints() const { return plan_.schedule.workspace_ints; }

  // Fills params.o and launches, on the current stream of out's device. params has all else, its
  // problem at least one query and one key. An output that TMA cannot address is written through a
  // temporary.
  void run(char const* op, FwdParams& params, OwnedTensor const& out) const;

 private:
  FwdPlan plan_;
};

}  // namespace fa3
