#include "checks/checks_combine.h"

#include <algorithm>
#include <cstring>

#include "checks/checks.h"
#include "call/given_tensor.h"

namespace fa3 {
namespace {

constexpr int64_t kMost = int64_t(1) << 30;

std::string refuse(std::string const& expected, std::string const& got,
                   std::string const& hint = "") {
  return error_text("combine", expected, got, hint);
}

bool is_16_bit(Dtype dtype) { return dtype == Dtype::kFloat16 || dtype == Dtype::kBFloat16; }

bool is_known(Dtype dtype) { return dtype == Dtype::kFloat32 || is_16_bit(dtype); }

std::string check_partial(CombineCall const& call) {
  TensorMeta const& partial = call.out_partial;
  if (partial.rank != 5) {
    return refuse("out_partial of the shape (parts, batch, seqlen, heads, head_dim)",
                  text(partial.rank, " dimensions"));
  }
  if (!is_known(partial.dtype)) {
    return refuse("out_partial.dtype to be float32, float16 or bfloat16", partial.dtype_name);
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
  if (!is_known(out.dtype)) {
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

std::string check_most(char const* op, int64_t const (&size)[5]) {
  double const values = double(size[1]) * double(size[2]) * double(size[3]) *
                        double(std::max<int64_t>(1, size[4] / 64));
  if (values > double(kMost) || size[0] > kMost || size[4] > kMost) {
    return error_text(op, text("at most ", kMost, " parts, and rows of 64 columns"),
                      shape_text(size, 5), "split the batch");
  }
  return {};
}

std::string check_sizes(CombineCall const& call) {
  return check_most("combine", call.out_partial.size);
}

// ------------------------------------------------------------------------------------ merge_parts
std::string refuse_merge(std::string const& expected, std::string const& got,
                         std::string const& hint = "") {
  return error_text("merge_parts", expected, got, hint);
}

int64_t rows_of(TensorMeta const& meta) {
  return meta.rank == 3 ? meta.size[0] : meta.size[0] * meta.size[1];
}

// Whether all rows are one batch entry, or there is no batch.
bool is_packed(TensorMeta const& meta) { return meta.rank == 3 || meta.size[0] == 1; }

std::string check_merged(MergeCall const& call) {
  TensorMeta const& out = call.out;
  if (out.rank != 3 && out.rank != 4) {
    return refuse_merge("out of the shape ([batch,] rows, heads, head_dim)",
                        text(out.rank, " dimensions"));
  }
  if (out.device == DeviceType::kCuda && !is_16_bit(out.dtype)) {
    return refuse_merge("out.dtype to be float16 or bfloat16", out.dtype_name);
  }
  for (int i = 0; i < out.rank; ++i) {
    if (out.size[i] > 1 && out.stride[i] == 0) {
      return refuse_merge("out with memory for every element", text("out.stride(", i, ") of 0"),
                          "do not pass an expanded tensor");
    }
  }
  return {};
}

std::string check_part(MergeCall const& call, int index) {
  std::string const name = text("out_", index);
  TensorMeta const& part = *call.part[index];
  TensorMeta const& out = call.out;
  bool const has_rank = part.rank == 3 || (part.rank == 4 && out.rank == 4);
  bool const is_like =
      has_rank && (is_packed(part) || part.size[0] == out.size[0]) &&
      rows_of(part) == rows_of(out) &&
      std::equal(part.size + part.rank - 2, part.size + part.rank, out.size + out.rank - 2);
  if (!is_like) {
    return refuse_merge(text(name, " to have the shape of out, ", shape_text(out.size, out.rank),
                             out.rank == 4 ? ", or all rows in one batch entry, or without" : ""),
                        shape_text(part.size, std::min(part.rank, 5)));
  }
  if (std::strcmp(part.dtype_name, out.dtype_name) != 0) {
    return refuse_merge(text(name, ".dtype to be that of out, ", out.dtype_name), part.dtype_name);
  }
  if (!same_device(part, out)) {
    return refuse_merge(text(name, " on the device of out, ", device_text(out)), device_text(part));
  }
  if (out.address != 0 && out.address == part.address && !is_empty(part)) {
    return refuse_merge("out with memory of its own", text("the memory of ", name));
  }
  return {};
}

std::string check_part_lse(MergeCall const& call, int index) {
  std::string const name = text("lse_", index);
  if (!call.lse[index]) {
    return refuse_merge(text(name, " with out_", index), "None");
  }
  TensorMeta const& lse = *call.lse[index];
  TensorMeta const& part = *call.part[index];
  int const rank = part.rank - 1;
  int64_t const packed[] = {part.size[1], part.size[0]};
  int64_t const dense[] = {part.size[0], part.size[2], part.size[1]};
  int64_t const* const wanted = rank == 2 ? packed : dense;
  if (lse.rank != rank || !std::equal(wanted, wanted + rank, lse.size)) {
    return refuse_merge(text(name, " to have the shape ", shape_text(wanted, rank)),
                        shape_text(lse.size, std::min(lse.rank, 5)));
  }
  bool const is_wide = lse.dtype == Dtype::kFloat32 ||
                       (lse.dtype == Dtype::kFloat64 && lse.device == DeviceType::kCpu);
  if (!is_wide) {
    return refuse_merge(text(name, ".dtype to be float32"), lse.dtype_name);
  }
  if (!same_device(lse, call.out)) {
    return refuse_merge(text(name, " on the device of out, ", device_text(call.out)),
                        device_text(lse));
  }
  return {};
}

std::string check_parts(MergeCall const& call) {
  for (int i = 0; i < call.parts(); ++i) {
    std::string error = check_part(call, i);
    error = error.empty() ? check_part_lse(call, i) : error;
    if (!error.empty()) {
      return error;
    }
  }
  for (int i = call.parts(); i < MergeCall::kMost; ++i) {
    if (call.part[i] || call.lse[i]) {
      return refuse_merge(text("out_", call.parts(), " before further parts"), "None");
    }
  }
  return {};
}

std::string check_merged_sizes(MergeCall const& call) {
  TensorMeta const& out = call.out;
  return check_most("merge_parts", {call.parts(), 1, rows_of(out), out.size[out.rank - 2],
                                    out.size[out.rank - 1]});
}

using Check = std::string (*)(CombineCall const&);

// In this order: each one may rely on those before it.
constexpr Check kChecks[] = {check_partial, check_lse, check_out, check_sizes};

}  // namespace

std::string check_combine(CombineCall const& call) { return first_error(kChecks, call); }

int MergeCall::parts() const {
  int count = 2;
  while (count < kMost && part[count]) {
    ++count;
  }
  return count;
}

std::string check_merge(MergeCall const& call) {
  using CheckMerge = std::string (*)(MergeCall const&);
  constexpr CheckMerge kMergeChecks[] = {check_merged, check_parts, check_merged_sizes};
  return first_error(kMergeChecks, call);
}

TensorMeta rows_like(TensorMeta const& part, TensorMeta const& out) {
  TensorMeta like = part;
  int64_t const* const inner = part.stride + part.rank - 3;  // row, head, column
  std::copy_n(inner, 3, like.stride + 1);
  like.stride[0] = is_packed(part) ? inner[0] * out.size[1] : part.stride[0];
  std::copy_n(out.size, 4, like.size);
  like.rank = 4;
  return like;
}

TensorMeta lse_like(TensorMeta const& lse, TensorMeta const& out) {
  TensorMeta like = lse;
  int64_t const head = lse.stride[lse.rank - 2];
  int64_t const row = lse.stride[lse.rank - 1];
  bool const has_one_entry = lse.rank == 2 || lse.size[0] == 1;
  like.stride[0] = has_one_entry ? row * out.size[1] : lse.stride[0];
  like.stride[1] = row;
  like.stride[2] = head;
  std::copy_n(out.size, 3, like.size);
  like.rank = 3;
  return like;
}

}  // namespace fa3
