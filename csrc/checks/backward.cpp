// Calls of the backward: the rules of the forward, and the tensors of gradients.
#include "checks/checks.h"
#include "checks/rules.h"
#include "plan/variants.h"

namespace fa3 {
namespace {

using Call = AttentionCall;

// Dense, packed. What the forward gave, the gradients of it, and the tensors that the op writes
// into.
constexpr Row<Call> kTable[] = {
    {"dout", at<&Call::dout>, kLikeAnchor, kAny, {"B Sq Hq Dv", "Tq Hq Dv"}},
    {"out", at<&Call::out>, kLikeAnchor, kAny, {"B Sq Hq Dv", "Tq Hq Dv"}},
    {"lse", at<&Call::lse>, kWide, kAny, {"B Hq Sq", "Hq Tq"}},
    {"dlse", at<&Call::dlse>, kWide, kAny, {"B Hq Sq", "Hq Tq"}},
    {"dq", at<&Call::dq>, kLikeAnchor, kOwnColumns, {"B Sq Hq D", "Tq Hq D"}},
    {"dk", at<&Call::dk>, kLikeAnchor, kOwnColumns, {"B Sk Hk D", "Tk Hk D"}},
    {"dv", at<&Call::dv>, kLikeAnchor, kOwnColumns, {"B Sk Hk Dv", "Tk Hk Dv"}},
    // For what is written into their memory; their shapes were checked.
    {"q", at<&Call::q>, kAnchor, kAny, {}},
    {"k", at<&Call::k>, kKeys, kAny, {}},
    {"v", at<&Call::v>, kValues, kAny, {}},
};

// The backward has no second launch for more columns of v, and counts tiles of keys too.
std::string check_inputs(Solver& solver, Call const& call) {
  std::string const error = check_attention(solver, call);
  if (!error.empty()) {
    return error;
  }
  if (solver.on_cuda() && solver["Dv"] > kMaxHeadDim) {
    return solver.refuse(
        text("v.size(", call.v.rank - 1, "), the head_dim of the values, to be at most ",
             kMaxHeadDim, " for gradients"),
        text(solver["Dv"]), "split the columns of v over two calls");
  }
  return call.is_packed() ? check_tiles(solver, "k", "Tk", "Hk")
                          : check_tiles(solver, "k", "Sk", "Hk");
}

}  // namespace

std::string check_gradient_inputs(Call const& call) {
  Solver solver = solver_of(call.op(), call, false);
  return check_inputs(solver, call);
}

std::string check_backward(Call const& call) {
  Solver solver = solver_of(call.op(), call, false);
  std::string error = check_inputs(solver, call);
  if (error.empty()) {
    error = call.is_packed() ? check_rows<kTable, 1>(solver, call)
                             : check_rows<kTable, 0>(solver, call);
  }
  return error.empty() && call.dq ? check_own_memory<kTable>(solver, call) : error;
}

}  // namespace fa3
