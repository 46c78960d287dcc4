// Calls of `combine`: a stack of results, or results that are separate tensors.
#include "checks/checks.h"
#include "checks/table.h"

namespace fa3 {
namespace {

constexpr Row<CombineCall> kStack[] = {
    {"out_partial", at<&CombineCall::out_partial>, kAnchor, kAny, {"X B R H D"}},
    {"lse_partial", at<&CombineCall::lse_partial>, kFloat32, kAny, {"X B R H"}},
    {"out", at<&CombineCall::out>, kReal, kOwn, {"B R H D"}},
};

std::string check_stack(Solver& solver, CombineCall const& call) {
  return check_rows<kStack>(solver, call);
}

std::string check_count(Solver const& solver, int64_t parts, double rows) {
  constexpr int64_t kMost = int64_t(1) << 30;
  int64_t const head_dim = solver["D"];
  double const blocks = rows * double(std::max<int64_t>(1, head_dim / 64));
  return blocks > double(kMost) || parts > kMost || head_dim > kMost
             ? solver.refuse(text("at most ", kMost, " parts, and as many rows of 64 columns"),
                             text(parts, " parts of ", rows, " rows of ", head_dim, " columns"),
                             "split the batch")
             : "";
}

std::string check_stack_count(Solver const& solver, CombineCall const&) {
  return check_count(solver, solver["X"],
                     double(solver["B"]) * double(solver["R"]) * double(solver["H"]));
}

std::string check_stack_memory(Solver const& solver, CombineCall const& call) {
  return check_own_memory<kStack>(solver, call);
}

// ------------------------------------------------------------------------------- separate tensors
using Call = MergeCall;

constexpr Row<Call> kOut[] = {
    {"out", at<&Call::out>, kAnchor, kOwn, {"B R H D", "T H D"}},
};

constexpr char const* kPartNames[] = {"out_0", "out_1", "out_2", "out_3"};
constexpr char const* kLseNames[] = {"lse_0", "lse_1", "lse_2", "lse_3"};
static_assert(std::size(kPartNames) == Call::kMost && std::size(kLseNames) == Call::kMost);

template <int kPart>
TensorMeta const* part_of(Call const& call) {
  return &*call.part[kPart];
}
template <int kPart>
TensorMeta const* lse_of(Call const& call) {
  return &*call.lse[kPart];
}

// As out; all rows in one batch entry; without a batch.
template <int kPart>
constexpr Row<Call> kRows[] = {
    {kPartNames[kPart], &part_of<kPart>, kKeys, kAny, {"B R H D", "1 T H D", "T H D"}},
    {kLseNames[kPart], &lse_of<kPart>, kWide, kAny, {"B H R", "1 H T", "H T"}},
};

std::string check_out(Solver& solver, Call const& call) {
  if (call.out.rank == 3) {
    return check_rows<kOut, 1>(solver, call);
  }
  std::string error = check_rows<kOut, 0>(solver, call);
  solver.bind("T", solver["B"] * solver["R"], "out");
  return error;
}

template <int kPart>
std::string check_part(Solver& solver, Call const& call) {
  if (kPart >= call.parts()) {
    return call.part[kPart] || call.lse[kPart]
               ? solver.refuse(text("out_", call.parts(), " before further parts"), "None")
               : "";
  }
  if (!call.part[kPart] || !call.lse[kPart]) {
    return call.part[kPart] ? solver.refuse(text("lse_", kPart, " with out_", kPart), "None")
                            : solver.refuse("two parts or more", text("out_", kPart, " of None"));
  }
  TensorMeta const& part = *call.part[kPart];
  bool const has_batch = call.out.rank == 4 && part.rank != 3;
  std::string error = !has_batch          ? check_rows<kRows<kPart>, 2>(solver, call)
                      : part.size[0] == 1 ? check_rows<kRows<kPart>, 1>(solver, call)
                                          : check_rows<kRows<kPart>, 0>(solver, call);
  return error.empty() && shares_memory(call.out, part)
             ? solver.refuse("out with memory of its own", text("the memory of out_", kPart))
             : error;
}

std::string check_merged_count(Solver const& solver, Call const& call) {
  return check_count(solver, call.parts(), double(solver["T"]) * double(solver["H"]));
}

}  // namespace

std::string check_combine(CombineCall const& call) {
  Solver solver("combine", {"out_partial", call.out_partial});
  solver.set(kAnchor, k16Bits | k32Bits);
  solver.set(kReal, k16Bits | k32Bits);
  return first_error<check_stack, check_stack_memory, check_stack_count>(solver, call);
}

std::string check_merge(MergeCall const& call) {
  Solver solver("merge_parts", {"out", call.out});
  solver.set(kAnchor, solver.on_cuda() ? k16Bits : k16Bits | kCpuOnly | kE4M3);
  solver.set(kWide, solver.on_cuda() ? k32Bits : kCpuOnly);
  return first_error<check_out, check_part<0>, check_part<1>, check_part<2>, check_part<3>,
                     check_merged_count>(solver, call);
}

}  // namespace fa3
