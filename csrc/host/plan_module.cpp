// The Python module flash_attn3._plan: the planner and the user checks without torch and without
// CUDA, for explain(), can_use(), the CPU implementation and the fakes. Limited C API, so that one
// build serves every Python from 3.10 on.
//
// - check_forward(q, k, v, out, softmax_scale, sm_margin, pack_gqa, sm_count): the error text of a
//   call, "" when it is fine. A tensor is (dtype, device type, device index, sizes, strides,
//   address), as ("bfloat16", "cuda", 0, (2, 128, 8, 64), (65536, 512, 64, 1), 0). out may be None;
//   an sm_count of 0 is unknown.
// - plan_forward(dtype, batch, ..., l2_bytes, window_left=-1, window_right=-1, attention_chunk=0,
//   softcap=0.0, max_logits=False, total_q=-1, total_k=-1, has_seqused=False, promote=False): a
//   dict of facts, or {"reason": text}. With total_q and total_k the sequences are packed, and a
//   seqlen of 0 is unknown.
// - variants(): a dict for every variant, built or not.
// - check_backward(dout, dlse, q, k, v, out, lse, softmax_scale, dq=None, dk=None, dv=None),
//   plan_backward(dtype, batch, ..., l2_bytes, deterministic=False, window_left=-1, ...),
//   backward_variants(): the same of the backward.
//   dlse may be None. With dq, dk and dv it is a call of bwd_out.
// - check_general(q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sinks,
//   softmax_scale, causal, window_left, window_right, attention_chunk, softcap, sm_margin,
//   sm_count), check_general_backward(dout, dlse, q, k, v, out, lse, cu_seqlens_q, ..., softcap):
//   the same of the general ops. out, dlse and what follows v or lse up to sinks may be None.
//
// - check_fp8(q, k, v, out, q_descale, k_descale, v_descale, out_dtype, return_max_logits,
//   cu_seqlens_q, ...): check_general of the ops on float8_e4m3fn.
//
// pack_gqa is 0 (never), 1 (always) or 2 (where it pays).
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstring>
#include <string>

#include "bwd_built.inc"
#include "bwd_variants.h"
#include "dispatch/checks_backward.h"
#include "dispatch/checks_fp8.h"
#include "dispatch/plan.h"
#include "dispatch/plan_backward.h"
#include "dispatch/variants.h"
#include "fwd_built.inc"
#include "host/plan_call.h"

namespace {

using namespace fa3;
using namespace fa3::host;

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

char const* dtype_name(Dtype dtype) {
  static constexpr char const* kNames[] = {"float16", "bfloat16", "float8_e4m3fn"};
  return kNames[int(dtype)];
}

char const* kind_name(KernelKind kind) { return kBuiltKinds[kind_index(kind)].name; }

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
  FwdConfig const& config = kFwdVariants[variant];
  bool const stages_output =
      config.output == OutputKind::kStaged || config.output == OutputKind::kSent;
  dict.string("name", config.name)
      .flag("built", kFwdBuilt[variant])
      .string("dtype", dtype_name(config.dtype_q))
      .string("mask", kind_name(config.kind))
      .integer("head_dim", config.head_dim)
      .integer("head_dim_v", config.head_dim_v)
      .integer("columns", config.columns())
      .integer("columns_v", config.columns_v())
      .integer("tile_m", config.consumer_warpgroups * kWarpgroupRows)
      .integer("tile_n", config.tile_n)
      .integer("stages", config.stages)
      .integer("raw_stages", config.raw_stages)
      .integer("output_stages", stages_output)
      .integer("shared_sums", config.shared_sums)
      .integer("q_stages", config.q_stages)
      .integer("consumer_warpgroups", config.consumer_warpgroups)
      .flag("promotes", config.is_promoted())
      .flag("ping_pong", config.ping_pong)
      .flag("intra_overlap", config.is_skewed())
      .flag("tile_overlap", config.tile_overlap)
      .integer("ctas_per_sm", config.ctas_per_sm)
      .integer("relative_speed", config.relative_speed)
      .integer("fixed_keys", config.fixed_keys)
      .integer("threads", config.threads())
      .integer("producer_registers", config.producer_registers())
      .integer("consumer_registers", config.consumer_registers())
      .integer("shared_bytes", config.shared_bytes());
}

