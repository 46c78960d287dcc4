// One launch of attention, whatever the layout of its keys. The constructor plans, allocates and
// makes the views, run() launches: a call that appends launches nothing before all is allocated.
#pragma once

#include <optional>

#include "plan/plan.h"
#include "ops/cuda_call.h"

namespace fa3 {

// Inputs that the kernels cannot read are replaced by copies. They stay until the launch.
struct ForwardInputs {
  OwnedTensor& q;
  OwnedTensor& k;
  OwnedTensor& v;
  OwnedTensor& qv;  // null: none
};

struct ForwardResults {
  OwnedTensor out;
  OwnedTensor returned_out;  // empty; for an out that was given
  OwnedTensor lse;
  OwnedTensor max_logits;  // written if the call says so
  OwnedTensor rotated;     // queries
  bool has_lse = false;    // whether lse is written
};

// The dtype of the tensor that was given, else of q, or for e4m3 what the call asks for.
Dtype out_dtype_of(AttentionCall const& call);

// out: as q, with the head_dim of v. rows: a float32 for each row and head, as the LSE has.
OwnedTensor allocate_out(AttentionCall const& call);
OwnedTensor allocate_rows(AttentionCall const& call);

class ForwardRun {
 public:
  // The call has passed its checks, and has queries. Throws if the variant is not in this build.
  // stream: the current one of q's device.
  ForwardRun(AttentionCall const& call, ForwardInputs const& inputs, ForwardResults const& results,
             void* stream);

  void run(void* stream) const;

 private:
  struct Launch {
    FwdParams params;
    int variant = 0;
    OwnedTensor workspace;

    void set_plan(FwdPlan const& plan);
    void plan_dense(AttentionCall const& call, void* stream);
    // used_counters: of the stream's, that earlier launches of the call have. Returns how many more
    // this one needs.
    int64_t plan_on_cache(AttentionCall const& call, int64_t used_counters, void* stream);
  };

  void view(AttentionCall const& call, ForwardInputs const& inputs, ForwardResults const& results);

  Target target_;
  OwnedTensor zeros_;  // the keys of a call that has none
  Launch first_;
  std::optional<Launch> second_;  // packed queries on a cache: the steps beside the prompts
};

}  // namespace fa3
