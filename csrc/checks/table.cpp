// The error texts of tensors and numbers.
#include "checks/table.h"

#include <span>

namespace fa3 {
namespace {

std::string entry_word(int index) {
  std::string_view rest = kLetters;
  for (int i = 0; i < index; ++i) {
    rest.remove_prefix(rest.find('|') + 1);
  }
  std::string_view const entry = rest.substr(0, rest.find('|'));
  return std::string(entry.substr(entry.find(' ') + 1));
}

std::string dim_word(Solver const& solver, Dim dim) {
  return dim.letter.index == 0 ? text(dim.plus)
         : dim.plus > 0        ? text(solver.word(dim.letter), " + ", dim.plus)
                               : solver.word(dim.letter);
}

// "(batch, seqlen, heads, head_dim)"
std::string layout_of(Solver const& solver, Shape const& shape) {
  std::string layout;
  for (Dim const& dim : std::span(shape.dims, shape.rank)) {
    if (!solver.lacks(dim.letter)) {
      layout += text(layout.empty() ? "(" : ", ", dim_word(solver, dim));
    }
  }
  return layout + ")";
}

// "4 dimensions (batch, seqlen, heads, head_dim)"
std::string dimensions_of(Solver const& solver, Shape const& shape) {
  Letter const first = shape.dims[0].letter;
  bool const is_packed = solver.lacks(first);
  int const rank = shape.rank - is_packed;
  return text(rank, rank > 1 ? " dimensions " : " dimension ", layout_of(solver, shape),
              is_packed ? text(" with ", entry_word(first.index)) : "");
}

// "(2, 16, 4, 64)" if all sizes come from other tensors, else "".
std::string bound_shape(Solver const& solver, Form const& form, Shape const& shape) {
  int64_t sizes[5] = {};
  int rank = 0;
  for (auto const& [letter, plus] : std::span(shape.dims, shape.rank)) {
    if (solver.lacks(letter)) {
      continue;
    }
    if (letter.index != 0 && (solver[letter] < 0 || solver.binder(letter) == form.name)) {
      return "";
    }
    sizes[rank++] = solver[letter] + plus;
  }
  return rank > 1 ? shape_text(sizes, rank) : "";
}

bool refuse_shape(Solver& solver, Form const& form, TensorMeta const& meta) {
  std::string const other = bound_shape(solver, form, form.other);
  return solver.refuse(text(form.name, " to have the shape ", bound_shape(solver, form, form.shape),
                            other.empty() ? "" : text(", or ", other, form.note)),
                       shape_text(meta.size, std::min(meta.rank, 5)));
}

// "float16, bfloat16 or float32"
std::string names_of(DtypeSet dtypes) {
  static constexpr char const* kNames[] = {"float16", "bfloat16", "float8_e4m3fn", "float32",
                                           "float64", "other",    "int32"};
  std::string list;
  for (int i = 0; dtypes >> i != 0; ++i) {
    if ((dtypes >> i) % 2 != 0) {
      list += text(list.empty() ? "" : dtypes >> (i + 1) != 0 ? ", " : " or ", kNames[i]);
    }
  }
  return list;
}

bool refuse_dtype(Solver& solver, Form const& form, TensorMeta const& meta) {
  auto const& [anchor_name, anchor] = solver.anchor;
  DtypeSet const dtypes = solver.dtypes[form.type];
  bool const is_like = form.type != kAnchor && form.type < kNewKeys && dtypes == set_of(anchor);
  bool const is_wide = form.type == kAnchor && (set_of(meta) & kCpuOnly) && dtypes == k16Bits;
  return solver.refuse(
      text(form.name, ".dtype to be ",
           is_like ? text("that of ", anchor_name, ", ", anchor.dtype_name) : names_of(dtypes)),
      meta.dtype_name,
      is_wide               ? "convert q, k and v to bfloat16 or float16"
      : form.type == kInt32 ? text("call ", form.name, ".int()")
                            : "");
}

bool refuse_size(Solver& solver, Form const& form, TensorMeta const& meta, int i) {
  Shape const& shape = form.shape_of(meta.rank);
  Dim const dim = shape.dims[i + shape.rank - meta.rank];
  int64_t const wanted = solver[dim.letter];
  bool const is_number = dim.letter.index == 0;
  return solver.refuse(text(form.name, ".size(", i, ")",
                            is_number ? "" : text(", the ", dim_word(solver, dim), ","), " to be ",
                            wanted < 0  ? "at least "
                            : is_number ? ""
                                        : text("that of ", solver.binder(dim.letter), ", "),
                            std::max<int64_t>(wanted, 0) + dim.plus),
                       text(meta.size[i]),
                       meta.rank > 1 ? text("tensors are ", layout_of(solver, shape)) : "");
}

}  // namespace

std::string Solver::word(Letter letter) const { return entry_word(size_index(letter)); }

bool Solver::refuse(std::string const& expected, std::string const& got, std::string const& hint) {
  error = error_text(op, expected, got, hint);
  return false;
}

bool Solver::refuse(Range const& range, std::string const& name, int64_t got,
                    std::string const& hint) {
  auto const [least, most, step, note] = range;
  return refuse(
      text(name, " to be ", step > 1 ? text("a multiple of ", step, " ") : "",
           most == kUnlimited ? text(least, " or more") : text("from ", least, " to ", most), note),
      text(got), hint);
}

bool Solver::refuse(Form const& form, TensorMeta const& meta, Fault fault, int dim) {
  char const* const name = form.name;
  std::string const stride = text(name, ".stride(", dim, ")");
  if ((fault == Fault::kRank || fault == Fault::kSize) &&
      !bound_shape(*this, form, form.shape).empty()) {
    return refuse_shape(*this, form, meta);
  }
  switch (fault) {
    case Fault::kRank:
      return refuse(text(name, " to have ", dimensions_of(*this, form.shape),
                         form.other.rank > 0 ? text(" or ", dimensions_of(*this, form.other)) : ""),
                    text(meta.rank));
    case Fault::kDevice:
      return refuse(text(name, " on the device of ", anchor.name, ", ", device_text(anchor.meta)),
                    device_text(meta));
    case Fault::kDtype:
      return refuse_dtype(*this, form, meta);
    case Fault::kSize:
      return refuse_size(*this, form, meta, dim);
    case Fault::kStride:
      return refuse(
          text(stride, " to be 1", form.memory == kList ? "" : ", the head_dim contiguous"),
          text(meta.stride[dim]), text("call ", name, ".contiguous()"));
    case Fault::kExpanded:
      return refuse(text(name, " with memory for every element"), text(stride, " of 0"),
                    "do not pass an expanded tensor");
  }
  return false;
}

}  // namespace fa3
