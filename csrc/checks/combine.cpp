// Calls of `combine`: a stack of results, or results that are separate tensors.
#include "checks/checks.h"
#include "checks/table.h"

namespace fa3 {
namespace {

constexpr Row<CombineCall> kStack[] = {
    {1, at<&CombineCall::out_partial>, {"out_partial", kAnchor, "X B R Hq D"}},
    {1, at<&CombineCall::lse_partial>, {"lse_partial", kFloat32, "X B R Hq"}},
    {1, at<&CombineCall::out>, {"out", kOut, "B R Hq D", kOwn}},
};

bool check_count(Solver& solver, int64_t parts, double rows) {
  constexpr int64_t kMost = int64_t(1) << 30;
  int64_t const head_dim = solver["D"];
  double const blocks = rows * double(std::max<int64_t>(1, head_dim / 64));
  return (blocks <= double(kMost) && parts <= kMost && head_dim <= kMost) ||
         solver.refuse(text("at most ", kMost, " parts, and as many rows of 64 columns"),
                       text(parts, " parts of ", rows, " rows of ", head_dim, " columns"),
                       "split the batch");
}

bool check_stack(Solver& solver, CombineCall const& call) {
  return check_rows<kStack>(solver, call) && check_apart<kStack>(solver, call, "out", &call.out) &&
         check_count(solver, solver["X"],
                     double(solver["B"]) * double(solver["R"]) * double(solver["Hq"]));
}

// A part has the shape of out, or all rows in one batch entry, or no batch.
bool check_part(Solver& solver, MergeCall const& call, int i) {
  static constexpr char const* kOuts[] = {"outs[0]", "outs[1]", "outs[2]", "outs[3]"};
  static constexpr char const* kLses[] = {"lses[0]", "lses[1]", "lses[2]", "lses[3]"};
  static_assert(std::size(kOuts) == MergeCall::kMost);
  auto const& [part, lse] = std::tie(call.part[i], call.lse[i]);
  if (i >= call.parts()) {
    return (!part && !lse) ||
           solver.refuse(text(kOuts[call.parts()], " before further parts"), "None");
  }
  if (!part || !lse) {
    return solver.refuse(part ? text(kLses[i], " with ", kOuts[i]) : "two parts or more",
                         part ? "None" : text(kOuts[i], " of None"));
  }
  bool const has_batch = call.out.rank == 4 && part->rank != 3;
  bool const has_one_entry = has_batch && part->size[0] == 1;
  Shape const shape = !has_batch      ? Shape("Tq Hq D")
                      : has_one_entry ? Shape("1 Tq Hq D")
                                      : Shape("B R Hq D");
  Shape const rows = !has_batch      ? Shape("Hq Tq")
                     : has_one_entry ? Shape("1 Hq Tq")
                                     : Shape("B Hq R");
  return solver.fits({kOuts[i], kKeys, shape}, *part) &&
         solver.fits({kLses[i], kWide, rows}, *lse) &&
         solver.apart("out", &call.out, kOuts[i], &*part);
}

bool check_parts(Solver& solver, MergeCall const& call) {
  if (!solver.fits({"out", kAnchor, "B R Hq D", kOwn, "Tq Hq D"}, call.out)) {
    return false;
  }
  if (call.out.rank == 4) {
    solver.bind("Tq", solver["B"] * solver["R"], "out");
  }
  for (int i = 0; i < MergeCall::kMost; ++i) {
    if (!check_part(solver, call, i)) {
      return false;
    }
  }
  return check_count(solver, call.parts(), double(solver["Tq"]) * double(solver["Hq"]));
}

}  // namespace

std::string check_combine(CombineCall const& call) {
  Solver solver("flash_attn_combine", {"out_partial", call.out_partial}, k16Bits | k32Bits);
  solver.dtypes[kOut] = k16Bits | k32Bits;
  return error_of(std::move(solver), check_stack, call);
}

std::string check_merge(MergeCall const& call) {
  bool const on_cuda = call.out.device == DeviceType::kCuda;
  Solver solver("merge_states", {"out", call.out}, k16Bits | (on_cuda ? 0 : kCpuOnly | kE4M3));
  solver.dtypes[kWide] = on_cuda ? k32Bits : kCpuOnly;
  return error_of(std::move(solver), check_parts, call);
}

}  // namespace fa3
