// The launch on shared keys (plan/shared_prefix.h), for the tests' module.
#pragma once

#include "plan/shared_prefix.h"
#include "cache_bindings.h"

namespace fa3::host {

using SizesAndStrides = std::pair<std::vector<int64_t>, std::vector<int64_t>>;

// visitor(name, tensor) for each tensor of a call.
template <class Visitor>
void visit_tensors(AttentionCall& call, Visitor const& visitor) {
  call.visit([&](char const* name, auto& field) {
    using Field = std::remove_reference_t<decltype(field)>;
    if constexpr (std::is_same_v<Field, TensorMeta>) {
      visitor(name, field);
    } else if constexpr (std::is_same_v<Field, std::optional<TensorMeta>>) {
      if (field) {
        visitor(name, *field);
      }
    }
  });
}

// How many parts the shared keys of a call are, the kernel of their launch, its tensors by name,
// and the keys of a part. shapes, numbers: as of plan_of_cache(). strides: of tensors that are not
// contiguous.
inline pybind11::tuple launch_of_prefix(int dtype, pybind11::dict shapes, pybind11::dict numbers,
                                        std::map<std::string, std::vector<int64_t>> const& strides,
                                        int sm_count) {
  AttentionCall call = cache_call(Dtype(dtype), shapes, numbers);
  call.device.sm_count = sm_count;
  visit_tensors(call, [&](std::string const& name, TensorMeta& meta) {
    if (name.ends_with("_descale")) {
      meta.dtype = Dtype::kFloat32;
      meta.dtype_name = "float32";
    }
    if (auto const own = strides.find(name); own != strides.end()) {
      std::copy(own->second.begin(), own->second.end(), meta.stride);
    }
  });
  TensorMeta const queries = as_one_sequence(call.q);
  PrefixParts const parts = prefix_parts(call, queries);
  AttentionCall shared = call_of_prefix(call, queries, parts);
  for (AttentionCall const* const one : {&call, &shared}) {
    if (std::string const error = check_cache(*one); !error.empty()) {
      throw std::invalid_argument(error);
    }
  }
  std::map<std::string, SizesAndStrides> tensors;
  visit_tensors(shared, [&](char const* name, TensorMeta const& meta) {
    tensors[name] = {{meta.size, meta.size + meta.rank}, {meta.stride, meta.stride + meta.rank}};
  });
  FwdPlan const plan = plan_cache(problem_of(shared));
  return pybind11::make_tuple(parts.count, kFwdVariants[plan.variant].name, tensors,
                              shared.cache.cache_length);
}

inline void bind_prefix(pybind11::module_& m) { m.def("launch_of_prefix", &launch_of_prefix); }

}  // namespace fa3::host
