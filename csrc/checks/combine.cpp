// Calls of `combine`: a stack of results, or results that are separate tensors.
#include "checks/checks.h"
#include "checks/table.h"

namespace fa3 {
namespace {

bool check_rows(Solver& solver, int64_t rows) {
  double const blocks = std::max(1.0, double(solver["D"] / 64));
  return solver.in_int(double(solver["Hq"]) * double(rows) * blocks,
                       "the rows of out, 64 columns each,");
}

// A part without a batch and its LSE, all rows in one batch entry, or with the shape of out.
constexpr Shape kShapes[][2] = {
    {"Tq Hq D", "Hq Tq"}, {"1 Tq Hq D", "1 Hq Tq"}, {"B R Hq D", "B Hq R"}};

bool check_part(Solver& solver, MergeCall const& call, int i) {
  static constexpr char const* kOuts[] = {"outs[0]", "outs[1]", "outs[2]", "outs[3]"};
  static constexpr char const* kLses[] = {"lses[0]", "lses[1]", "lses[2]", "lses[3]"};
  static_assert(std::size(kOuts) == MergeCall::kMost);
  auto const& [part, lse] = std::tie(call.part[i], call.lse[i]);
  bool const is_part = i < call.parts();
  if (bool(part) != is_part || bool(lse) != is_part) {
    return solver.refuse("two parts or more, one after another, each with its LSE",
                         text(part ? kOuts[i] : kLses[i], " alone"));
  }
  if (!is_part) {
    return true;
  }
  bool const has_batch = call.out.rank == 4 && part->rank != 3;
  auto const& [shape, rows] = kShapes[!has_batch ? 0 : part->size[0] == 1 ? 1 : 2];
  return solver.fits({kOuts[i], kKeys, shape}, *part) &&
         solver.fits({kLses[i], kWide, rows}, *lse) &&
         solver.apart("out", &call.out, kOuts[i], &*part);
}

}  // namespace

std::string check_combine(CombineCall const& call) {
  Solver solver("flash_attn_combine", {"out_partial", call.out_partial}, k16Bits | k32Bits);
  solver.dtypes[kOut] = k16Bits | k32Bits;
  bool const is_fine = solver.fits({"out_partial", kAnchor, "X B R Hq D"}, call.out_partial) &&
                       solver.fits({"lse_partial", kFloat, "X B R Hq"}, call.lse_partial) &&
                       solver.fits({"out", kOut, "B R Hq D", kOwn}, call.out) &&
                       solver.apart("out", &call.out, "out_partial", &call.out_partial) &&
                       solver.apart("out", &call.out, "lse_partial", &call.lse_partial) &&
                       check_rows(solver, solver["B"] * solver["R"]);
  return is_fine ? "" : solver.error;
}

std::string check_merge(MergeCall const& call) {
  bool const on_cuda = call.out.device == DeviceType::kCuda;
  Solver solver("merge_states", {"out", call.out}, k16Bits | (on_cuda ? 0 : kCpuOnly | kE4M3));
  solver.dtypes[kWide] = on_cuda ? k32Bits : kCpuOnly;
  bool is_fine = solver.fits({"out", kAnchor, "B R Hq D", kOwn, "Tq Hq D"}, call.out);
  if (call.out.rank == 4) {
    solver.bind("Tq", solver["B"] * solver["R"], "out");
  }
  for (int i = 0; is_fine && i < MergeCall::kMost; ++i) {
    is_fine = check_part(solver, call, i);
  }
  return is_fine && check_rows(solver, solver["Tq"]) ? "" : solver.error;
}

}  // namespace fa3
