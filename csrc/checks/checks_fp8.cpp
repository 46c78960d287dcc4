#include "checks/checks_fp8.h"

#include <algorithm>

#include "checks/checks_general.h"

namespace fa3 {
namespace {

constexpr int kMaxColumns = 256;
// Head dims: the copy engine takes strides of 16 bytes, and the products have steps of 16.
constexpr int kColumnStep = 16;

std::string refuse(AttentionCall const& call, std::string const& expected, std::string const& got,
                   std::string const& hint = "") {
  return error_text(call.op(), expected, got, hint);
}

std::string check_dtypes(AttentionCall const& call) {
  for (auto [name, meta] : {NamedTensor{"q", call.q}, NamedTensor{call.k_name(), call.k},
                            NamedTensor{call.v_name(), call.v}}) {
    if (meta.dtype != Dtype::kFloat8E4M3) {
      bool const is_q = name[0] == 'q';
      return refuse(call, text(name, ".dtype to be ", is_q ? "" : "that of q, ", "float8_e4m3fn"),
                    meta.dtype_name);
    }
  }
  return {};
}

bool on_cuda(AttentionCall const& call) { return call.q.device == DeviceType::kCuda; }

// The check after this one reports wrong ranks.
std::string check_head_dims(AttentionCall const& call) {
  int const rank = call.is_packed() ? 3 : 4;
  for (auto [name, meta] : {NamedTensor{"q", call.q}, NamedTensor{call.v_name(), call.v}}) {
    int64_t const head_dim = meta.size[rank - 1];
    if (!on_cuda(call) || meta.rank != rank) {
      continue;
    }
    if (head_dim < kColumnStep || head_dim > kMaxColumns || head_dim % kColumnStep != 0) {
      return refuse(
          call,
          text(name, ".size(", rank - 1, "), the head_dim", name[0] == 'v' ? " of the values" : "",
               ", to be a multiple of ", kColumnStep, " from ", kColumnStep, " to ", kMaxColumns,
               " with float8_e4m3fn"),
          text(head_dim),
          head_dim > 0 && head_dim < kMaxColumns
              ? "pad q, k and v with zeros, and pass softmax_scale"
              : "");
    }
  }
  return {};
}

// All that does not depend on the dtype, by the rules of that of the output.
std::string check_as_wide(AttentionCall const& call) {
  AttentionCall wide = call;
  for (TensorMeta* meta : {&wide.q, &wide.k, &wide.v}) {
    meta->dtype = fp8_out_dtype(call);
    meta->dtype_name = meta->dtype == Dtype::kFloat16 ? "float16" : "bfloat16";
  }
  return check_forward(wide);
}

// Shape of scales by blocks of so many rows of x.
void set_block_shape(AttentionCall const& call, TensorMeta const& x, int rows_of_block,
                     int64_t (&shape)[3]) {
  int64_t const rows = x.size[x.rank - 3];
  bool const is_packed = call.is_packed();
  shape[0] = is_packed ? 1 : x.size[0];
  shape[1] = x.size[x.rank - 2];
  shape[2] = is_packed ? rows / rows_of_block + call.lengths.cu_seqlens_q->size[0] - 1
                       : (rows + rows_of_block - 1) / rows_of_block;
}

std::string check_scale(AttentionCall const& call, NamedTensor const& x, TensorMeta const& scale,
                        int rows_of_block) {
  TensorMeta const& q = call.q;
  TensorMeta const& k = call.k;
  std::string const name = text(x.name, "_descale");
  if (scale.dtype != Dtype::kFloat32) {
    return refuse(call, text(name, ".dtype to be float32"), scale.dtype_name);
  }
  if (!same_device(scale, q)) {
    return refuse(call, text(name, " on the device of q, ", device_text(q)), device_text(scale));
  }
  int64_t const batch = call.is_packed() ? call.lengths.cu_seqlens_q->size[0] - 1 : q.size[0];
  int64_t const by_head[] = {batch, k.size[k.rank - 2]};
  int64_t by_block[3];
  set_block_shape(call, x.meta, rows_of_block, by_block);
  bool const fits = (scale.rank == 2 && std::equal(by_head, by_head + 2, scale.size)) ||
                    (scale.rank == 3 && std::equal(by_block, by_block + 3, scale.size));
  return fits ? ""
              : refuse(call,
                       text(name, " to have the shape ", shape_text(by_head, 2), ", or ",
                            shape_text(by_block, 3), " for blocks of ", rows_of_block, " rows"),
                       shape_text(scale.size, std::min(scale.rank, 5)));
}

std::string check_scales(AttentionCall const& call) {
  struct Scaled {
    NamedTensor tensor;
    std::optional<TensorMeta> const& scale;
  };
  Scaled const all[] = {{{"q", call.q}, call.scales.q_descale},
                        {{"k", call.k}, call.scales.k_descale},
                        {{"v", call.v}, call.scales.v_descale}};
  for (auto const& [tensor, scale] : all) {
    int const rows_of_block = &tensor.meta == &call.q ? kScaleBlockQueries : kScaleBlockKeys;
    std::string const error = scale ? check_scale(call, tensor, *scale, rows_of_block) : "";
    if (!error.empty()) {
      return error;
    }
  }
  return {};
}

// What the CPU path has and the kernels have not; flash_attn3/ops/fp8.py says it in the same words.
std::string check_missing(AttentionCall const& call) {
  if (on_cuda(call) && call.execution.return_max_logits) {
    return refuse(call, "return_max_logits to be False with float8_e4m3fn on a GPU", "True",
                  "this version has nothing else");
  }
  return {};
}

using Check = std::string (*)(AttentionCall const&);

// In this order: each one may rely on those before it.
constexpr Check kChecks[] = {check_dtypes, check_head_dims, check_as_wide, check_scales,
                             check_missing};

}  // namespace

Dtype fp8_out_dtype(AttentionCall const& call) {
  bool const is_half = call.out ? call.out->dtype == Dtype::kFloat16 : call.fp8.float16_out;
  return is_half ? Dtype::kFloat16 : Dtype::kBFloat16;
}

std::string check_fp8(AttentionCall const& call) { return first_error(kChecks, call); }

}  // namespace fa3
