// Calls of attention on float8_e4m3fn: the rules of the forward, and the scales of q, k and v.
#include <iterator>

#include "checks/checks.h"
#include "checks/rules.h"

namespace fa3 {
namespace {

struct Scaled {
  char const* name;
  TensorMeta const& x;
  std::optional<TensorMeta> const& scale;
  int block_rows;
};

// A scale for each sequence and KV head, or for each block of rows and head.
std::string check_scale(Solver const& solver, AttentionCall const& call, Scaled const& scaled) {
  auto const& [name, x, given, block_rows] = scaled;
  TensorMeta const& scale = *given;
  if (scale.dtype != Dtype::kFloat32) {
    return solver.refuse(text(name, ".dtype to be float32"), scale.dtype_name);
  }
  if (!same_device(scale, call.q)) {
    return solver.refuse(text(name, " on the device of q, ", device_text(call.q)),
                         device_text(scale));
  }
  bool const is_packed = call.is_packed();
  int64_t const rows = x.size[x.rank - 3];
  int64_t const by_head[] = {solver["B"], solver["Hk"]};
  int64_t const by_block[] = {
      is_packed ? 1 : solver["B"], x.size[x.rank - 2],
      is_packed ? rows / block_rows + solver["B"] : (rows + block_rows - 1) / block_rows};
  bool const fits = (scale.rank == 2 && std::equal(by_head, by_head + 2, scale.size)) ||
                    (scale.rank == 3 && std::equal(by_block, by_block + 3, scale.size));
  return fits ? ""
              : solver.refuse(text(name, " to have the shape ", shape_text(by_head, 2), ", or ",
                                   shape_text(by_block, 3), " for blocks of ", block_rows, " rows"),
                              shape_text(scale.size, std::min(scale.rank, 5)));
}

std::string check_scales(Solver const& solver, AttentionCall const& call) {
  ScaleArguments const& scales = call.scales;
  for (Scaled const& scaled : {Scaled{"q_descale", call.q, scales.q_descale, kScaleBlockQueries},
                               Scaled{"k_descale", call.k, scales.k_descale, kScaleBlockKeys},
                               Scaled{"v_descale", call.v, scales.v_descale, kScaleBlockKeys}}) {
    std::string const error = scaled.scale ? check_scale(solver, call, scaled) : "";
    if (!error.empty()) {
      return error;
    }
  }
  return {};
}

}  // namespace

std::string check_maxima(Solver const& solver, AttentionCall const& call) {
  // flash_attn3/ops/fp8.py says so in the same words.
  return solver.is_fp8() && solver.on_cuda() && call.execution.return_max_logits
             ? solver.refuse(
                   "return_max_logits to be False with float8_e4m3fn on a GPU", "True",
                   "the FP8 kernels do not compute maximum logits; use bfloat16 or float16")
             : "";
}

// Sums of e4m3 are not folded.
std::string check_parts(Solver const& solver, AttentionCall const& call) {
  return solver.is_fp8() && call.execution.split_size != 0
             ? solver.refuse("split_size of 0 with float8_e4m3fn", text(call.execution.split_size))
             : "";
}

std::string check_scaled_attention(Solver& solver, AttentionCall const& call) {
  return first_error<check_attention, check_scales, check_maxima, check_parts>(solver, call);
}

std::string check_fp8(AttentionCall const& call) {
  Solver solver = solver_of(call.op(), call, true);
  return check_scaled_attention(solver, call);
}

}  // namespace fa3
