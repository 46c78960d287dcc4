// The error texts of tensors and numbers.
#include "checks/table.h"

#include <span>

namespace fa3 {
namespace {

// A shape as "(2, seqlen, heads, 64)": sizes that come from other tensors are numbers.
std::string layout_text(Solver const& solver, Form const& form, Shape const& shape) {
  std::string layout;
  for (Dim const& dim : std::span(shape.dims, shape.rank)) {
    auto const& [letter, plus, or_one] = dim;
    if (!solver.lacks(letter)) {
      bool const is_own =
          letter.index != 0 && (solver[letter] < 0 || solver.binder(letter) == form.name);
      append(layout, layout.empty() ? "(" : ", ");
      append(layout, or_one && (is_own || solver[letter] != 1) ? "1 or " : "");
      append(layout, is_own ? solver.word(dim) : std::to_string(solver[letter] + plus));
    }
  }
  Letter const first = shape.dims[0].letter;
  return layout + (solver.lacks(first) ? text(") with ", letter_at(first.index).second) : ")");
}

// "float16, bfloat16 or float32"
std::string names_of(DtypeSet dtypes) {
  std::string list;
  for (int i = 0; dtypes >> i != 0; ++i) {
    if ((dtypes >> i) % 2 != 0) {
      list += text(list.empty() ? "" : dtypes >> (i + 1) != 0 ? ", " : " or ", kDtypeNames[i]);
    }
  }
  return list;
}

}  // namespace

std::string Solver::word(Dim dim) const {
  auto const [letter, plus, or_one] = dim;
  std::string const word(letter_at(size_index(letter)).second);
  return plus > 0 ? text(word, " + ", plus) : word;
}

bool Solver::refuse(std::string const& expected, std::string const& got, std::string const& hint) {
  error = error_text(op, expected, got, hint);
  return false;
}

bool Solver::refuse_number(Range const& range, std::string const& name, int64_t got,
                           char const* hint) {
  auto const [least, most, step, note] = range;
  bool const has_step = step > 1;
  std::string const limits = least == most        ? text(least)
                             : most != kUnlimited ? text("from ", least, " to ", most)
                             : has_step           ? ""
                                                  : text(least, " or more");
  return refuse(text(name, " to be ", has_step ? text("a multiple of ", step) : "",
                     has_step && !limits.empty() ? " " : "", limits, note),
                text(got), hint);
}

bool Solver::refuse_shape(Form const& form, TensorMeta const& meta) {
  int64_t const largest = *std::max_element(meta.size, meta.size + 5);
  if (largest > kMostIndex && on_cuda()) {
    return refuse(text("sizes of ", form.name, " of at most ", kMostIndex), text(largest));
  }
  bool const has_other = form.other.rank > 0 && !lacks(form.other.dims[0].letter);
  return refuse(text(form.name, " to have the shape ", layout_text(*this, form, form.shape),
                     has_other ? " or " + layout_text(*this, form, form.other) : ""),
                shape_text(meta.size, std::min(meta.rank, 5)));
}

bool Solver::refuse_device(Form const& form, TensorMeta const& meta) {
  return refuse(text(form.name, " on the device of ", anchor.name, ", ", device_text(anchor.meta)),
                device_text(meta));
}

bool Solver::refuse_dtype(Form const& form, TensorMeta const& meta) {
  DtypeSet const own = dtypes[form.type];
  bool const is_like = form.type != kAnchor && form.type < kNewKeys && own == set_of(anchor.meta);
  bool const is_wide = form.type == kAnchor && (set_of(meta) & kCpuOnly) && own == k16Bits;
  return refuse(
      text(form.name, ".dtype to be ",
           is_like ? text("that of ", anchor.name, ", ", anchor.meta.dtype_name) : names_of(own)),
      meta.dtype_name,
      is_wide               ? "convert q, k and v to bfloat16 or float16"
      : form.type == kInt32 ? text("call ", form.name, ".int()")
                            : "");
}

bool Solver::refuse_memory(Form const& form, TensorMeta const& meta, int dim) {
  bool const is_shared = (form.memory & kOwn) && meta.stride[dim] == 0;
  return refuse(
      text(form.name, ".stride(", dim, ") ", is_shared ? "not to be 0" : "to be 1"),
      text(meta.stride[dim]),
      is_shared ? "do not pass an expanded tensor" : text("call ", form.name, ".contiguous()"));
}

}  // namespace fa3
