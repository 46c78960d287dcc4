#include "ops/forward_launch.h"

#include <algorithm>
#include <stdexcept>

#include "plan/registry.h"
#include "plan/variants.h"
#include "fwd_built.inc"
#include "fwd_registry.inc"
#include "schedule/counters.h"
#include "schedule/prepare.h"

namespace fa3 {
namespace {

PrepareParams prepare_params(FwdParams const& params, FwdConfig const& config) {
  FwdProblem const& problem = params.problem;
  FwdSchedule const& schedule = params.schedule;
  int const positions = RowPacking{schedule.pack}.positions_per_tile(config.consumer_warpgroups);
  IntervalMask const mask = problem.mask;
  PrepareParams prepare;
  prepare.lengths = params.lengths;
  prepare.batch = problem.batch;
  prepare.entries = problem.entries();
  prepare.total_q = problem.total_q;
  prepare.total_k = problem.total_k;
  prepare.tile_positions = positions;
  prepare.most_keys = int(std::min<int64_t>(
      int64_t(mask.left) + mask.right + positions,
      mask.is_chunked ? int64_t(mask.chunk.divisor) + positions : IntervalMask::kNoLimit));
  prepare.tables =
      PackedTables::in(params.workspace, schedule.tiles / (problem.heads_q / schedule.pack));
  return prepare;
}

// The kernel that combines the parts of a latent cache follows in a launch of its own.
void launch_kernels(FwdParams& params, int variant, void* stream) {
  if (!kFwdVariants[variant].kind.is_latent) {
    kFwdLaunchers[variant](params, stream);
    return;
  }
  LaunchPair pair(params.cache.arrived, stream);
  params.cache.arrived = pair.counters();
  kFwdLaunchers[variant](params, stream);
  pair.complete();
}

}  // namespace

void require_built(int variant) {
  if (!kFwdLaunchers[variant]) {
    throw std::runtime_error(missing_variant_text("fwd", variant, kFwdBuilt));
  }
}

void launch_variant(FwdParams const& params, int variant, void* stream) {
  FwdConfig const& config = kFwdVariants[variant];
  int const all = params.problem.head_dim_v;
  int const step = launch_columns(params.problem);
  for (int first = 0; first < all; first += step) {
    FwdParams part = params;
    part.problem.head_dim_v = std::min(step, all - first);
    constexpr int kOutBytes = 2;
    part.v.data = static_cast<char*>(params.v.data) + first * element_bytes(config.dtype_kv);
    part.o.data = static_cast<char*>(params.o.data) + first * kOutBytes;
    if (part.problem.is_packed && !config.kind.is_cache()) {
      launch_prepare(prepare_params(part, config), stream);
    }
    launch_kernels(part, variant, stream);
  }
}

ForwardLaunch::ForwardLaunch(FwdParams& params) : plan_(plan_forward(params.problem)) {
  require_built(plan_.variant);
  params.schedule = plan_.schedule;
}

void ForwardLaunch::run(char const* op, FwdParams& params, OwnedTensor const& out) const {
  Target const target(op, out);
  params.o = target.view();
  void* stream = nullptr;
  int const device = describe(out).device_index;
  require(aoti_torch_get_current_cuda_stream(device, &stream), "read the current stream");
  params.ticket_counter = launch_counters(stream);
  launch_variant(params, plan_.variant, stream);
  target.finish();
}

}  // namespace fa3
