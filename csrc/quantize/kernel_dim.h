// Which kernel takes a head dim.
#pragma once

#include <type_traits>
#include <utility>

#include "quantize/rows.h"

namespace fa3 {

template <int kDim>
using KernelDim = std::integral_constant<int, kDim>;
template <int... kDims>
using KernelDims = std::integer_sequence<int, kDims...>;

// Kernels for every head dim: not rotated, rotated.
using GeneralDims = KernelDims<kPlain, 0>;
// Of elements of 16 bits there are such whose rotation the compiler knows, too.
template <class Element>
using DimsOf = std::conditional_t<sizeof(Element) == 2,
                                  KernelDims<kPlain, 0, 64, 80, 96, 128, 192, 256>, GeneralDims>;

template <int... kDims>
constexpr bool is_one_of(int dim, KernelDims<kDims...>) {
  return ((dim == kDims) || ...);
}

// The kDim of the kernel that has everything in one pass.
inline int kernel_dim(QuantizeParams const& params) {
  int const dim = params.shape.head_dim;
  bool const is_wide = params.dtype == Dtype::kFloat32;
  if (!params.is_rotated) {
    return kPlain;
  }
  return !is_wide && is_one_of(dim, DimsOf<cutlass::half_t>()) ? dim : 0;
}

// Calls run(KernelDim<dim>()) if dim is one of kDims.
template <class Run, int... kDims>
void run_with_dim(int dim, KernelDims<kDims...>, Run const& run) {
  ((dim == kDims ? run(KernelDim<kDims>()) : void()), ...);
}

}  // namespace fa3
