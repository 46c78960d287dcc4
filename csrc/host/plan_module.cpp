// The Python module flash_attn3._plan: the planner and the user checks without torch and without
// CUDA, for explain(), can_use(), the CPU implementation and the fakes. Limited C API, so that one
// build serves every Python from 3.10 on.
//
// - check_forward(q, k, v, out, softmax_scale, sm_margin, pack_gqa, sm_count): the error text of a
//   call, "" when it is fine. A tensor is (dtype, device type, device index, sizes, strides,
//   address), as ("bfloat16", "cuda", 0, (2, 128, 8, 64), (65536, 512, 64, 1), 0). out may be None;
//   an sm_count of 0 is unknown.
// - plan_forward(dtype, batch, ..., l2_bytes): a dict of facts, or {"reason": text}.
// - variants(): a dict for every variant, built or not.
// - check_backward(dout, dlse, q, k, v, out, lse, softmax_scale, dq=None, dk=None, dv=None),
//   plan_backward(dtype, batch, ..., l2_bytes), backward_variants(): the same of the backward.
//   dlse may be None. With dq, dk and dv it is a call of bwd_out.
//
// pack_gqa is 0 (never), 1 (always) or 2 (where it pays).
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "bwd_built.inc"
#include "bwd_variants.h"
#include "dispatch/checks_backward.h"
#include "dispatch/plan.h"
#include "dispatch/plan_backward.h"
#include "dispatch/text.h"
#include "dispatch/variants.h"
#include "fwd_built.inc"

namespace {

using namespace fa3;

Dtype dtype_from_name(char const* name) {
  struct Named {
    char const* name;
    Dtype dtype;
  };
  static constexpr Named kNames[] = {{"float16", Dtype::kFloat16},
                                     {"bfloat16", Dtype::kBFloat16},
                                     {"float32", Dtype::kFloat32},
                                     {"float64", Dtype::kFloat64},
                                     {"float8_e4m3fn", Dtype::kFloat8E4M3}};
  for (Named const& named : kNames) {
    if (std::strcmp(name, named.name) == 0) {
      return named.dtype;
    }
  }
  return Dtype::kOther;
}

char const* dtype_name(Dtype dtype) { return dtype == Dtype::kFloat16 ? "float16" : "bfloat16"; }

DeviceType device_from_name(char const* name) {
  if (std::strcmp(name, "cuda") == 0) {
    return DeviceType::kCuda;
  }
  return std::strcmp(name, "cpu") == 0 ? DeviceType::kCpu : DeviceType::kOther;
}

// Fills a dict; a failure leaves the Python error set and the dict is dropped by finish().
class DictBuilder {
 public:
  DictBuilder() : dict_(PyDict_New()) {}

  DictBuilder& integer(char const* key, int64_t value) {
    return set(key, PyLong_FromLongLong(value));
  }
  DictBuilder& real(char const* key, double value) { return set(key, PyFloat_FromDouble(value)); }
  DictBuilder& flag(char const* key, bool value) { return set(key, PyBool_FromLong(value)); }
  DictBuilder& string(char const* key, char const* value) {
    return set(key, PyUnicode_FromString(value));
  }

  PyObject* finish() {
    if (PyErr_Occurred()) {
      Py_CLEAR(dict_);
    }
    return dict_;
  }

 private:
  DictBuilder& set(char const* key, PyObject* value) {
    if (dict_ && value) {
      PyDict_SetItemString(dict_, key, value);
    }
    Py_XDECREF(value);
    return *this;
  }

