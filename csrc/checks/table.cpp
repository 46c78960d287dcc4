// The error texts of rows that a tensor does not fit.
#include "checks/table.h"

#include <vector>

namespace fa3 {
namespace {

std::string word_of(Dim dim) {
  std::string const word = kLetters[dim.letter].word;
  return dim.letter == 0 ? text(dim.plus) : dim.plus > 0 ? text(word, " + ", dim.plus) : word;
}

// "(batch, seqlen, heads, head_dim)"
std::string layout_of(Shape const& shape) {
  std::string layout;
  for (int i = 0; i < shape.rank; ++i) {
    layout += text(i > 0 ? ", " : "(", word_of(shape.dims[i]));
  }
  return layout + ")";
}

// "float16, bfloat16 or float32"
std::string names_of(DtypeSet dtypes) {
  static constexpr std::pair<DtypeSet, char const*> kNames[] = {
      {set_of(Dtype::kFloat16), "float16"},
      {set_of(Dtype::kBFloat16), "bfloat16"},
      {set_of(Dtype::kFloat32), "float32"},
      {set_of(Dtype::kFloat64), "float64"},
      {kE4M3, "float8_e4m3fn"},
      {kInt32Set, "int32"}};
  std::vector<char const*> names;
  for (auto const& [dtype, name] : kNames) {
    if (dtypes & dtype) {
      names.push_back(name);
    }
  }
  std::string list;
  for (size_t i = 0; i < names.size(); ++i) {
    list += text(i == 0 ? "" : i + 1 < names.size() ? ", " : " or ", names[i]);
  }
  return list;
}

std::string dtype_error(Solver const& solver, RowText const& row, TensorMeta const& meta) {
  auto const& [anchor_name, anchor] = solver.anchor;
  DtypeSet const dtypes = solver.dtypes[int(row.type)];
  bool const is_anchor = row.type == Type::kAnchor;
  bool const is_input = row.type == Type::kKeys || row.type == Type::kValues ||
                        row.type == Type::kOut || row.type == Type::kTables;
  bool const is_like = is_input && dtypes == set_of(anchor.dtype);
  bool const has_wide_inputs =
      is_anchor && (set_of(meta.dtype) & kCpuOnly) && dtypes == k16Bits && solver.on_cuda();
  bool const is_list = row.memory == Memory::kList && row.type == Type::kInt32;
  return solver.refuse(
      text(row.name, ".dtype to be ", is_like ? text("that of ", anchor_name, ", ") : "",
           is_like ? anchor.dtype_name : names_of(dtypes)),
      meta.dtype_name,
      has_wide_inputs ? "convert q, k and v to bfloat16 or float16"
      : is_list       ? text("call ", row.name, ".int()")
                      : "");
}

// Whether the sizes of a row follow from other tensors.
bool is_derived(Solver const& solver, RowText const& row) {
  return std::all_of(row.shape.dims, row.shape.dims + row.shape.rank, [&](Dim dim) {
    bool const is_bound = solver.sizes[dim.letter] >= 0;
    return dim.letter == 0 || (is_bound && solver.binders[dim.letter] != row.name);
  });
}

std::string whole_shape_error(Solver const& solver, RowText const& row, TensorMeta const& meta) {
  int64_t wanted[5] = {};
  for (int i = 0; i < row.shape.rank; ++i) {
    wanted[i] = solver.sizes[row.shape.dims[i].letter] + row.shape.dims[i].plus;
  }
  return solver.refuse(text(row.name, " to have the shape ", shape_text(wanted, row.shape.rank)),
                       shape_text(meta.size, std::min(meta.rank, 5)));
}

std::string rank_error(Solver const& solver, RowText const& row, TensorMeta const& meta) {
  int const rank = row.shape.rank;
  if (rank > 1 && is_derived(solver, row)) {
    return whole_shape_error(solver, row, meta);
  }
  return solver.refuse(text(row.name, " to have ", rank, rank > 1 ? " dimensions " : " dimension ",
                            layout_of(row.shape), rank > 1 ? row.note : ""),
                       text(meta.rank));
}

std::string size_error(Solver const& solver, RowText const& row, TensorMeta const& meta, int i) {
  Dim const dim = row.shape.dims[i];
  int64_t const wanted = solver.sizes[dim.letter];
  std::string const size = text(row.name, ".size(", i, ")");
  std::string const got = text(meta.size[i]);
  if (wanted < 0) {
    return solver.refuse(text(size, ", the ", word_of(dim), ", to be at least ", dim.plus), got);
  }
  char const* const binder = solver.binders[dim.letter];
  if (row.shape.rank > 1 && is_derived(solver, row)) {
    return whole_shape_error(solver, row, meta);
  }
  if (row.shape.rank == 1) {
    bool const is_batch = std::strcmp(kLetters[dim.letter].word, "batch") == 0;
    return solver.refuse(text(size, " to be the ", word_of(dim),
                              is_batch ? "" : text(" of ", binder), ", ", wanted + dim.plus),
                         got);
  }
  return solver.refuse(
      text(size, ", the ", word_of(dim), ", to be that of ", binder, ", ", wanted + dim.plus), got,
      text("tensors are ", layout_of(row.shape)));
}

std::string stride_error(Solver const& solver, RowText const& row, TensorMeta const& meta, int i) {
  if (row.shape.rank == 1) {
    return solver.refuse(text(row.name, " to be contiguous"), text("a stride of ", meta.stride[i]),
                         text("call ", row.name, ".contiguous()"));
  }
  bool const is_head_dim = std::strcmp(kLetters[row.shape.dims[i].letter].word, "head_dim") == 0;
  return solver.refuse(
      text(row.name, ".stride(", i, ") to be 1", is_head_dim ? ", the head_dim contiguous" : ""),
      text(meta.stride[i]), text("call ", row.name, ".contiguous()"));
}

}  // namespace

std::string Solver::explain(RowText const& row, TensorMeta const& meta, Misfit misfit) const {
  switch (misfit.fault) {
    case Fault::kNone:
      return {};
    case Fault::kRank:
      return rank_error(*this, row, meta);
    case Fault::kDevice:
      return refuse(
          text(row.name, " on the device of ", anchor.name, ", ", device_text(anchor.meta)),
          device_text(meta));
    case Fault::kDtype:
      return dtype_error(*this, row, meta);
    case Fault::kSize:
      return size_error(*this, row, meta, misfit.dim);
    case Fault::kStride:
      return stride_error(*this, row, meta, misfit.dim);
    case Fault::kExpanded:
      return refuse(text(row.name, " with memory for every element"),
                    text(row.name, ".stride(", misfit.dim, ") of 0"),
                    "do not pass an expanded tensor");
  }
  return {};
}

}  // namespace fa3
