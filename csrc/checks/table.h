// The tables of checks. A row says what one tensor of a call must look like: shape, dtype, memory.
// Equal letters in shapes are equal sizes; a Solver binds each letter to the first size that it
// meets and holds later tensors to it. Rows are constexpr and unrolled; text is made on failure.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>

#include "call/given_tensor.h"

namespace fa3 {

struct LetterName {
  std::string_view letter;
  char const* word;
};

inline constexpr LetterName kLetters[] = {
    {"", ""},  // a number
    {"B", "batch"},     {"S", "seqlen"},
    {"Sq", "seqlen"},   {"Sk", "seqlen"},
    {"T", "total"},     {"Tq", "total"},
    {"Tk", "total"},    {"H", "heads"},
    {"Hq", "heads"},    {"Hk", "heads"},
    {"D", "head_dim"},  {"Dv", "head_dim"},
    {"E", "batch"},     {"C", "slots"},
    {"N", "pages"},     {"P", "page size"},
    {"Np", "pages"},    {"R", "rows"},
    {"Sn", "tokens"},   {"Tn", "total"},
    {"L", "positions"}, {"Dr", "rotary_dim / 2"},
    {"X", "parts"},     {"Z", "blocks"},
};
constexpr int kLetterCount = int(std::size(kLetters));

struct Letter {
  int index = 0;

  consteval Letter(std::string_view text) {
    while (kLetters[index].letter != text) {
      ++index;  // an unknown letter does not compile
    }
  }
  consteval Letter(char const* text) : Letter(std::string_view(text)) {}
};

// The size that a letter stands for, plus a number; or a number alone.
struct Dim {
  int letter = 0;
  int plus = 0;
};

// "B Sq Hq D", "B+1", "B Sq 4".
struct Shape {
  int rank = 0;  // 0: the form has no such tensor
  Dim dims[5] = {};

  constexpr Shape() = default;
  consteval Shape(char const* text) {
    for (std::string_view rest = text; !rest.empty(); ++rank) {
      size_t const end = std::min(rest.find(' '), rest.size());
      dims[rank] = dim_of(rest.substr(0, end));
      rest.remove_prefix(std::min(end + 1, rest.size()));
    }
  }

 private:
  static consteval Dim dim_of(std::string_view text) {
    if (text[0] >= '0' && text[0] <= '9') {
      return Dim{0, text[0] - '0'};
    }
    size_t const plus = std::min(text.find('+'), text.size());
    return Dim{Letter(text.substr(0, plus)).index, plus < text.size() ? text[plus + 1] - '0' : 0};
  }
};

// Sets of dtypes, which the Solver of a call holds. Those up to kOut follow the anchor's dtype.
enum class Type {
  kAnchor,
  kLikeAnchor,
  kKeys,
  kValues,
  kOut,
  kWide,
  kFloat32,
  kInt32,
  kNewKeys,
  kNewValues,
  kTables,
  kReal
};
constexpr int kTypeCount = int(Type::kReal) + 1;

using DtypeSet = unsigned;
constexpr DtypeSet set_of(Dtype dtype) { return 1u << int(dtype); }
constexpr DtypeSet k16Bits = set_of(Dtype::kFloat16) | set_of(Dtype::kBFloat16);
constexpr DtypeSet kE4M3 = set_of(Dtype::kFloat8E4M3);
constexpr DtypeSet k32Bits = set_of(Dtype::kFloat32);
constexpr DtypeSet kCpuOnly = k32Bits | set_of(Dtype::kFloat64);
constexpr DtypeSet kInt32Set = 1u << (int(Dtype::kOther) + 1);

// kColumns: on CUDA the last dimension is contiguous; kList: everywhere. kOwn: elements do not
// share memory.
enum class Memory { kAny, kColumns, kList, kOwn, kOwnColumns };
constexpr bool is_own(Memory memory) { return memory >= Memory::kOwn; }

using enum Type;
using enum Memory;

template <class Call>
struct Row {
  char const* name;
  TensorMeta const* (*of)(Call const&);  // gives nullptr if the call lacks it
  Type type;
  Memory memory;
  Shape shapes[4];  // by form of the call: dense, packed, ...
};

constexpr TensorMeta const* pointer_to(TensorMeta const& meta) { return &meta; }
constexpr TensorMeta const* pointer_to(std::optional<TensorMeta> const& meta) {
  return meta ? &*meta : nullptr;
}

// A tensor of a call: its member, or that of one of its groups of arguments.
template <class Group, class Field>
Group group_type(Field Group::*);

template <auto kMember, class Call>
constexpr TensorMeta const* at(Call const& call) {
  using Group = decltype(group_type(kMember));
  if constexpr (std::is_same_v<Group, Call>) {
    return pointer_to(call.*kMember);
  } else {
    return pointer_to(call.template group<Group>().*kMember);
  }
}

enum class Fault { kNone, kRank, kDevice, kDtype, kSize, kStride, kExpanded };

struct Misfit {
  Fault fault = Fault::kNone;
  int dim = 0;
};

// What a tensor's row says, without its call.
struct RowText {
  char const* name;
  Type type;
  Memory memory;
  Shape shape;
  char const* note;  // behind a wrong rank: why the call has this form
};

struct Solver {
  char const* op;
  NamedTensor anchor;  // the device of all
  DtypeSet dtypes[kTypeCount] = {};
  int64_t sizes[kLetterCount];        // -1: not bound
  char const* binders[kLetterCount];  // the tensors that bound them

