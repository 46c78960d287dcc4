// The Python module flash_attn3._plan: the planner and the user checks without torch and without
// CUDA, for explain(), can_use(), the CPU implementation and the fakes. Limited C API, so that one
// build serves every Python from 3.10 on.
//
// - check_forward(**call), check_fp8(**call), check_backward(**call), check_cache(**call),
//   check_append(**call): the error text of a call, "" when it is fine. Its arguments are the
//   fields of AttentionCall by their names, with None and the defaults of flash_attn3/arguments.py,
//   and sm_count and l2_bytes, of which 0 is unknown. A tensor is (dtype, device type, device
//   index, sizes, strides, address), as ("bfloat16", "cuda", 0, (2, 128, 8, 64), (65536, 512, 64,
//   1), 0).
// - check_combine(out_partial=, lse_partial=, out=): the error text of a call of `combine`.
// - check_merge(out=, out_0=, lse_0=, ...): the error text of a merge of separate tensors.
// - check_quantize(x=, cu_seqlens=, seqused=, block=, group=, seed=): the error text of a call of
//   `quantize_fp8`.
// - plan_forward(**call), plan_backward(**call), plan_cache(**call): a dict of facts, or {"reason":
//   text}. plan_backward needs no tensor but q, k and v.
// - variants(), backward_variants(): a dict for every variant, built or not.
#include <algorithm>
#include <string>

#include "bwd_built.inc"
#include "bwd_variants.h"
#include "call/tensor_text.h"
#include "checks/checks.h"
#include "plan/plan.h"
#include "plan/plan_backward.h"
#include "plan/plan_cache.h"
#include "plan/problem_of_call.h"
#include "plan/shared_prefix.h"
#include "plan/variants.h"
#include "fwd_built.inc"
#include "python/call_reader.h"