  PyObject* dict_;
};

void add_variant(DictBuilder& dict, int variant) {
  FwdVariantFacts const& facts = kFwdVariants[variant];
  dict.string("name", facts.name)
      .flag("built", kFwdBuilt[variant])
      .string("dtype", dtype_name(facts.dtype))
      .flag("causal", facts.mask == MaskKind::kCausal)
      .integer("head_dim", facts.head_dim)
      .integer("head_dim_v", facts.head_dim_v)
      .integer("columns", padded_columns(facts.head_dim))
      .integer("columns_v", padded_columns(facts.head_dim_v))
      .integer("tile_m", facts.consumer_warpgroups * kWarpgroupRows)
      .integer("tile_n", facts.tile_n)
      .integer("stages", facts.stages)
      .integer("q_stages", facts.q_stages)
      .integer("consumer_warpgroups", facts.consumer_warpgroups)
      .flag("ping_pong", facts.ping_pong)
      .flag("intra_overlap", facts.intra_overlap)
      .flag("tile_overlap", facts.tile_overlap)
      .integer("relative_speed", facts.relative_speed)
      .integer("fixed_keys", facts.fixed_keys)
      .integer("threads", facts.threads)
      .integer("producer_registers", facts.producer_registers)
      .integer("consumer_registers", facts.consumer_registers)
      .integer("shared_bytes", facts.shared_bytes);
}

// "240" for all, or "200, 216, 72" for one after the other.
std::string registers_text(BwdVariantFacts const& facts) {
  int const* const registers = facts.consumer_registers;
  std::string text = std::to_string(registers[0]);
  for (int i = 1; i < facts.consumer_warpgroups; ++i) {
    text += registers[i] == registers[0] && facts.consumer_warpgroups == 2
                ? ""
                : ", " + std::to_string(registers[i]);
  }
  return text;
}

void add_backward_variant(DictBuilder& dict, int variant) {
  BwdVariantFacts const& facts = kBwdVariants[variant];
  dict.string("name", facts.name)
      .flag("built", kBwdBuilt[variant])
      .string("dtype", dtype_name(facts.dtype))
      .flag("causal", facts.mask == MaskKind::kCausal)
      .integer("head_dim", facts.head_dim)
      .integer("columns", padded_columns(facts.head_dim))
      .integer("tile_m", facts.tile_m)
      .integer("tile_n", facts.tile_n)
      .integer("cluster_size", facts.cluster_size)
      .integer("q_stages", facts.q_stages)
      .integer("dout_stages", facts.dout_stages)
      .integer("consumer_warpgroups", facts.consumer_warpgroups)
      .integer("threads", facts.threads)
      .integer("producer_registers", facts.producer_registers)
      .string("consumer_registers", registers_text(facts).c_str())
      .integer("dq_adders", facts.dq_adders)
      .integer("shared_bytes", facts.shared_bytes);
}

// Up to five integers of a tuple; the number there really are, or -1 with a Python error set.
int read_integers(PyObject* tuple, int64_t (&values)[5]) {
  Py_ssize_t const count = PyTuple_Size(tuple);
  for (Py_ssize_t i = 0; i < count && i < 5; ++i) {
    values[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
  }
  return PyErr_Occurred() ? -1 : int(count);
}

bool read_tensor(PyObject* object, TensorMeta& meta) {
  PyObject* sizes = nullptr;
  PyObject* strides = nullptr;
  long long address = 0;
  if (!PyTuple_Check(object)) {
    PyErr_SetString(PyExc_TypeError,
                    "a tensor is a tuple (dtype, device, index, sizes, strides, address)");
    return false;
  }
  if (!PyArg_ParseTuple(object, "ssiO!O!L", &meta.dtype_name, &meta.device_name, &meta.device_index,
                        &PyTuple_Type, &sizes, &PyTuple_Type, &strides, &address)) {
    return false;
  }
  meta.dtype = dtype_from_name(meta.dtype_name);
  meta.device = device_from_name(meta.device_name);
  meta.address = address;
  meta.rank = read_integers(sizes, meta.size);
  return meta.rank >= 0 && read_integers(strides, meta.stride) >= 0;
}

bool is_pack_gqa(int value) {
  if (value < 0 || value > 2) {
    PyErr_SetString(PyExc_ValueError, "pack_gqa is 0 (never), 1 (always) or 2 (where it pays)");
    return false;
  }
  return true;
}

PyObject* py_check_forward(PyObject*, PyObject* args, PyObject* kwargs) {
  static char const* const names[] = {"q",         "k",        "v",        "out",  "softmax_scale",
                                      "sm_margin", "pack_gqa", "sm_count", nullptr};
  PyObject *q, *k, *v, *out;
  long long sm_margin;
  int pack_gqa;
  ForwardCall call;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOdLii", const_cast<char**>(names), &q, &k, &v,
                                   &out, &call.softmax_scale, &sm_margin, &pack_gqa,
                                   &call.sm_count) ||
      !is_pack_gqa(pack_gqa)) {
    return nullptr;
  }
  call.sm_margin = sm_margin;
  call.has_out = out != Py_None;
  if (!read_tensor(q, call.q) || !read_tensor(k, call.k) || !read_tensor(v, call.v)) {
    return nullptr;
  }
  if (call.has_out && !read_tensor(out, call.out)) {
    return nullptr;
  }
  return PyUnicode_FromString(check_forward(call).c_str());
}

