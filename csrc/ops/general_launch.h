// What the general forward ops of all dtypes do when a call is fine: problem, results, launch.
#pragma once

#include "call/device_info.h"
#include "ops/cuda_call.h"
#include "ops/forward_call.h"

namespace fa3 {

struct GeneralResults {
  OwnedTensor lse;
  OwnedTensor max_logits;
};

// Computes a call that has passed its checks into args.out, which it allocates if it is null.
// params has what the call does not say: the dtype of out, and at FP8 the scales.
GeneralResults run_general(char const* op, ForwardCall& args, FwdParams& params);

template <class T>
T const* data_of(std::optional<TensorMeta> const& tensor) {
  return tensor ? reinterpret_cast<T const*>(tensor->address) : nullptr;
}

inline PackedLengths lengths_of(AttentionCall const& call) {
  LengthArguments const& lengths = call.lengths;
  return PackedLengths{data_of<int>(lengths.cu_seqlens_q), data_of<int>(lengths.cu_seqlens_k),
                       data_of<int>(lengths.seqused_q), data_of<int>(lengths.seqused_k)};
}

}  // namespace fa3
