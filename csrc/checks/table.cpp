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
      append(layout, is_own ? text(solver.word(letter), plus > 0 ? text(" + ", plus) : "")
                            : text(solver[letter] + plus));
    }
  }
  append(layout, layout.find(',') == layout.npos ? ",)" : ")");
  Letter const first = shape.dims[0].letter;
  return solver.lacks(first) ? text(layout, " with ", letter_at(first.index).second) : layout;
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

bool Solver::refuse(std::string const& expected, std::string const& got, std::string const& hint) {
  error = error_text(op, expected, got, hint);
  return false;
}

bool Solver::refuse_number(Range const& range, std::string const& name, int64_t got,
                           char const* hint) {
  auto const [least, most, step, note] = range;
  std::string const multiple = step > 1 && least < most ? text(" a multiple of ", step) : "";
  std::string const limits = least == most        ? text(" ", least)
                             : most != kUnlimited ? text(" from ", least, " to ", most)
                             : step > 1           ? ""
                                                  : text(" ", least, " or more");
  return refuse(text(name, " to be", multiple, limits, note), text(got), hint);
}

bool Solver::refuse_shape(Form const& form, TensorMeta const& meta) {
  int64_t const largest = *std::max_element(meta.size, meta.size + 5);
  if (largest > kMostIndex && on_cuda()) {
    return refuse(text("sizes of ", form.name, " of at most ", kMostIndex), text(largest));
  }
  return refuse(text(form.name, " to have the shape ", layout_text(*this, form, form.shape),
                     has_other(form) ? " or " + layout_text(*this, form, form.other) : ""),
                shape_text(meta.size, std::min(meta.rank, 5)));
}

bool Solver::refuse_device(Form const& form, TensorMeta const& meta) {
  return refuse(text(form.name, " on the device of ", anchor.name, ", ", device_text(anchor.meta)),
                device_text(meta));
}

bool Solver::refuse_dtype(Form const& form, TensorMeta const& meta) {
  DtypeSet const own = dtypes[form.type];
  bool const is_like = form.type != kAnchor && form.type < kNewK && own == set_of(anchor.meta);
  bool const is_wide = form.type == kAnchor && (set_of(meta) & kCpuOnly) && own == k16Bits;
  return refuse(
      text(form.name, ".dtype to be ",
           is_like ? text("that of ", anchor.name, ", ", anchor.meta.dtype_name) : names_of(own)),
      meta.dtype_name,
      is_wide               ? "convert q, k and v to bfloat16 or float16"
      : form.type == kInt32 ? text("call ", form.name, ".int()")
                            : "");
}

bool Solver::refuse_stride(Form const& form, TensorMeta const& meta, int dim) {
  bool const is_shared = (form.memory & kOwn) && meta.stride[dim] == 0;
  char const* const expected = is_shared             ? "not to be 0"
                               : dim < meta.rank - 1 ? "to be 4"
                                                     : "to be 1";
  return refuse(
      text(form.name, ".stride(", dim, ") ", expected), text(meta.stride[dim]),
      is_shared ? "do not pass an expanded tensor" : text("call ", form.name, ".contiguous()"));
}

bool Solver::refuse_chunks(Form const& form, TensorMeta const& meta) {
  return refuse(text(form.name, " with an address and strides of multiples of 16 bytes"),
                text("address ", meta.address, " and strides of ",
                     shape_text(meta.stride, meta.rank), " elements"),
                "it is never copied: allocate it with rows of a multiple of 16 bytes");
}

}  // namespace fa3
