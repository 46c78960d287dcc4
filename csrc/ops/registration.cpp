// The CUDA implementations of the ops. Their schemas, fakes and CPU implementations are Python
// (flash_attn3/ops/library.py), which defines them before it loads this library.
#include <torch/csrc/stable/library.h>

#include "ops/library.h"

STABLE_TORCH_LIBRARY_IMPL(flash_attn3, CUDA, m) {
  for (auto const ops : {fa3::forward_ops(), fa3::backward_ops(), fa3::quantize_ops(),
                         fa3::combine_ops(), fa3::mask_list_ops(), fa3::chosen_gradient_ops()}) {
    for (fa3::BoxedOp const& op : ops) {
      m.impl(op.name, op.run);
    }
  }
}

// For Python's ctypes: current_driver_problem(). The text stays valid.
extern "C" __attribute__((visibility("default"))) char const* flash_attn3_driver_problem() {
  static std::string const problem = fa3::current_driver_problem();
  return problem.c_str();
}
