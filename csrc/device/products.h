// The wgmma instruction for a product: 64 rows, 16-bit operands, fp32 sums.
#pragma once

#include "core/problem.h"
#include "device/cute.h"
#include "wgmma_shapes.h"

namespace fa3 {

template <Dtype kDtype>
using ElementOf =
    cute::conditional_t<kDtype == Dtype::kFloat16, cutlass::half_t, cutlass::bfloat16_t>;

using cute::GMMA::Major;

// A product of 64 rows and kColumns columns, both operands in shared memory.
template <class Element, int kColumns, Major kMajorB>
constexpr auto shared_atom() {
  using Extra = typename ExtraWgmmaSs<Element, kColumns, Major::K, kMajorB>::type;
  if constexpr (cute::is_void_v<Extra>) {
    using Shape = cute::Shape<cute::_64, cute::Int<kColumns>, cute::_16>;
    return cute::GMMA::ss_op_selector<Element, Element, float, Shape, Major::K, kMajorB>();
  } else {
    return Extra{};
  }
}

// The same with the first operand in registers.
template <class Element, int kColumns, Major kMajorB>
constexpr auto register_atom() {
  using Extra = typename ExtraWgmmaRs<Element, kColumns, Major::K, kMajorB>::type;
  if constexpr (cute::is_void_v<Extra>) {
    using Shape = cute::Shape<cute::_64, cute::Int<kColumns>, cute::_16>;
    return cute::GMMA::rs_op_selector<Element, Element, float, Shape, Major::K, kMajorB>();
  } else {
    return Extra{};
  }
}

}  // namespace fa3