// "240" for all, or "200, 216, 72" for one after the other.
std::string registers_text(BwdConfig const& config) {
  int const* const registers = config.registers;
  std::string text = std::to_string(registers[0]);
  for (int i = 1; i < config.consumer_warpgroups; ++i) {
    text += registers[i] == registers[0] && config.consumer_warpgroups == 2
                ? ""
                : ", " + std::to_string(registers[i]);
  }
  return text;
}

void add_backward_variant(DictBuilder& dict, int variant) {
  BwdConfig const& config = kBwdVariants[variant];
  dict.string("name", config.name)
      .flag("built", kBwdBuilt[variant])
      .string("dtype", dtype_name(config.dtype))
      .string("mask", kind_name(config.kind))
      .flag("causal", config.kind == kCausalKernel)
      .integer("head_dim", config.head_dim)
      .integer("head_dim_v", config.head_dim_v)
      .integer("columns", padded_columns(config.head_dim))
      .integer("columns_v", padded_columns(config.head_dim_v))
      .integer("tile_m", config.tile_m)
      .integer("tile_n", config.tile_n())
      .integer("cluster_size", config.cluster_size)
      .integer("q_stages", config.q_stages)
      .integer("dout_stages", config.dout_stages)
      .integer("consumer_warpgroups", config.consumer_warpgroups)
      .integer("threads", config.threads())
      .integer("producer_registers", config.producer_registers)
      .string("consumer_registers", registers_text(config).c_str())
      .integer("dq_adders", config.dq_adders())
      .integer("shared_bytes", config.shared_bytes());
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

// The arguments that the general ops have beyond those of the others.
struct GeneralObjects {
  PyObject* cu_seqlens_q;
  PyObject* cu_seqlens_k;
  PyObject* seqused_q;
  PyObject* seqused_k;
  PyObject* sinks;
};

// What none stands for: nothing is read, and is_there becomes false.
bool read_optional(PyObject* object, TensorMeta& meta, bool& is_there) {
  is_there = object != Py_None;
  return !is_there || read_tensor(object, meta);
}

bool read_general(GeneralObjects const& objects, GeneralCall& call) {
  bool has_q = false;
  bool has_k = false;
  if (!read_optional(objects.cu_seqlens_q, call.cu_seqlens_q, has_q) ||
      !read_optional(objects.cu_seqlens_k, call.cu_seqlens_k, has_k)) {
    return false;
  }
  call.is_packed = has_q || has_k;
  return read_optional(objects.seqused_q, call.seqused_q, call.has_seqused_q) &&
         read_optional(objects.seqused_k, call.seqused_k, call.has_seqused_k) &&
         read_optional(objects.sinks, call.sinks, call.has_sinks);
}

PyObject* py_check_general(PyObject*, PyObject* args) {
  PyObject *q, *k, *v, *out;
  GeneralObjects objects;
  long long left, right, chunk, sm_margin;
  int causal;
  GeneralCall call;
  ForwardCall& forward = call.forward;
  if (!PyArg_ParseTuple(args, "OOOOOOOOOdpLLLdLi", &q, &k, &v, &out, &objects.cu_seqlens_q,
                        &objects.cu_seqlens_k, &objects.seqused_q, &objects.seqused_k,
                        &objects.sinks, &forward.softmax_scale, &causal, &left, &right, &chunk,
                        &call.softcap, &sm_margin, &forward.sm_count)) {
    return nullptr;
  }
  forward.sm_margin = sm_margin;
  call.causal = causal;
  call.window_left = left;
  call.window_right = right;
  call.attention_chunk = chunk;
  if (!read_tensor(q, forward.q) || !read_tensor(k, forward.k) || !read_tensor(v, forward.v) ||
      !read_optional(out, forward.out, forward.has_out) || !read_general(objects, call)) {
    return nullptr;
  }
  return PyUnicode_FromString(check_general(call).c_str());
}

PyObject* py_check_fp8(PyObject*, PyObject* args) {
  PyObject *q, *k, *v, *out, *scales[3];
  GeneralObjects objects;
  long long left, right, chunk, sm_margin;
  int causal, wants_max_logits;
  Fp8Call call;
  GeneralCall& general = call.general;
  ForwardCall& forward = general.forward;
  if (!PyArg_ParseTuple(args, "OOOOOOOspOOOOOdpLLLdLi", &q, &k, &v, &out, &scales[0], &scales[1],
                        &scales[2], &call.out_dtype_name, &wants_max_logits, &objects.cu_seqlens_q,
                        &objects.cu_seqlens_k, &objects.seqused_q, &objects.seqused_k,
                        &objects.sinks, &forward.softmax_scale, &causal, &left, &right, &chunk,
                        &general.softcap, &sm_margin, &forward.sm_count)) {
    return nullptr;
  }
  call.out_dtype = dtype_from_name(call.out_dtype_name);
  call.wants_max_logits = wants_max_logits;
  forward.sm_margin = sm_margin;
  general.causal = causal;
  general.window_left = left;
  general.window_right = right;
  general.attention_chunk = chunk;
  if (!read_tensor(q, forward.q) || !read_tensor(k, forward.k) || !read_tensor(v, forward.v) ||
      !read_optional(out, forward.out, forward.has_out) || !read_general(objects, general)) {
    return nullptr;
  }
  for (int i = 0; i < 3; ++i) {
    if (!read_optional(scales[i], call.scales[i], call.has_scale[i])) {
      return nullptr;
    }
  }
  return PyUnicode_FromString(check_fp8(call).c_str());
}

PyObject* py_check_general_backward(PyObject*, PyObject* args) {
  PyObject *dout, *dlse, *q, *k, *v, *out, *lse;
  GeneralObjects objects;
  long long left, right, chunk;
  int causal;
  GeneralBackwardCall call;
  ForwardCall& forward = call.general.forward;
  forward.op = "bwd";
  if (!PyArg_ParseTuple(args, "OOOOOOOOOOOOdpLLLd", &dout, &dlse, &q, &k, &v, &out, &lse,
                        &objects.cu_seqlens_q, &objects.cu_seqlens_k, &objects.seqused_q,
                        &objects.seqused_k, &objects.sinks, &forward.softmax_scale, &causal, &left,
                        &right, &chunk, &call.general.softcap)) {
    return nullptr;
  }
  call.general.causal = causal;
  call.general.window_left = left;
  call.general.window_right = right;
  call.general.attention_chunk = chunk;
  if (!read_tensor(q, forward.q) || !read_tensor(k, forward.k) || !read_tensor(v, forward.v) ||
      !read_tensor(dout, call.dout) || !read_tensor(out, call.out) || !read_tensor(lse, call.lse) ||
      !read_optional(dlse, call.dlse, call.has_dlse) || !read_general(objects, call.general)) {
    return nullptr;
  }
  return PyUnicode_FromString(check_general_backward(call).c_str());
}

// What only packed sequences have; of what depends on their lengths nothing is known.
void add_packed_schedule(DictBuilder& dict, FwdSchedule const& schedule) {
  dict.integer("section_heads", schedule.section_heads)
      .integer("workspace_bytes", schedule.workspace_ints * int64_t(sizeof(int)));
}

void add_dense_schedule(DictBuilder& dict, FwdSchedule const& schedule, FwdCost const& cost) {
  dict.integer("section_pairs", schedule.section_pairs)
      .real("waves", cost.waves)
      .real("useful_share", cost.useful_share)
      .real("flops", cost.flops)
      .real("bytes", cost.bytes);
}

PyObject* plan_dict(FwdProblem const& problem) {
  FwdPlan const plan = plan_forward(problem);
  FwdSchedule const& schedule = plan.schedule;
  FwdCost const cost = cost_forward(problem, plan);
  DictBuilder dict;
  add_variant(dict, plan.variant);
  dict.flag("is_packed", problem.is_packed)
      .integer("pack", schedule.pack)
      .integer("m_tiles", schedule.m_tiles)
      .integer("lead", schedule.lead)
      .integer("tiles", schedule.tiles)
      .integer("grid", schedule.grid)
      .integer("launches", value_launches(problem.head_dim_v))
      .real("visited_share", cost.visited_share);
  if (problem.is_packed) {
    add_packed_schedule(dict, schedule);
  } else {
    add_dense_schedule(dict, schedule, cost);
  }
  return dict.finish();
}

PyObject* py_plan_forward(PyObject*, PyObject* args, PyObject* kwargs) {
  static char const* const names[] = {
      "dtype",    "batch",       "seqlen_q",     "seqlen_k",        "heads_q",   "heads_k",
      "head_dim", "head_dim_v",  "causal",       "pack_gqa",        "sm_margin", "sm_count",
      "l2_bytes", "window_left", "window_right", "attention_chunk", "softcap",   "row_features",
      "total_q",  "total_k",     "has_seqused",  "promote",         nullptr};
  int pack_gqa;
  PlanCall call;
  if (!PyArg_ParseTupleAndKeywords(
          args, kwargs, "siiiiiiipiiiL|LLLdpiipp", const_cast<char**>(names), &call.dtype_name,
          &call.batch, &call.seqlen_q, &call.seqlen_k, &call.heads_q, &call.heads_k, &call.head_dim,
          &call.head_dim_v, &call.causal, &pack_gqa, &call.sm_margin, &call.sm_count,
          &call.l2_bytes, &call.window_left, &call.window_right, &call.attention_chunk,
          &call.softcap, &call.has_row_features, &call.total_q, &call.total_k, &call.has_seqused,
          &call.promote) ||
      !is_pack_gqa(pack_gqa)) {
    return nullptr;
  }
  call.dtype = dtype_from_name(call.dtype_name);
  std::string const error = call_error(call);
  if (!error.empty()) {
    return DictBuilder().string("reason", error.c_str()).finish();
  }
  FwdProblem problem = problem_of(call);
  problem.pack_gqa = PackGqa(pack_gqa);
  return plan_dict(problem);
}

// Nothing is launched for an empty problem.
BwdPlan plan_any_backward(FwdProblem const& p) {
  bool const is_empty = p.batch == 0 || p.heads_q == 0 || p.seqlen_q == 0 || p.seqlen_k == 0;
  return is_empty ? BwdPlan{find_backward_variant(p.dtype, p.kind, p.head_dim, p.head_dim_v), {}}
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
      "dtype",    "batch",         "seqlen_q",    "seqlen_k",     "heads_q",
      "heads_k",  "head_dim",      "head_dim_v",  "causal",       "sm_count",
      "l2_bytes", "deterministic", "window_left", "window_right", "attention_chunk",
      "softcap",  "total_q",       "total_k",     "has_seqused",  nullptr};
  int deterministic = 0;
  PlanCall call;
  if (!PyArg_ParseTupleAndKeywords(
          args, kwargs, "siiiiiiipiL|pLLLdiip", const_cast<char**>(names), &call.dtype_name,
          &call.batch, &call.seqlen_q, &call.seqlen_k, &call.heads_q, &call.heads_k, &call.head_dim,
          &call.head_dim_v, &call.causal, &call.sm_count, &call.l2_bytes, &deterministic,
          &call.window_left, &call.window_right, &call.attention_chunk, &call.softcap,
          &call.total_q, &call.total_k, &call.has_seqused)) {
    return nullptr;
  }
  call.dtype = dtype_from_name(call.dtype_name);
  std::string const error = backward_call_error(call);
  if (!error.empty()) {
    return DictBuilder().string("reason", error.c_str()).finish();
  }
  FwdProblem problem = problem_of(call);
  problem.deterministic = deterministic;
  return backward_plan_dict(problem);
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
    {"check_general", py_check_general, METH_VARARGS, "check_forward of the general ops."},
    {"check_fp8", py_check_fp8, METH_VARARGS, "check_forward of the ops on float8_e4m3fn."},
    {"check_general_backward", py_check_general_backward, METH_VARARGS,
     "check_backward of the general ops."},
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
