// What the general forward ops of all dtypes do when a call is fine: problem, results, launch.
#pragma once

#include "ops/general_arguments.h"

namespace fa3 {

struct GeneralForward {
  OwnedTensor q;
  OwnedTensor k;
  OwnedTensor v;
  OwnedTensor out;  // null: to be allocated
  GeneralArguments general;
  PackGqa pack_gqa;
  int64_t sm_margin;
  bool wants_max_logits;
  bool promote = false;  // FP8
};

struct GeneralResults {
  OwnedTensor lse;
  OwnedTensor max_logits;
};

// All that these arguments say of a call.
GeneralCall describe_forward(GeneralForward const& args);

// Computes a call that has passed its checks into args.out, which it allocates if it is null.
// params has what the call does not say: the dtype of out, and at FP8 the scales.
GeneralResults run_general(char const* op, GeneralForward& args, GeneralCall const& call,
                           FwdParams& params);

}  // namespace fa3