namespace {

using namespace fa3;
using namespace fa3::python;

char const* kind_name(KernelKind kind) { return kBuiltKinds[kind_index(kind)].name; }

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
  // A list of (name, count, bytes of one).
  DictBuilder& buffers(char const* key, SharedMemory const& memory) {
    PyObject* list = PyList_New(0);
    for (int i = 0; list && i < memory.size; ++i) {
      auto const& [name, count, bytes] = memory.buffers[i];
      PyObject* const row = Py_BuildValue("(sii)", name, count, bytes);
      if (!row || PyList_Append(list, row) != 0) {
        Py_CLEAR(list);
      }
      Py_XDECREF(row);
    }
    return set(key, list);
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

// The facts that variants of both directions have.
template <class Config>
DictBuilder& add_common(DictBuilder& dict, Config const& config, Dtype dtype, bool is_built) {
  return dict.string("name", config.name)
      .flag("built", is_built)
      .string("dtype", kDtypeNames[int(dtype)])
      .string("mask", kind_name(config.kind))
      .integer("head_dim", config.head_dim)
      .integer("head_dim_v", config.head_dim_v)
      .integer("q_stages", config.q_stages)
      .integer("consumer_warpgroups", config.consumer_warpgroups)
      .integer("threads", config.threads())
      .integer("producer_registers", config.producer_registers())
      .buffers("shared_memory", config.shared_memory())
      .integer("shared_bytes", config.shared_bytes());
}

void add_variant(DictBuilder& dict, int variant) {
  FwdConfig const& config = kFwdVariants[variant];
  bool const stages_output =
      config.output == OutputKind::kStaged || config.output == OutputKind::kSent;
  add_common(dict, config, config.dtype_q, kFwdBuilt[variant])
      .integer("column_ctas", config.column_ctas())
      .integer("columns", config.columns())
      .integer("columns_v", config.columns_v())
      .integer("tile_m", config.consumer_warpgroups * kWarpgroupRows)
      .integer("tile_n", config.tile_n)
      .integer("stages", config.stages)
      .integer("raw_stages", config.raw.stages)
      .integer("output_stages", stages_output)
      .integer("shared_sums", config.tuning.shared_sums)
      .flag("promotes", config.is_promoted())
      .flag("ping_pong", config.overlap.ping_pong)
      .flag("late_wait", config.tuning.late_wait)
      .flag("intra_overlap", config.is_skewed())
      .flag("tile_overlap", config.overlap.tiles)
      .integer("ctas_per_sm", config.measured.ctas_per_sm)
      .integer("relative_speed", config.measured.relative_speed)
      .integer("fixed_keys", config.measured.fixed_keys)
      .integer("converter_registers", config.converts() && !config.is_latent() && !config.is_swapped
                                          ? config.converter_registers()
                                          : 0)
      .flag("swapped", config.is_swapped)
      .integer("producers", config.producers())
      .integer("consumer_registers", config.consumer_registers())
      .integer("output_registers", config.is_mla() ? config.output_registers() : 0);
}

// "240" for all warpgroups, or "200, 216, 72" for each in turn.
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
  add_common(dict, config, config.dtype, kBwdBuilt[variant])
      .flag("causal", config.kind == kCausalKernel)
      .integer("columns", padded_columns(config.cta_head_dim()))
      .integer("columns_v", padded_columns(config.cta_head_dim_v()))
      .integer("column_ctas", config.column_ctas())
      .integer("tile_m", config.tile_m)
      .integer("tile_n", config.tile_n())
      .integer("cluster_size", config.cluster_size)
      .integer("dout_stages", config.dout_stages)
      .string("consumer_registers", registers_text(config).c_str())
      .integer("dq_adders", config.dq_adders());
}

bool read_call(PyObject* args, PyObject* kwargs, AttentionCall& call) {
  CallReader reader(args, kwargs);
  call.visit(reader);
  reader("sm_count", call.device.sm_count);
  reader("l2_bytes", call.device.l2_bytes);
  return reader.finish();
}

template <auto kCheck, bool kOnCache, auto... kOptions>
PyObject* py_check(PyObject*, PyObject* args, PyObject* kwargs) {
  AttentionCall call;
  if (!read_call(args, kwargs, call)) {
    return nullptr;
  }
  call.on_cache = kOnCache;
  return PyUnicode_FromString(kCheck(call, kOptions...).c_str());
}

PyObject* py_check_backward(PyObject*, PyObject* args, PyObject* kwargs) {
  AttentionCall call;
  call.is_backward = true;
  if (!read_call(args, kwargs, call)) {
    return nullptr;
  }
  bool const has_some = call.dq || call.dk || call.dv;
  bool const has_all = call.dq && call.dk && call.dv;
  if (!call.dout || !call.out || !call.lse || has_some != has_all) {
    PyErr_SetString(PyExc_TypeError, "expected dout, out and lse, and all gradients or none");
    return nullptr;
  }
  return PyUnicode_FromString(check_call(call).c_str());
}

PyObject* py_check_combine(PyObject*, PyObject* args, PyObject* kwargs) {
  CombineCall call;
  CallReader reader(args, kwargs);
  reader("out_partial", call.out_partial);
  reader("lse_partial", call.lse_partial);
  reader("out", call.out);
  return reader.finish() ? PyUnicode_FromString(check_combine(call).c_str()) : nullptr;
}

PyObject* py_check_merge(PyObject*, PyObject* args, PyObject* kwargs) {
  static constexpr char const* kParts[] = {"out_0", "out_1", "out_2", "out_3"};
  static constexpr char const* kLses[] = {"lse_0", "lse_1", "lse_2", "lse_3"};
  static_assert(std::size(kParts) == MergeCall::kMost);
  MergeCall call;
  CallReader reader(args, kwargs);
  reader("out", call.out);
  for (int i = 0; i < MergeCall::kMost; ++i) {
    reader(kParts[i], call.part[i]);
    reader(kLses[i], call.lse[i]);
  }
  return reader.finish() ? PyUnicode_FromString(check_merge(call).c_str()) : nullptr;
}

PyObject* py_check_quantize(PyObject*, PyObject* args, PyObject* kwargs) {
  QuantizeCall call;
  CallReader reader(args, kwargs);
  reader("x", call.x);
  reader("cu_seqlens", call.cu_seqlens);
  reader("seqused", call.seqused);
  reader("block", call.block);
  reader("group", call.group);
  reader("seed", call.seed);
  return reader.finish() ? PyUnicode_FromString(check_quantize(call).c_str()) : nullptr;
}

// The error text of a call given by its sizes, or "".
std::string plan_error(AttentionCall const& call) {
  int64_t smallest = 0;
  for (TensorMeta const* meta : {&call.q, &call.k, &call.v}) {
    smallest = std::min(smallest, *std::min_element(meta->size, meta->size + 5));
  }
  if (smallest < 0) {
    return error_text("explain", "sizes of 0 or more", text(smallest));
  }
  if (call.device.sm_count < 1) {
    return error_text("explain", "sm_count to be 1 or more", text(call.device.sm_count));
  }
  return call.on_cache ? check_cache(call) : check_call(call, !call.is_backward && call.is_fp8());
}

// Facts that only packed sequences have. Those that depend on their lengths are unknown.
void add_packed_schedule(DictBuilder& dict, FwdSchedule const& schedule) {
  dict.integer("section_heads", schedule.section_heads)
      .integer("workspace_bytes", schedule.workspace_ints * int64_t(sizeof(int)));
}

void add_dense_schedule(DictBuilder& dict, FwdSchedule const& schedule, FwdCost const& cost) {
  dict.integer("section_pairs", schedule.section_pairs)
      .integer("least_last_pairs", schedule.least_last_pairs)
      .real("waves", cost.waves)
      .real("useful_share", cost.useful_share)
      .real("flops", cost.flops)
      .real("bytes", cost.bytes);
}

PyObject* plan_dict(AttentionCall const& call) {
  FwdProblem const problem = problem_of(call);
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
      .integer("launches", value_launches(problem.head_dim, problem.head_dim_v))
      .real("visited_share", cost.visited_share);
  if (problem.is_packed) {
    add_packed_schedule(dict, schedule);
  } else {
    add_dense_schedule(dict, schedule, cost);
  }
  return dict.finish();
}

// Nothing is launched for an empty problem.
BwdPlan plan_any_backward(FwdProblem const& p) {
  bool const is_empty = p.batch == 0 || p.heads_q == 0 || p.seqlen_q == 0 || p.seqlen_k == 0;
  return is_empty ? BwdPlan{find_backward_variant(p.dtype, p.kind, p.head_dim, p.head_dim_v), {}}
                  : plan_backward(p);
}

PyObject* backward_plan_dict(AttentionCall const& call) {
  FwdProblem const problem = problem_of(call);
  BwdPlan const plan = plan_any_backward(problem);
  BwdSchedule const& schedule = plan.schedule;
  DictBuilder dict;
  add_backward_variant(dict, plan.variant);
  dict.integer("m_tiles", schedule.m_tiles)
      .integer("n_tiles", schedule.n_tiles)
      .integer("section_pairs", schedule.section_pairs)
      .integer("least_last_pairs", schedule.least_last_pairs)
      .integer("works", schedule.works)
      .integer("grid", schedule.grid)
      .integer("rows", schedule.rows)
      .integer("lse_bytes", schedule.rows * int64_t(sizeof(float)))
      .integer("delta_bytes", schedule.rows * int64_t(sizeof(float)))
      .integer("dq_bytes", schedule.dq_floats * int64_t(sizeof(float)))
      .integer("flags_bytes", schedule.flags * int64_t(sizeof(int)))
      .string("dq_order", dq_order(problem, schedule));
  return dict.finish();
}

// The launch on keys that all sequences share: its parts and its kernel. 0 and "" without one.
void add_prefix(DictBuilder& dict, AttentionCall const& call) {
  PrefixParts parts{.count = 0};
  char const* kernel = "";
  if (has_shared_prefix(call)) {
    TensorMeta const queries = as_one_sequence(call.q);
    parts = prefix_parts(call, queries);
    FwdProblem const problem = problem_of(call_of_prefix(call, queries, parts));
    kernel = kFwdVariants[plan_cache(launches_of_cache(problem).front()).variant].name;
  }
  dict.integer("prefix_parts", parts.count).string("prefix", kernel);
}

// The workspace of parts holds O, the LSE of each row, and that of a group of parts.
PyObject* cache_plan_dict(AttentionCall const& call) {
  static constexpr char const* kSplits[] = {"even", "parts", "size"};
  FwdProblem const call_problem = problem_of(call);
  std::vector<FwdProblem> const launches = launches_of_cache(call_problem);
  FwdProblem const& problem = launches.front();
  FwdPlan const plan = plan_cache(problem);
  char const* const steps =
      launches.size() > 1 ? kFwdVariants[plan_cache(launches[1]).variant].name : "";
  FwdSchedule const& schedule = plan.schedule;
  CacheSchedule const& cache = schedule.cache;
  int64_t floats = 0;
  for (FwdProblem const& launch : launches) {
    FwdPlan const launch_plan = plan_cache(launch);
    CacheSchedule const& parts = launch_plan.schedule.cache;
    floats += parts.slots * parts.rows * kFwdVariants[launch_plan.variant].part_row_floats();
  }
  DictBuilder dict;
  add_variant(dict, plan.variant);
  add_prefix(dict, call);
  dict.string("steps", steps)  // the second launch, if there are two
      .flag("is_packed", problem.is_packed)
      .integer("pack", schedule.pack)
      .integer("m_tiles", schedule.m_tiles)
      .integer("grid", schedule.grid)
      .integer("launches", ceil_div(problem.head_dim_v, launch_columns(problem)))
      .integer("head_groups", call_problem.heads_q / max_of(1, problem.heads_q))
      .string("splits", kSplits[int(cache.splits.kind)])
      .integer("split_count", cache.splits.count)
      .integer("lanes", cache.lanes)
      .integer("slots", cache.slots)
      .integer("parts_bytes", floats * int64_t(sizeof(float)))
      .integer("page_size", problem.cache.page_size)
      .integer("capacity", problem.cache.capacity)
      .integer("batch", problem.batch);
  return dict.finish();
}

template <bool kOnCache, bool kIsBackward, PyObject* (*kDict)(AttentionCall const&)>
PyObject* py_plan(PyObject*, PyObject* args, PyObject* kwargs) {
  AttentionCall call;
  if (!read_call(args, kwargs, call)) {
    return nullptr;
  }
  call.on_cache = kOnCache;
  call.is_backward = kIsBackward;
  std::string const error = plan_error(call);
  return error.empty() ? kDict(call) : DictBuilder().string("reason", error.c_str()).finish();
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
    {"check_forward", method(py_check<check_call, false, false>), kKeywords,
     "Error text of a call; empty if fine."},
    {"check_fp8", method(py_check<check_call, false, true>), kKeywords,
     "check_forward of the ops on float8_e4m3fn."},
    {"check_cache", method(py_check<check_cache, true>), kKeywords,
     "check_forward of attend_cache."},
    {"check_append", method(py_check<check_append, true, true>), kKeywords,
     "check_forward of append_and_attend."},
    {"check_combine", method(py_check_combine), kKeywords, "check_forward of combine."},
    {"check_merge", method(py_check_merge), kKeywords, "check_combine of separate tensors."},
    {"check_quantize", method(py_check_quantize), kKeywords, "check_forward of quantize_fp8."},
    {"check_backward", method(py_check_backward), kKeywords, "check_forward of the gradients."},
    {"plan_forward", method(py_plan<false, false, plan_dict>), kKeywords,
     "How a forward problem would be run."},
    {"plan_backward", method(py_plan<false, true, backward_plan_dict>), kKeywords,
     "How its gradients would be computed."},
    {"plan_cache", method(py_plan<true, false, cache_plan_dict>), kKeywords,
     "How attend_cache would be run."},
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
