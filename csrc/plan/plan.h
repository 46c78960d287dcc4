// How a problem is run: which variant, and how its work is split. Every launch calls
// plan_forward(), so it is pure and cheap (short loops, no allocation); cost_forward() adds the
// figures that explain() prints.
#pragma once

#include "config/fwd_config.h"
#include "core/problem.h"

namespace fa3 {

struct FwdPlan {
  int variant = -1;  // index in kFwdVariants
  FwdSchedule schedule;
};

struct FwdCost {
  double waves = 0;          // tiles per CTA of the grid
  double useful_share = 0;   // share of the computed FLOPs; the rest is masked or padding (rows,
                             // keys, head dim), or skipped by a warpgroup that sees nothing of it
  double flops = 0;          // both GEMMs, visible pairs only
  double bytes = 0;          // q, k, v read once; out and LSE written once
  double visited_share = 0;  // share of a head's K tiles that its tiles of queries visit
};

// INVARIANT: the problem comes from a CUDA call that check_call() accepts; then there is a
// variant, and the number of tiles fits into an int.
FwdPlan plan_forward(FwdProblem const& problem);

// Multiprocessors that a launch may use.
int usable_sms(FwdProblem const& problem);

// How the work is split for one variant: part of plan_forward(), and what a search over tiles that
// are on no list calls.
FwdSchedule schedule_forward(FwdProblem const& problem, FwdConfig const& config);

// Packed sequences: as if there were `batch` ones of the longest length.
FwdCost cost_forward(FwdProblem const& problem, FwdPlan const& plan);

}  // namespace fa3