  Solver(char const* op_, NamedTensor anchor_) : op(op_), anchor(anchor_) {
    std::fill(sizes, sizes + kLetterCount, -1);
    sizes[0] = 0;
    DtypeSet const own = set_of(anchor.meta.dtype);
    bool const is_float64 = anchor.meta.dtype == Dtype::kFloat64;
    std::fill(dtypes, dtypes + int(Type::kWide), own);
    set(Type::kWide, is_float64 ? own : k32Bits);
    set(Type::kFloat32, k32Bits);
    set(Type::kInt32, kInt32Set);
  }

  void set(Type type, DtypeSet dtype_set) { dtypes[int(type)] = dtype_set; }

  void bind(Letter letter, int64_t size, char const* binder) {
    sizes[letter.index] = size;
    binders[letter.index] = binder;
  }

  int64_t operator[](Letter letter) const { return sizes[letter.index]; }

  // Whether q, k and v are e4m3.
  bool is_fp8() const { return dtypes[int(Type::kAnchor)] == kE4M3; }

  bool on_cuda() const { return anchor.meta.device == DeviceType::kCuda; }

  [[gnu::cold]] std::string refuse(std::string const& expected, std::string const& got,
                                   std::string const& hint = "") const {
    return error_text(op, expected, got, hint);
  }

  // The error text of a row that does not fit.
  [[gnu::cold]] std::string explain(RowText const& row, TensorMeta const& meta,
                                    Misfit misfit) const;

  [[gnu::always_inline]] Misfit fit(RowText const& row, TensorMeta const& meta) {
    if (meta.rank != row.shape.rank) {
      return {Fault::kRank};
    }
    if (!same_device(meta, anchor.meta)) {
      return {Fault::kDevice};
    }
    bool const has_dtype = row.type == Type::kInt32
                               ? std::strcmp(meta.dtype_name, "int32") == 0
                               : (dtypes[int(row.type)] & set_of(meta.dtype)) != 0;
    if (!has_dtype) {
      return {Fault::kDtype};
    }
    for (int i = 0; i < row.shape.rank; ++i) {
      Dim const dim = row.shape.dims[i];
      int64_t const size = meta.size[i] - dim.plus;
      if (sizes[dim.letter] < 0) {
        sizes[dim.letter] = size;
        binders[dim.letter] = row.name;
      }
      if (sizes[dim.letter] != size || size < 0) {
        return {Fault::kSize, i};
      }
    }
    return fit_memory(row, meta);
  }

