// Reads a call from the keyword arguments of a Python function: one reader for every field of an
// AttentionCall. Limited C API.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstring>

#include "call/attention_call.h"
#include "call/tensor_text.h"

namespace fa3::python {

inline Dtype dtype_from_name(char const* name) {
  int dtype = 0;
  while (dtype < int(Dtype::kOther) && std::strcmp(name, kDtypeNames[dtype]) != 0) {
    ++dtype;
  }
  return Dtype(dtype);
}

inline DeviceType device_from_name(char const* name) {
  if (std::strcmp(name, "cuda") == 0) {
    return DeviceType::kCuda;
  }
  return std::strcmp(name, "cpu") == 0 ? DeviceType::kCpu : DeviceType::kOther;
}

// Up to five integers of a tuple; the number there really are, or -1 with a Python error set.
inline int read_integers(PyObject* tuple, int64_t (&values)[5]) {
  Py_ssize_t const count = PyTuple_Size(tuple);
  for (Py_ssize_t i = 0; i < count && i < 5; ++i) {
    values[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
  }
  return PyErr_Occurred() ? -1 : int(count);
}

// The fields of a call, each by its name. A field whose name was not given keeps its default. A
// mistake leaves a Python error set.
class CallReader {
 public:
  // Borrows the names of dtypes and devices: the arguments outlive the call.
  CallReader(PyObject* args, PyObject* kwargs)
      : given_(kwargs ? PyDict_Copy(kwargs) : PyDict_New()) {
    if (PyTuple_Size(args) > 0) {
      PyErr_SetString(PyExc_TypeError, "expected keyword arguments only");
    }
  }
  ~CallReader() { Py_XDECREF(given_); }

  template <class Field>
  void operator()(char const* name, Field& field) {
    PyObject* const value = PyErr_Occurred() ? nullptr : PyDict_GetItemString(given_, name);
    if (value) {
      PyDict_DelItemString(given_, name);  // kwargs still has it
      read(value, field);
    }
  }

  // Whether all arguments were read.
  bool finish() {
    PyObject* name = nullptr;
    Py_ssize_t position = 0;
    if (!PyErr_Occurred() && PyDict_Next(given_, &position, &name, nullptr)) {
      PyErr_Format(PyExc_TypeError, "unexpected argument %R", name);
    }
    return !PyErr_Occurred();
  }

 private:
  static void read(PyObject* value, int64_t& field) { field = PyLong_AsLongLong(value); }
  static void read(PyObject* value, int& field) { field = int(PyLong_AsLong(value)); }
  static void read(PyObject* value, double& field) { field = PyFloat_AsDouble(value); }
  static void read(PyObject* value, bool& field) { field = PyObject_IsTrue(value) == 1; }
  static void read(PyObject* value, TensorMeta& field) {
    PyObject* sizes = nullptr;
    PyObject* strides = nullptr;
    long long address = 0;
    if (!PyTuple_Check(value)) {
      PyErr_SetString(PyExc_TypeError,
                      "a tensor is a tuple (dtype, device, index, sizes, strides, address)");
    } else if (PyArg_ParseTuple(value, "ssiO!O!L", &field.dtype_name, &field.device_name,
                                &field.device_index, &PyTuple_Type, &sizes, &PyTuple_Type, &strides,
                                &address)) {
      field.dtype = dtype_from_name(field.dtype_name);
      field.device = device_from_name(field.device_name);
      field.address = address;
      field.rank = read_integers(sizes, field.size);
      read_integers(strides, field.stride);
    }
  }
  template <class Value>
  static void read(PyObject* value, std::optional<Value>& field) {
    if (value != Py_None) {
      read(value, field.emplace());
    }
  }

  PyObject* given_;
};

}  // namespace fa3::python
