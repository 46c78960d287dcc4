#include "dispatch/checks_combine.h"

#include <algorithm>

#include "dispatch/checks.h"
#include "dispatch/given_tensor.h"

namespace fa3 {
namespace {

constexpr int64_t kMost = int64_t(1) << 30;

std::string refuse(std::string const& expected, std::string const& got,
                   std::string const& hint = "") {
  return error_text("combine", expected, got, hint);
}

std::string check_partial(CombineCall const& call) {
  TensorMeta const& partial = call.out_partial;
  if (partial.rank != 5) {
    return refuse("out_partial of the shape (parts, batch, seqlen, heads, head_dim)",
                  text(partial.rank, " dimensions"));
  }
  if (partial.dtype != Dtype::kFloat32) {
    return refuse("out_partial.dtype to be float32", partial.dtype_name);
  }
  return {};
}

// A tensor with the sizes of out_partial from the dimension `first` up to `end`.
std::string check_like_partial(CombineCall const& call, NamedTensor const& tensor, int first,
                               int end) {
  auto const& [name, meta] = tensor;
  int64_t const* const sizes = call.out_partial.size;
  if (meta.rank != end - first || !std::equal(sizes + first, sizes + end, meta.size)) {
    return refuse(text(name, " to have the shape ", shape_text(sizes + first, end - first)),
                  shape_text(meta.size, std::min(meta.rank, 5)));
  }
  if (!same_device(meta, call.out_partial)) {
    return refuse(text(name, " on the device of out_partial, ", device_text(call.out_partial)),
                  device_text(meta));
  }
  return {};
}

std::string check_lse(CombineCall const& call) {
  TensorMeta const& lse = call.lse_partial;
  std::string const error = check_like_partial(call, {"lse_partial", lse}, 0, 4);
  if (error.empty() && lse.dtype != Dtype::kFloat32) {
    return refuse("lse_partial.dtype to be float32", lse.dtype_name);
  }
  return error;
}

std::string check_out(CombineCall const& call) {
  TensorMeta const& out = call.out;
  std::string const error = check_like_partial(call, {"out", out}, 1, 5);
  if (!error.empty()) {
    return error;
  }
  bool const is_known =
      out.dtype == Dtype::kFloat32 || out.dtype == Dtype::kFloat16 || out.dtype == Dtype::kBFloat16;
  if (!is_known) {
    return refuse("out.dtype to be float32, float16 or bfloat16", out.dtype_name);
  }
  NamedTensor const others[] = {{"out_partial", call.out_partial},
                                {"lse_partial", call.lse_partial}};
  for (int i = 0; i < 4; ++i) {
    if (out.size[i] > 1 && out.stride[i] == 0) {
      return refuse("out with memory for every element", text("out.stride(", i, ") of 0"),
                    "do not pass an expanded tensor");
    }
  }
  for (auto const& [name, meta] : others) {
    if (out.address != 0 && out.address == meta.address && !is_empty(meta)) {
      return refuse("out with memory of its own", text("the memory of ", name));
    }
  }
  return {};
}

std::string check_sizes(CombineCall const& call) {
  int64_t const* const size = call.out_partial.size;
  double const values = double(size[1]) * double(size[2]) * double(size[3]) *
                        double(std::max<int64_t>(1, size[4] / 64));
  if (values > double(kMost) || size[0] > kMost || size[4] > kMost) {
    return refuse(text("at most ", kMost, " parts, and rows of 64 columns"), shape_text(size, 5),
                  "split the batch");
  }
  return {};
}

using Check = std::string (*)(CombineCall const&);

// In this order: each one may rely on those before it.
constexpr Check kChecks[] = {check_partial, check_lse, check_out, check_sizes};

}  // namespace

std::string check_combine(CombineCall const& call) { return first_error(kChecks, call); }

}  // namespace fa3
