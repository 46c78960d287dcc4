#include "dispatch/checks_backward.h"

#include <algorithm>

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

std::string check_tensor(Expected const& expected, TensorMeta const& q) {
  TensorMeta const& meta = expected.meta;
  bool const shapes_match =
      meta.rank == expected.rank && std::equal(meta.size, meta.size + meta.rank, expected.size);
  if (!shapes_match) {
    return error_text(
        "bwd", text(expected.name, " to have the shape ", shape_text(expected.size, expected.rank)),
        shape_text(meta.size, std::min(meta.rank, 5)));
  }
  if (meta.dtype != expected.dtype) {
    return error_text("bwd", text(expected.name, ".dtype to be ", expected.dtype_name),
                      meta.dtype_name);
  }
  if (!same_device(meta, q)) {
    return error_text("bwd", text(expected.name, " on the device of q, ", device_text(q)),
                      device_text(meta));
  }
  return {};
}

std::string check_gradients(BackwardCall const& call) {
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
    std::string const error = is_there ? check_tensor(expected, q) : "";
    if (!error.empty()) {
      return error;
    }
  }
  return {};
}

std::string check_tiles(TensorMeta const& k) {
  double const tiles = double(k.size[0]) * double(k.size[2]) * double((k.size[1] + 63) / 64);
  if (tiles > kMaxTiles) {
    return error_text(
        "bwd", text("batch * heads * ceil(seqlen / 64) of k to be at most ", int64_t(kMaxTiles)),
        text(int64_t(tiles)), "split the batch");
  }
  return {};
}

}  // namespace

std::string check_backward(BackwardCall const& call) {
  std::string error = check_forward(call.forward);
  if (error.empty()) {
    error = check_gradients(call);
  }
  if (error.empty() && call.forward.q.device == DeviceType::kCuda) {
    error = check_tiles(call.forward.k);
  }
  return error;
}

}  // namespace fa3