PyObject* py_check_backward(PyObject*, PyObject* args, PyObject* kwargs) {
  static char const* const names[] = {"dout", "dlse",          "q",  "k",  "v",  "out",
                                      "lse",  "softmax_scale", "dq", "dk", "dv", nullptr};
  PyObject *dout, *dlse, *q, *k, *v, *out, *lse;
  PyObject *dq = Py_None, *dk = Py_None, *dv = Py_None;
  BackwardCall call;
  ForwardCall& forward = call.forward;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOOOd|OOO", const_cast<char**>(names), &dout,
                                   &dlse, &q, &k, &v, &out, &lse, &forward.softmax_scale, &dq, &dk,
                                   &dv)) {
    return nullptr;
  }
  call.has_dlse = dlse != Py_None;
  call.has_gradients = dq != Py_None || dk != Py_None || dv != Py_None;
  forward.op = backward_op(call.has_gradients);
  if (!read_tensor(q, forward.q) || !read_tensor(k, forward.k) || !read_tensor(v, forward.v) ||
      !read_tensor(dout, call.dout) || !read_tensor(out, call.out) || !read_tensor(lse, call.lse)) {
    return nullptr;
  }
  if (call.has_dlse && !read_tensor(dlse, call.dlse)) {
    return nullptr;
  }
  if (call.has_gradients &&
      (!read_tensor(dq, call.dq) || !read_tensor(dk, call.dk) || !read_tensor(dv, call.dv))) {
    return nullptr;
  }
  return PyUnicode_FromString(check_backward(call).c_str());
}

// A CUDA tensor of these sizes. Of its strides only the last one matters to the checks.
TensorMeta describe(char const* dtype, int64_t batch, int64_t rows, int64_t heads,
                    int64_t head_dim) {
  TensorMeta meta;
  meta.dtype = dtype_from_name(dtype);
  meta.dtype_name = dtype;
  meta.device = DeviceType::kCuda;
  meta.device_name = "cuda";
  meta.rank = 4;
  int64_t const sizes[] = {batch, rows, heads, head_dim};
  std::copy(sizes, sizes + 4, meta.size);
  meta.stride[3] = 1;
  return meta;
}

std::string size_error(FwdProblem const& problem) {
  int const smallest = std::min(
      {problem.batch, problem.seqlen_q, problem.seqlen_k, problem.heads_q, problem.head_dim});
  if (smallest < 0) {
    return error_text("explain", "sizes of 0 or more", text(smallest));
  }
  if (problem.device.sm_count < 1) {
    return error_text("explain", "sm_count to be 1 or more", text(problem.device.sm_count));
  }
  return {};
}

ForwardCall call_of(FwdProblem const& problem, char const* dtype) {
  ForwardCall call;
  call.q = describe(dtype, problem.batch, problem.seqlen_q, problem.heads_q, problem.head_dim);
  call.k = describe(dtype, problem.batch, problem.seqlen_k, problem.heads_k, problem.head_dim);
  call.v = describe(dtype, problem.batch, problem.seqlen_k, problem.heads_k, problem.head_dim_v);
  call.sm_margin = problem.sm_margin;
  call.sm_count = problem.device.sm_count;
  return call;
}

std::string problem_error(FwdProblem const& problem, char const* dtype) {
  std::string const error = size_error(problem);
  return error.empty() ? check_forward(call_of(problem, dtype)) : error;
}

std::string backward_problem_error(FwdProblem const& problem, char const* dtype) {
  std::string const error = size_error(problem);
  if (!error.empty()) {
    return error;
  }
  BackwardCall call;
  call.forward = call_of(problem, dtype);
  call.forward.op = backward_op(/*has_gradients=*/false);
  call.out = describe(dtype, problem.batch, problem.seqlen_q, problem.heads_q, problem.head_dim_v);
  call.dout = call.out;
  call.lse = describe("float32", problem.batch, problem.heads_q, problem.seqlen_q, 0);
  call.lse.rank = 3;
  return check_backward(call);
}

PyObject* plan_dict(FwdProblem const& problem) {
  FwdPlan const plan = plan_forward(problem);
  FwdCost const cost = cost_forward(problem, plan);
  DictBuilder dict;
  add_variant(dict, plan.variant);
  dict.integer("pack", plan.schedule.pack)
      .integer("m_tiles", plan.schedule.m_tiles)
      .integer("tiles", plan.schedule.tiles)
      .integer("section_pairs", plan.schedule.section_pairs)
      .integer("grid", plan.schedule.grid)
      .real("waves", cost.waves)
      .real("useful_share", cost.useful_share)
      .real("flops", cost.flops)
      .real("bytes", cost.bytes);
  return dict.finish();
}

PyObject* py_plan_forward(PyObject*, PyObject* args, PyObject* kwargs) {
  static char const* const names[] = {"dtype",     "batch",    "seqlen_q",   "seqlen_k", "heads_q",
                                      "heads_k",   "head_dim", "head_dim_v", "causal",   "pack_gqa",
                                      "sm_margin", "sm_count", "l2_bytes",   nullptr};
  char const* dtype;
  int causal, pack_gqa;
  long long l2_bytes;
  FwdProblem p;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "siiiiiiipiiiL", const_cast<char**>(names), &dtype,
                                   &p.batch, &p.seqlen_q, &p.seqlen_k, &p.heads_q, &p.heads_k,
                                   &p.head_dim, &p.head_dim_v, &causal, &pack_gqa, &p.sm_margin,
                                   &p.device.sm_count, &l2_bytes) ||
      !is_pack_gqa(pack_gqa)) {
    return nullptr;
  }
  p.dtype = dtype_from_name(dtype);
  p.causal = causal;
  p.pack_gqa = PackGqa(pack_gqa);
  p.device.l2_bytes = l2_bytes;
  std::string const error = problem_error(p, dtype);
  return error.empty() ? plan_dict(p) : DictBuilder().string("reason", error.c_str()).finish();
}

