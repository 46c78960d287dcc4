#include "ops/tensor_handle.h"

#include <array>
#include <mutex>
#include <stdexcept>

#include "call/text.h"

namespace fa3 {
namespace {

struct DtypeName {
  Dtype dtype = Dtype::kOther;
  char const* name = "an unknown dtype";
};

constexpr int kMaxDtypeCodes = 64;

// By PyTorch's code of the dtype. The codes are asked for, not written down: they are not part of
// the stable interface.
std::array<DtypeName, kMaxDtypeCodes> make_dtype_table() {
  struct Row {
    int32_t code;
    DtypeName name;
  };
  Row const rows[] = {{aoti_torch_dtype_float16(), {Dtype::kFloat16, "float16"}},
                      {aoti_torch_dtype_bfloat16(), {Dtype::kBFloat16, "bfloat16"}},
                      {aoti_torch_dtype_float32(), {Dtype::kFloat32, "float32"}},
                      {aoti_torch_dtype_float64(), {Dtype::kFloat64, "float64"}},
                      {aoti_torch_dtype_float8_e4m3fn(), {Dtype::kFloat8E4M3, "float8_e4m3fn"}},
                      {aoti_torch_dtype_float8_e5m2(), {Dtype::kOther, "float8_e5m2"}},
                      {aoti_torch_dtype_uint8(), {Dtype::kOther, "uint8"}},
                      {aoti_torch_dtype_int8(), {Dtype::kOther, "int8"}},
                      {aoti_torch_dtype_int16(), {Dtype::kOther, "int16"}},
                      {aoti_torch_dtype_int32(), {Dtype::kOther, "int32"}},
                      {aoti_torch_dtype_int64(), {Dtype::kOther, "int64"}},
                      {aoti_torch_dtype_bool(), {Dtype::kOther, "bool"}},
                      {aoti_torch_dtype_complex64(), {Dtype::kOther, "complex64"}},
                      {aoti_torch_dtype_complex128(), {Dtype::kOther, "complex128"}}};
  std::array<DtypeName, kMaxDtypeCodes> table;
  for (Row const& row : rows) {
    if (row.code >= 0 && row.code < kMaxDtypeCodes) {
      table[row.code] = row.name;
    }
  }
  return table;
}

DtypeName dtype_of(int32_t code) {
  static std::array<DtypeName, kMaxDtypeCodes> const table = make_dtype_table();
  return code >= 0 && code < kMaxDtypeCodes ? table[code] : DtypeName{};
}

int32_t dtype_code(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat16:
      return aoti_torch_dtype_float16();
    case Dtype::kBFloat16:
      return aoti_torch_dtype_bfloat16();
    case Dtype::kFloat8E4M3:
      return aoti_torch_dtype_float8_e4m3fn();
    case Dtype::kOther:
      return aoti_torch_dtype_int32();
    default:
      return aoti_torch_dtype_float32();
  }
}

void set_device(TensorMeta& meta, int32_t type) {
  static int32_t const cuda = aoti_torch_device_type_cuda();
  static int32_t const cpu = aoti_torch_device_type_cpu();
  if (type == cuda) {
    meta.device = DeviceType::kCuda;
    meta.device_name = "cuda";
  } else {
    meta.device = type == cpu ? DeviceType::kCpu : DeviceType::kOther;
    meta.device_name = type == cpu ? "cpu" : "another device";
  }
}

}  // namespace

void require(AOTITorchError error, char const* what) {
  if (error != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error(
        text("flash_attn3: PyTorch could not ", what, "; hint: its own message is on stderr"));
  }
}

TensorMeta describe(OwnedTensor const& tensor) {
  TensorMeta meta;
  int64_t rank = 0;
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  int32_t dtype = 0;
  int32_t device_type = 0;
  int32_t device_index = 0;
  void const* data = nullptr;
  AtenTensorHandle const handle = tensor.get();
  require(aoti_torch_get_dim(handle, &rank), "read a tensor's rank");
  require(aoti_torch_get_sizes(handle, &sizes), "read a tensor's sizes");
  require(aoti_torch_get_strides(handle, &strides), "read a tensor's strides");
  require(aoti_torch_get_dtype(handle, &dtype), "read a tensor's dtype");
  require(aoti_torch_get_device_type(handle, &device_type), "read a tensor's device");
  require(aoti_torch_get_device_index(handle, &device_index), "read a tensor's device index");
  require(torch_get_const_data_ptr(handle, &data), "read a tensor's address");
  DtypeName const named = dtype_of(dtype);
  meta.dtype = named.dtype;
  meta.dtype_name = named.name;
  set_device(meta, device_type);
  meta.device_index = device_index;
  meta.rank = int(rank);
  for (int i = 0; i < meta.rank && i < 5; ++i) {
    meta.size[i] = sizes[i];
    meta.stride[i] = strides[i];
  }
  meta.address = reinterpret_cast<int64_t>(data);
  return meta;
}

OwnedTensor allocate(char const* op, int64_t const* sizes, int rank, Dtype dtype, int device) {
  int64_t strides[5];
  int64_t elements = 1;
  for (int i = rank - 1; i >= 0; --i) {
    strides[i] = elements;
    elements *= sizes[i] > 1 ? sizes[i] : 1;
  }
  int32_t const code = dtype_code(dtype);
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(rank, sizes, strides, code, aoti_torch_device_type_cuda(), device,
                               &handle) != AOTI_TORCH_SUCCESS) {
    int64_t const bytes = elements * int64_t(aoti_torch_dtype_element_size(code));
    throw std::runtime_error(error_text(op, text("room for ", bytes, " bytes on cuda:", device),
                                        "CUDA out of memory. PyTorch's own message is on stderr"));
  }
  return OwnedTensor(handle);
}

OwnedTensor empty_result(EmptyResult result, Dtype dtype, int device, bool is_shared) {
  constexpr int kDtypes = int(Dtype::kOther) + 1;
  constexpr int kDevices = 64;
  auto const make = [&] {
    int64_t const nothing[] = {0};
    return allocate("empty result", nothing, 1, dtype, device);
  };
  if (!is_shared || device < 0 || device >= kDevices) {
    return make();
  }
  // WHY never deleted: PyTorch may be gone when the process ends.
  static AtenTensorHandle shared[kDevices][int(EmptyResult::kCount)][kDtypes] = {};
  static std::mutex mutex;
  std::lock_guard const lock(mutex);
  AtenTensorHandle& tensor = shared[device][int(result)][int(dtype)];
  tensor = tensor != nullptr ? tensor : make().release();
  AtenTensorHandle handle = nullptr;
  require(aoti_torch_new_tensor_handle(tensor, &handle), "share an empty tensor");
  return OwnedTensor(handle);
}

OwnedTensor packed_copy(char const* op, OwnedTensor const& source, TensorMeta const& meta) {
  OwnedTensor copy = allocate_like(op, meta);
  require(aoti_torch_copy_(copy.get(), source.get(), /*non_blocking=*/0), "copy a tensor");
  return copy;
}

void* mutable_data(OwnedTensor const& tensor) {
  void* data = nullptr;
  require(aoti_torch_get_data_ptr(tensor.get(), &data), "read a tensor's address");
  return data;
}

}  // namespace fa3
