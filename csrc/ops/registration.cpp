// The CUDA implementations of the ops. Their schemas, fakes and CPU implementations are Python
// (flash_attn3/_library.py), which defines them before it loads this library.
#include <torch/csrc/stable/library.h>

#include "ops/library.h"

STABLE_TORCH_LIBRARY_IMPL(flash_attn3, CUDA, m) {
  m.impl("fwd", &fa3::fwd_traced_boxed);
  m.impl("_fwd", &fa3::fwd_boxed);
  m.impl("_fwd_no_lse", &fa3::fwd_no_lse_boxed);
  m.impl("fwd_out", &fa3::fwd_out_boxed);
  m.impl("fwd_out_no_lse", &fa3::fwd_out_no_lse_boxed);
  m.impl("_fwd_general", &fa3::fwd_general_boxed);
  m.impl("fwd_general", &fa3::fwd_general_traced_boxed);
  m.impl("fwd_general_out", &fa3::fwd_general_out_boxed);
  m.impl("bwd", &fa3::bwd_boxed);
  m.impl("bwd_general", &fa3::bwd_general_boxed);
  m.impl("bwd_out", &fa3::bwd_out_boxed);
  m.impl("fwd_fp8", &fa3::fwd_fp8_boxed);
  m.impl("fwd_fp8_out", &fa3::fwd_fp8_out_boxed);
  m.impl("quantize_fp8", &fa3::quantize_fp8_boxed);
  m.impl("quantize_qkv_fp8", &fa3::quantize_qkv_fp8_boxed);
}

// For Python's ctypes: current_driver_problem(). The text stays valid.
extern "C" __attribute__((visibility("default"))) char const* flash_attn3_driver_problem() {
  static std::string const problem = fa3::current_driver_problem();
  return problem.c_str();
}