// Nothing is launched for an empty problem.
BwdPlan plan_any_backward(FwdProblem const& p) {
  bool const is_empty = p.batch == 0 || p.heads_q == 0 || p.seqlen_q == 0 || p.seqlen_k == 0;
  return is_empty ? BwdPlan{find_backward_variant(p.dtype, p.causal, p.head_dim), {}}
                  : plan_backward(p);
}

PyObject* backward_plan_dict(FwdProblem const& problem) {
  BwdPlan const plan = plan_any_backward(problem);
  BwdSchedule const& schedule = plan.schedule;
  DictBuilder dict;
  add_backward_variant(dict, plan.variant);
  dict.integer("m_tiles", schedule.m_tiles)
      .integer("n_tiles", schedule.n_tiles)
      .integer("section_pairs", schedule.section_pairs)
      .integer("grid", schedule.grid)
      .integer("rows", schedule.rows)
      .integer("lse_bytes", schedule.rows * int64_t(sizeof(float)))
      .integer("delta_bytes", schedule.rows * int64_t(sizeof(float)))
      .integer("dq_bytes", schedule.dq_floats * int64_t(sizeof(float)))
      .integer("flags_bytes", schedule.flags * int64_t(sizeof(int)));
  return dict.finish();
}

PyObject* py_plan_backward(PyObject*, PyObject* args, PyObject* kwargs) {
  static char const* const names[] = {
      "dtype",      "batch",  "seqlen_q", "seqlen_k", "heads_q",       "heads_k", "head_dim",
      "head_dim_v", "causal", "sm_count", "l2_bytes", "deterministic", nullptr};
  char const* dtype;
  int causal;
  int deterministic = 0;
  long long l2_bytes;
  FwdProblem p;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "siiiiiiipiL|p", const_cast<char**>(names), &dtype,
                                   &p.batch, &p.seqlen_q, &p.seqlen_k, &p.heads_q, &p.heads_k,
                                   &p.head_dim, &p.head_dim_v, &causal, &p.device.sm_count,
                                   &l2_bytes, &deterministic)) {
    return nullptr;
  }
  p.dtype = dtype_from_name(dtype);
  p.causal = causal;
  p.deterministic = deterministic;
  p.device.l2_bytes = l2_bytes;
  std::string const error = backward_problem_error(p, dtype);
  return error.empty() ? backward_plan_dict(p)
                       : DictBuilder().string("reason", error.c_str()).finish();
}

PyObject* list_variants(int count, void (*add)(DictBuilder&, int)) {
  PyObject* list = PyList_New(0);
  for (int i = 0; i < count; ++i) {
    DictBuilder builder;
    add(builder, i);
    PyObject* dict = builder.finish();
    if (!list || !dict || PyList_Append(list, dict) != 0) {
      Py_CLEAR(list);
    }
    Py_XDECREF(dict);
  }
  return list;
}

PyObject* py_variants(PyObject*, PyObject*) {
  return list_variants(kFwdVariantCount, &add_variant);
}

PyObject* py_backward_variants(PyObject*, PyObject*) {
  return list_variants(int(std::size(kBwdVariants)), &add_backward_variant);
}

template <class Function>
PyCFunction method(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

constexpr int kKeywords = METH_VARARGS | METH_KEYWORDS;

PyMethodDef methods[] = {
    {"check_forward", method(py_check_forward), kKeywords, "Error text of a call; empty if fine."},
    {"check_backward", method(py_check_backward), kKeywords,
     "Error text of a call of the backward; empty if fine."},
    {"plan_forward", method(py_plan_forward), kKeywords, "How a forward problem would be run."},
    {"plan_backward", method(py_plan_backward), kKeywords, "How its gradients would be computed."},
    {"variants", py_variants, METH_NOARGS, "Facts of every forward variant."},
    {"backward_variants", py_backward_variants, METH_NOARGS, "Facts of every backward variant."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT,
                      "flash_attn3._plan",
                      "Planner and checks of flash_attn3.",
                      -1,
                      methods,
                      nullptr,
                      nullptr,
                      nullptr,
                      nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__plan() { return PyModule_Create(&module); }
