// The share of a call that one of its launches has: a group of heads, and columns of v.
#pragma once

#include "config/fwd_config.h"
#include "core/problem.h"
#include "plan/variants.h"

namespace fa3 {

// Groups of equally many heads, launched one after the other (launches_of_cache()).
struct HeadGroups {
  int count = 1;
  int all_heads_k = 0;

  // one: the problem of a group.
  static HeadGroups of(FwdProblem const& whole, FwdProblem const& one) {
    return HeadGroups{whole.heads_q / max_of(1, one.heads_q), whole.heads_k};
  }

  // Whether a variant, if it decodes, may start while the previous launch of the call still runs.
  // If head groups or column groups are launched in turn, they share a workspace, so each waits.
  // With sm_margin it waits too: otherwise it would start on the SMs that the first launch leaves
  // free.
  bool starts_early(FwdProblem const& one, int variant) const {
    return kFwdVariants[variant].is_swapped && count == 1 &&
           one.head_dim_v <= launch_columns(one) && one.sm_margin == 0;
  }

  // first: the parameters of the first group. The caller moves the pointer to the sinks.
  FwdParams params_of(FwdParams const& first, FwdConfig const& config, int group) const;
};

// The parameters of at most `count` columns of v.
FwdParams params_of_columns(FwdParams const& all, FwdConfig const& config, int first, int count);

}  // namespace fa3
