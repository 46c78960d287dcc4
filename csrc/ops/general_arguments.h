// What the general ops of both directions have in common: lengths, mask, softcap and sinks.
#pragma once

#include <cmath>
#include <optional>

#include "dispatch/checks_general.h"
#include "dispatch/device_info.h"
#include "dispatch/general_problem.h"
#include "ops/boxed_stack.h"
#include "ops/cuda_call.h"

namespace fa3 {

// The members are read off the stack in this order.
struct GeneralArguments {
  OwnedTensor cu_seqlens_q;  // null, as the other lengths and the sinks: none
  OwnedTensor cu_seqlens_k;
  OwnedTensor seqused_q;
  OwnedTensor seqused_k;
  int64_t max_seqlen_q;
  int64_t max_seqlen_k;
  OwnedTensor sinks;
  std::optional<double> softmax_scale;
  bool causal;
  int64_t window_left;
  int64_t window_right;
  int64_t attention_chunk;
  double softcap;

  static GeneralArguments read(BoxedStack& args) {
    return GeneralArguments{args.optional_tensor(),
                            args.optional_tensor(),
                            args.optional_tensor(),
                            args.optional_tensor(),
                            args.integer(),
                            args.integer(),
                            args.optional_tensor(),
                            args.optional_real(),
                            args.flag(),
                            args.integer(),
                            args.integer(),
                            args.integer(),
                            args.real()};
  }

  static constexpr int kCount = 13;

  GeneralSizes sizes() const { return GeneralSizes{max_seqlen_q, max_seqlen_k}; }
};

// All but q, k, v and what only one direction has.
inline GeneralCall describe_general(GeneralArguments const& args) {
  GeneralCall call;
  call.is_packed = args.cu_seqlens_q || args.cu_seqlens_k;
  call.has_seqused_q = args.seqused_q != nullptr;
  call.has_seqused_k = args.seqused_k != nullptr;
  call.has_sinks = args.sinks != nullptr;
  struct Described {
    OwnedTensor const& tensor;
    TensorMeta& meta;
  };
  Described const all[] = {{args.cu_seqlens_q, call.cu_seqlens_q},
                           {args.cu_seqlens_k, call.cu_seqlens_k},
                           {args.seqused_q, call.seqused_q},
                           {args.seqused_k, call.seqused_k},
                           {args.sinks, call.sinks}};
  for (auto const& [tensor, meta] : all) {
    if (tensor) {
      meta = describe(tensor);
    }
  }
  call.causal = args.causal;
  call.window_left = args.window_left;
  call.window_right = args.window_right;
  call.attention_chunk = args.attention_chunk;
  call.softcap = args.softcap;
  return call;
}

// head_dim ** -0.5, if none was given.
inline double general_scale(GeneralArguments const& args, TensorMeta const& q) {
  int64_t const head_dim = q.rank > 0 ? q.size[q.rank - 1] : 1;
  return args.softmax_scale ? *args.softmax_scale : 1 / std::sqrt(double(head_dim));
}

template <class T>
T const* data_of(OwnedTensor const& tensor, TensorMeta const& meta) {
  return tensor ? reinterpret_cast<T const*>(meta.address) : nullptr;
}

inline PackedLengths lengths_of(GeneralArguments const& args, GeneralCall const& call) {
  return PackedLengths{data_of<int>(args.cu_seqlens_q, call.cu_seqlens_q),
                       data_of<int>(args.cu_seqlens_k, call.cu_seqlens_k),
                       data_of<int>(args.seqused_q, call.seqused_q),
                       data_of<int>(args.seqused_k, call.seqused_k)};
}

}  // namespace fa3
