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

// A shape as "(batch, seqlen, heads, head_dim)", and as "(2, 16, 4, 64)" if all its sizes come from
// other tensors.
struct Layout {
  int rank = 0;
  std::string words, sizes;
  bool is_bound = true;

  Layout(Solver const& solver, Form const& form, Shape const& shape) {
    for (Dim const& dim : std::span(shape.dims, shape.rank)) {
      auto const& [letter, plus] = dim;
      if (solver.lacks(letter)) {
        continue;
      }
      char const* const comma = rank++ > 0 ? ", " : "(";
      append(words, text(comma, solver.word(dim)));
      append(sizes, text(comma, solver[letter] + plus));
      bool const is_number = letter.index == 0;
      is_bound &= is_number || (solver[letter] >= 0 && solver.binder(letter) != form.name);
    }
    is_bound &= rank > 1;
  }
};

// "4 dimensions (batch, seqlen, heads, head_dim)"
std::string dimensions_of(Layout const& layout, Shape const& shape) {
  return text(layout.rank, layout.rank > 1 ? " dimensions " : " dimension ", layout.words, ")",
              layout.rank < shape.rank ? " with " + entry_word(shape.dims[0].letter.index) : "");
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

}  // namespace

std::string Solver::word(Dim dim) const {
  auto const [letter, plus] = dim;
  std::string const word = entry_word(size_index(letter));
  return letter.index == 0 ? text(plus) : plus > 0 ? text(word, " + ", plus) : word;
}

bool Solver::refuse(std::string const& expected, std::string const& got, std::string const& hint) {
  error = error_text(op, expected, got, hint);
  return false;
}

bool Solver::refuse_number(Range const& range, std::string const& name, int64_t got,
                           char const* hint) {
  auto const [least, most, step, note] = range;
  std::string const limits = most == kUnlimited     ? text(least, " or more")
                             : least == -kUnlimited ? text("at most ", most)
                                                    : text("from ", least, " to ", most);
  return refuse(
      text(name, " to be ", step > 1 ? text("a multiple of ", step, " ") : "", limits, note),
      text(got), hint);
}

bool Solver::refuse_shape(Form const& form, TensorMeta const& meta, int i) {
  Layout const own(*this, form, form.shape);
  Layout const other(*this, form, form.other);
  if (own.is_bound) {
    return refuse(text(form.name, " to have the shape ", own.sizes, ")",
                       other.is_bound ? text(", or ", other.sizes, ")", form.note) : ""),
                  shape_text(meta.size, std::min(meta.rank, 5)));
  }
  if (i < 0) {
    return refuse(text(form.name, " to have ", dimensions_of(own, form.shape),
                       other.rank > 0 ? " or " + dimensions_of(other, form.other) : ""),
                  text(meta.rank));
  }
  Shape const& shape = form.shape_of(meta.rank);
  Dim const dim = shape.dims[i + shape.rank - meta.rank];
  int64_t const wanted = (*this)[dim.letter];
  bool const is_number = dim.letter.index == 0;
  return refuse(
      text(form.name, ".size(", i, ")", is_number ? "" : text(", the ", word(dim), ","), " to be ",
           wanted < 0  ? "at least "
           : is_number ? ""
                       : text("that of ", binder(dim.letter), ", "),
           std::max<int64_t>(wanted, 0) + dim.plus),
      text(meta.size[i]),
      meta.rank > 1 ? text("tensors are ", Layout(*this, form, shape).words, ")") : "");
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
  std::string const stride = text(form.name, ".stride(", dim, ")");
  if ((form.memory & kOwn) && meta.stride[dim] == 0) {
    return refuse(text(form.name, " with memory for every element"), text(stride, " of 0"),
                  "do not pass an expanded tensor");
  }
  return refuse(text(stride, " to be 1", form.memory == kList ? "" : ", the head_dim contiguous"),
                text(meta.stride[dim]), text("call ", form.name, ".contiguous()"));
}

}  // namespace fa3
