// What the forward ops of all dtypes read off the stack: the call, and the tensors that it owns.
#pragma once

#include "call/attention_call.h"
#include "ops/boxed_stack.h"

namespace fa3 {

struct ForwardCall {
  BoxedStack args;  // at the argument after the tensors
  OwnedTensor q;
  OwnedTensor k;
  OwnedTensor v;
  OwnedTensor out;  // null: to be allocated
  OwnedTensor qv;   // null: none
  AttentionCall call;

  ForwardCall(StableIValue* stack, bool has_out)
      : args(stack),
        q(args.tensor()),
        k(args.tensor()),
        v(args.tensor()),
        out(has_out ? args.tensor() : OwnedTensor()) {
    call.q = describe(q);
    call.k = describe(k);
    call.v = describe(v);
    if (out) {
      call.out = describe(out);
    }
  }

  void read_qv() {
    qv = args.optional_tensor();
    if (qv) {
      call.latent.qv = describe(qv);
    }
  }
};

}  // namespace fa3
