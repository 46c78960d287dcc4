// Selects the wgmma instruction of a GEMM: 64 rows, 16-bit or 8-bit operands, fp32 accumulators.
#pragma once

#include "core/problem.h"
#include "device/cute.h"
#include "wgmma_shapes.h"

namespace fa3 {

template <Dtype kDtype>
using ElementOf = cute::conditional_t<
    kDtype == Dtype::kFloat8E4M3, cutlass::float_e4m3_t,
    cute::conditional_t<kDtype == Dtype::kFloat16, cutlass::half_t, cutlass::bfloat16_t>>;

// Elements per k-step of 32 bytes.
template <class Element>
constexpr int kStepColumns = 32 / int(sizeof(Element));

using cute::GMMA::Major;

// The MMA of 64 rows and kColumns columns with both operands in shared memory.
template <class Element, int kColumns, Major kMajorB>
constexpr auto shared_atom() {
  using Extra = typename ExtraWgmmaSs<Element, kColumns, Major::K, kMajorB>::type;
  if constexpr (cute::is_void_v<Extra>) {
    using Shape = cute::Shape<cute::_64, cute::Int<kColumns>, cute::Int<kStepColumns<Element>>>;
    return cute::GMMA::ss_op_selector<Element, Element, float, Shape, Major::K, kMajorB>();
  } else {
    return Extra{};
  }
}

// The MMA of 64 rows and kColumns columns with operand A in registers.
template <class Element, int kColumns, Major kMajorB>
constexpr auto register_atom() {
  using Extra = typename ExtraWgmmaRs<Element, kColumns, Major::K, kMajorB>::type;
  if constexpr (cute::is_void_v<Extra>) {
    using Shape = cute::Shape<cute::_64, cute::Int<kColumns>, cute::Int<kStepColumns<Element>>>;
    return cute::GMMA::rs_op_selector<Element, Element, float, Shape, Major::K, kMajorB>();
  } else {
    return Extra{};
  }
}

}  // namespace fa3