 private:
  [[gnu::always_inline]] Misfit fit_memory(RowText const& row, TensorMeta const& meta) const {
    int const last = row.shape.rank - 1;
    bool const wants_columns =
        row.memory == Memory::kList ||
        ((row.memory == Memory::kColumns || row.memory == Memory::kOwnColumns) && on_cuda());
    if (wants_columns && meta.stride[last] != 1 && meta.size[last] > 1) {
      return {Fault::kStride, last};
    }
    for (int i = 0; is_own(row.memory) && i < row.shape.rank; ++i) {
      if (meta.stride[i] == 0 && meta.size[i] > 1 && !is_empty(meta)) {
        return {Fault::kExpanded, i};
      }
    }
    return {};
  }
};

template <auto const& kTable, int kForm, size_t kIndex, class Call>
[[gnu::always_inline]] inline bool fits(Solver& solver, Call const& call, char const* note,
                                        std::string& error) {
  constexpr auto const& row = kTable[kIndex];
  if constexpr (row.shapes[kForm].rank > 0) {
    if (TensorMeta const* const meta = row.of(call)) {
      RowText const text{row.name, row.type, row.memory, row.shapes[kForm], note};
      Misfit const misfit = solver.fit(text, *meta);
      if (misfit.fault != Fault::kNone) [[unlikely]] {
        error = solver.explain(text, *meta, misfit);
        return false;
      }
    }
  }
  return true;
}

// What the first tensor that does not fit its row says, or "".
template <auto const& kTable, int kForm = 0, class Call>
std::string check_rows(Solver& solver, Call const& call, char const* note = "") {
  std::string error;
  [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    (void)(fits<kTable, kForm, kIndex>(solver, call, note, error) && ...);
  }(std::make_index_sequence<std::size(kTable)>());
  return error;
}

// Names a tensor that shares memory with one that is written, or gives nullptr.
template <auto const& kTable, size_t kIndex, size_t... kOthers>
[[gnu::always_inline]] inline char const* written_over(TensorMeta const* const* tensors,
                                                       std::index_sequence<kOthers...>) {
  TensorMeta const* const own = is_own(kTable[kIndex].memory) ? tensors[kIndex] : nullptr;
  char const* found = nullptr;
  auto const compare = [&](TensorMeta const* other, char const* name) {
    found = other && shares_memory(*own, *other) ? name : nullptr;
    return found == nullptr;
  };
  if (own) {
    (void)((kOthers == kIndex || compare(tensors[kOthers], kTable[kOthers].name)) && ...);
  }
  return found;
}

// Error if a tensor that is written shares memory with another one of the table.
template <auto const& kTable, class Call>
std::string check_own_memory(Solver const& solver, Call const& call) {
  return [&]<size_t... kIndex>(std::index_sequence<kIndex...> all) {
    TensorMeta const* const tensors[] = {kTable[kIndex].of(call)...};
    char const* name = nullptr;
    char const* other = nullptr;
    (void)((other = written_over<kTable, kIndex>(tensors, all), name = kTable[kIndex].name,
            other == nullptr) &&
           ...);
    return other == nullptr ? std::string()
                            : solver.refuse(text(name, " with memory of its own"),
                                            text("the memory of ", other));
  }(std::make_index_sequence<std::size(kTable)>());
}

// What the first check that finds something wrong says, or "". Each may rely on those before it.
template <auto kCheck, auto... kChecks, class... Arguments>
[[gnu::always_inline]] inline std::string first_error(Arguments&... arguments) {
  if constexpr (sizeof...(kChecks) == 0) {
    return kCheck(arguments...);
  } else {
    std::string error = kCheck(arguments...);
    return error.empty() ? first_error<kChecks...>(arguments...) : error;
  }
}

}  // namespace fa3
