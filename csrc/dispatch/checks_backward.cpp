#include "dispatch/checks_backward.h"

#include <algorithm>
#include <array>

#include "dispatch/given_tensor.h"
#include "dispatch/tensor_text.h"

namespace fa3 {
namespace {

// Of 64 keys, as check_forward() counts those of queries.
constexpr double kMaxTiles = double(1 << 29);

struct Expected {
  char const* name;
  TensorMeta const& meta;
  int rank;
  int64_t size[4];
  Dtype dtype;
  char const* dtype_name;
};

std::string check_tensor(ForwardCall const& forward, Expected const& expected) {
  TensorMeta const& meta = expected.meta;
  TensorMeta const& q = forward.q;
  bool const shapes_match =
      meta.rank == expected.rank && std::equal(meta.size, meta.size + meta.rank, expected.size);
  if (!shapes_match) {
    return error_text(
        forward.op,
        text(expected.name, " to have the shape ", shape_text(expected.size, expected.rank)),
        shape_text(meta.size, std::min(meta.rank, 5)));
  }
  if (meta.dtype != expected.dtype) {
    return error_text(forward.op, text(expected.name, ".dtype to be ", expected.dtype_name),
                      meta.dtype_name);
  }
  if (!same_device(meta, q)) {
    return error_text(forward.op, text(expected.name, " on the device of q, ", device_text(q)),
                      device_text(meta));
  }
  return {};
}

// What the forward gave, and the gradients of it.
std::string check_outputs(BackwardCall const& call) {
  TensorMeta const& q = call.forward.q;
  int64_t const head_dim_v = call.forward.v.size[3];
  bool const is_wide = q.dtype == Dtype::kFloat64;
  Dtype const lse_dtype = is_wide ? Dtype::kFloat64 : Dtype::kFloat32;
  char const* const lse_name = is_wide ? "float64" : "float32";
  Expected const all[] = {
      {"dout", call.dout, 4, {q.size[0], q.size[1], q.size[2], head_dim_v}, q.dtype, q.dtype_name},
      {"out", call.out, 4, {q.size[0], q.size[1], q.size[2], head_dim_v}, q.dtype, q.dtype_name},
      {"lse", call.lse, 3, {q.size[0], q.size[2], q.size[1], 0}, lse_dtype, lse_name},
      {"dlse", call.dlse, 3, {q.size[0], q.size[2], q.size[1], 0}, lse_dtype, lse_name}};
  for (Expected const& expected : all) {
    bool const is_there = &expected.meta != &call.dlse || call.has_dlse;
    std::string const error = is_there ? check_tensor(call.forward, expected) : "";
    if (!error.empty()) {
      return error;
    }
  }
  return {};
}

// The tensors that the op writes into.
std::string check_gradients(BackwardCall const& call) {
  ForwardCall const& forward = call.forward;
  std::array<NamedTensor, 10> const all = {{{"dq", call.dq},
                                            {"dk", call.dk},
                                            {"dv", call.dv},
                                            {"q", forward.q},
                                            {"k", forward.k},
                                            {"v", forward.v},
                                            {"dout", call.dout},
                                            {"out", call.out},
                                            {"lse", call.lse},
                                            {"dlse", call.dlse}}};
  std::span const inputs = std::span(all).subspan(3);
  for (int i = 0; i < 3; ++i) {
    auto const& [name, gradient] = all[i];
    TensorMeta const& like = inputs[i].meta;
    Expected const expected{name,
                            gradient,
                            4,
                            {like.size[0], like.size[1], like.size[2], like.size[3]},
                            forward.q.dtype,
                            forward.q.dtype_name};
    std::string error = check_tensor(forward, expected);
    if (error.empty()) {
      error = check_given_memory(forward.op, all[i], std::span(all).subspan(i + 1));
    }
    if (!error.empty()) {
      return error;
    }
  }
  return {};
}

std::string check_tiles(ForwardCall const& forward) {
  TensorMeta const& k = forward.k;
  double const tiles = double(k.size[0]) * double(k.size[2]) * double((k.size[1] + 63) / 64);
  if (tiles > kMaxTiles) {
    return error_text(
        forward.op,
        text("batch * heads * ceil(seqlen / 64) of k to be at most ", int64_t(kMaxTiles)),
        text(int64_t(tiles)), "split the batch");
  }
  return {};
}

}  // namespace

std::string check_backward(BackwardCall const& call) {
  std::string error = check_forward(call.forward);
  if (error.empty()) {
    error = check_outputs(call);
  }
  if (error.empty() && call.forward.q.device == DeviceType::kCuda) {
    error = check_tiles(call.forward);
  }
  if (error.empty() && call.has_gradients) {
    error = check_gradients(call);
  }
  return error;
}

}  // namespace fa3
