// The problem that a call of a general op is: its mask in the form that the kernels know, with
// limits that hide nothing taken out.
#pragma once

#include "dispatch/checks_general.h"

namespace fa3 {

// A fine call (check_general()), and what its op knows beside it.
struct GeneralSizes {
  int64_t max_seqlen_q = 0;  // packed: 0 if nobody knows
  int64_t max_seqlen_k = 0;
};

// All but device, sm_margin, pack_gqa and deterministic. has_row_features: sinks or row maxima, of
// a forward pass.
FwdProblem general_problem(GeneralCall const& call, GeneralSizes const& sizes,
                           bool has_row_features);

}  // namespace fa3
