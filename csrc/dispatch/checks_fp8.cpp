#include "dispatch/checks_fp8.h"

#include <algorithm>

#include "dispatch/tensor_text.h"

namespace fa3 {
namespace {

constexpr int kMaxColumns = 256;
// Head dims: the copy engine takes strides of 16 bytes, and the products have steps of 16.
constexpr int kColumnStep = 16;

std::string refuse(Fp8Call const& call, std::string const& expected, std::string const& got,
                   std::string const& hint = "") {
  return error_text(op_of(call.general.forward), expected, got, hint);
}

struct Input {
  char const* name;
  TensorMeta const& meta;
};

std::string check_dtypes(Fp8Call const& call) {
  ForwardCall const& forward = call.general.forward;
  for (auto [name, meta] : {Input{"q", forward.q}, Input{"k", forward.k}, Input{"v", forward.v}}) {
    if (meta.dtype != Dtype::kFloat8E4M3) {
      bool const is_q = name[0] == 'q';
      return refuse(call, text(name, ".dtype to be ", is_q ? "" : "that of q, ", "float8_e4m3fn"),
                    meta.dtype_name);
    }
  }
  return {};
}

bool on_cuda(Fp8Call const& call) { return call.general.forward.q.device == DeviceType::kCuda; }

// The check after this one reports wrong ranks.
std::string check_head_dims(Fp8Call const& call) {
  ForwardCall const& forward = call.general.forward;
  int const rank = call.general.is_packed ? 3 : 4;
  for (auto [name, meta] : {Input{"q", forward.q}, Input{"v", forward.v}}) {
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
std::string check_as_wide(Fp8Call const& call) {
  GeneralCall general = call.general;
  ForwardCall& forward = general.forward;
  for (TensorMeta* meta : {&forward.q, &forward.k, &forward.v}) {
    meta->dtype = call.out_dtype;
    meta->dtype_name = call.out_dtype_name;
  }
  return check_general(general);
}

// Shape of scales by blocks of so many rows of x.
void set_block_shape(Fp8Call const& call, TensorMeta const& x, int rows_of_block,
                     int64_t (&shape)[3]) {
  int64_t const rows = x.size[x.rank - 3];
  bool const is_packed = call.general.is_packed;
  shape[0] = is_packed ? 1 : x.size[0];
  shape[1] = x.size[x.rank - 2];
  shape[2] = is_packed ? rows / rows_of_block + call.general.cu_seqlens_q.size[0] - 1
                       : (rows + rows_of_block - 1) / rows_of_block;
}

std::string check_scale(Fp8Call const& call, Input const& x, TensorMeta const& scale,
                        int rows_of_block) {
  TensorMeta const& q = call.general.forward.q;
  TensorMeta const& k = call.general.forward.k;
  std::string const name = text(x.name, "_descale");
  if (scale.dtype != Dtype::kFloat32) {
    return refuse(call, text(name, ".dtype to be float32"), scale.dtype_name);
  }
  if (!same_device(scale, q)) {
    return refuse(call, text(name, " on the device of q, ", device_text(q)), device_text(scale));
  }
  int64_t const batch = call.general.is_packed ? call.general.cu_seqlens_q.size[0] - 1 : q.size[0];
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

std::string check_scales(Fp8Call const& call) {
  ForwardCall const& forward = call.general.forward;
  Input const inputs[] = {{"q", forward.q}, {"k", forward.k}, {"v", forward.v}};
  for (int i = 0; i < 3; ++i) {
    int const rows_of_block = i == 0 ? kScaleBlockQueries : kScaleBlockKeys;
    std::string const error =
        call.has_scale[i] ? check_scale(call, inputs[i], call.scales[i], rows_of_block) : "";
    if (!error.empty()) {
      return error;
    }
  }
  return {};
}

// What the CPU path has and the kernels have not; flash_attn3/fp8.py says it in the same words.
std::string check_missing(Fp8Call const& call) {
  if (on_cuda(call) && call.wants_max_logits) {
    return refuse(call, "return_max_logits to be False with float8_e4m3fn on a GPU", "True",
                  "this version has nothing else");
  }
  return {};
}

using Check = std::string (*)(Fp8Call const&);

// In this order: each one may rely on those before it.
constexpr Check kChecks[] = {check_dtypes, check_head_dims, check_as_wide, check_scales,
                             check_missing};

}  // namespace

std::string check_fp8(Fp8Call const& call) { return first_error(kChecks, call); }

}  // namespace fa3
