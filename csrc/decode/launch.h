// Host side of the decode kernel. The generated units call launch_decode.
#pragma once

#include "decode/kernel.h"
#include "forward/launch.h"

namespace fa3 {

// Launches on the current device and the given stream (a cudaStream_t).
template <class Config>
void launch_decode(FwdParams const& p, void* stream) {
  using Traits = DecodeTraits<Config>;
  constexpr int kBytes = Config::k.shared_bytes();
  static_assert(sizeof(DecodeStorage<Traits>) <= kBytes,
                "decode_shared_memory() must cover the storage");
  LaunchShape const shape{Config::k.name, p.schedule.grid, Config::k.threads(), kBytes};
  static std::atomic<uint64_t> devices_ready{0};
  bind_thread(shape.variant, shape.grid, kBytes);
  allow_shared_memory(decode_kernel<Config>, shape, devices_ready);
  DecodeDeviceParams params;
  set_cache_params<Traits>(params, p);
  int const positions = Config::k.decode_rows() / p.schedule.pack;
  CacheSchedule const& schedule = p.schedule.cache;
  int64_t const rows = schedule.slots * schedule.rows;
  params.part_lses = params.parts + rows * Traits::kPartColumns;
  params.group_lses = params.part_lses + rows * Traits::kConsumerWarps;
  params.positions_per_warpgroup = positions;
  params.line.positions = FastDiv(positions);
  params.is_bf16 = p.problem.dtype == Dtype::kBFloat16;
  params.is_second = p.problem.cache.is_second;
  params.q_rows = in_bytes(p.q, p.problem.dtype);
  if constexpr (Traits::kIsLatent) {
    params.qv_rows = in_bytes(p.qv, p.problem.dtype);
    params.rows = CacheRows::of(params);
    params.key_scale = p.v_scale;
  }
  params.row_bytes_q = p.problem.head_dim * element_bytes(p.problem.dtype);
  launch_early(decode_kernel<Config>, shape, params, stream);
}

}  // namespace fa3
