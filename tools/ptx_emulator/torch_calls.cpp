// Replaces what the ops ask of PyTorch about CUDA: CPU tensors pass for those of a GPU, and the
// memory that a kernel may read and write is noted. build.py renames the ops' calls to these.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include "memory.h"

namespace {

void note(AtenTensorHandle tensor, void const* data, emulator::Access access) {
  int64_t bytes = 0;
  int64_t offset = 0;
  int32_t dtype = 0;
  aoti_torch_get_storage_size(tensor, &bytes);
  aoti_torch_get_storage_offset(tensor, &offset);
  aoti_torch_get_dtype(tensor, &dtype);
  int64_t const before = offset * int64_t(aoti_torch_dtype_element_size(dtype));
  if (data != nullptr) {
    emulator::add_memory(reinterpret_cast<uint64_t>(data) - uint64_t(before), uint64_t(bytes),
                         access);
  }
}

}  // namespace

extern "C" {

AOTITorchError emulator_get_device_type(AtenTensorHandle, int32_t* type) {
  *type = aoti_torch_device_type_cuda();
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError emulator_get_device_index(AtenTensorHandle, int32_t* index) {
  *index = 0;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError emulator_get_current_device_index(int32_t* index) {
  *index = 0;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError emulator_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError emulator_create_device_guard(int32_t, DeviceGuardHandle* guard) {
  *guard = nullptr;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError emulator_delete_device_guard(DeviceGuardHandle) { return AOTI_TORCH_SUCCESS; }

AOTITorchError emulator_get_data_ptr(AtenTensorHandle tensor, void** data) {
  AOTITorchError const error = aoti_torch_get_data_ptr(tensor, data);
  note(tensor, *data, emulator::Access::kWrite);
  return error;
}

AOTITorchError emulator_get_const_data_ptr(AtenTensorHandle tensor, void const** data) {
  AOTITorchError const error = torch_get_const_data_ptr(tensor, data);
  note(tensor, *data, emulator::Access::kRead);
  return error;
}

// On the CPU, every byte 0xff: NaN where nothing is written.
AOTITorchError emulator_empty_strided(int64_t rank, int64_t const* sizes, int64_t const* strides,
                                      int32_t dtype, int32_t, int32_t, AtenTensorHandle* tensor) {
  AOTITorchError const error = aoti_torch_empty_strided(rank, sizes, strides, dtype,
                                                        aoti_torch_device_type_cpu(), -1, tensor);
  int64_t bytes = 0;
  void* data = nullptr;
  if (error == AOTI_TORCH_SUCCESS && aoti_torch_get_data_ptr(*tensor, &data) == error &&
      aoti_torch_get_storage_size(*tensor, &bytes) == error && data != nullptr) {
    memset(data, 0xff, size_t(bytes));
    emulator::add_unwritten(reinterpret_cast<uint64_t>(data), uint64_t(bytes));
  }
  return error;
}

}  // extern "C"
