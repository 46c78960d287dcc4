// The language of the checks. A Row says what one tensor of a call must look like: shape, dtype,
// memory. Equal letters in shapes are equal sizes: a Solver binds each letter to the first size
// that it meets and holds later tensors to it. Tables are constexpr and unrolled. A check gives
// true, or has called Solver::refuse(), which alone makes text.
#pragma once

#include <cstring>
#include <limits>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>

#include "call/given_tensor.h"

namespace fa3 {

// Letters and their words. One in capitals is the name of a size. A small one stands for one of
// those, or for no dimension where the argument that is its word makes a call packed.
inline constexpr std::string_view kLetters =
    "|B batch|Sq seqlen|Sk seqlen|Sn tokens|Tq total|Tk total|Tn total|Hq heads|Hk heads|D head_dim"
    "|Dv head_dim|E batch|C slots|N pages|P page size|Np pages|R rows|L positions"
    "|Dr rotary_dim / 2|X parts|Z blocks|Zq blocks|Zk blocks|Bz batch|b cu_seqlens_q"
    "|bk cu_seqlens_k|bn cu_seqlens_k_new|bx cu_seqlens|s |sk |sn |sx |e |c |bt |bs ";
constexpr int kLetterCount = int(std::ranges::count(kLetters, '|')) + 1;

struct Letter {
  int index = 0;

  consteval Letter(std::string_view letter) {
    for (std::string_view rest = kLetters; rest.substr(0, rest.find_first_of(" |")) != letter;) {
      rest.remove_prefix(rest.find('|') + 1);  // an unknown letter does not compile
      ++index;
    }
  }
  consteval Letter(char const* letter) : Letter(std::string_view(letter)) {}
};
constexpr int kSizeCount = Letter("b").index;

// The size that a letter stands for, plus a number; or a number alone.
struct Dim {
  Letter letter = "";
  int plus = 0;
};

// "B Sq Hq D", "B+1", "B Sq 4".
struct Shape {
  int rank = 0;
  Dim dims[5] = {};

  constexpr Shape() = default;
  consteval Shape(char const* text) {
    for (std::string_view rest = text; !rest.empty(); ++rank) {
      std::string_view const word = rest.substr(0, rest.find(' '));
      size_t const letters = word.find_first_of("+0123456789");
      bool const has_number = letters != word.npos;
      dims[rank] = {Letter(word.substr(0, letters)), has_number ? word.back() - '0' : 0};
      rest.remove_prefix(word.size() + (word.size() < rest.size()));
    }
  }
};

// Sets of dtypes, which the Solver of a call holds. By default those up to kNewValues are the
// anchor's.
enum Type { kAnchor, kKeys, kValues, kOut, kTables, kNewKeys, kNewValues, kWide, kFloat32, kInt32 };

using DtypeSet = unsigned;
constexpr DtypeSet set_of(Dtype dtype) { return 1u << int(dtype); }
constexpr DtypeSet set_of(TensorMeta const& meta) { return set_of(meta.dtype); }
constexpr DtypeSet k16Bits = set_of(Dtype::kFloat16) | set_of(Dtype::kBFloat16);
constexpr DtypeSet kE4M3 = set_of(Dtype::kFloat8E4M3);
constexpr DtypeSet k32Bits = set_of(Dtype::kFloat32);
constexpr DtypeSet kCpuOnly = k32Bits | set_of(Dtype::kFloat64);
constexpr DtypeSet kInt32Set = 1u << (int(Dtype::kOther) + 1);

// kColumns: on CUDA the last dimension is contiguous; kList: everywhere. kOwn: elements do not
// share memory.
enum Memory { kAny, kColumns, kList, kOwn, kOwnColumns };

// What a tensor must look like. other: the shape of a tensor of another rank; note: what that is.
struct Form {
  char const* name;
  Type type;
  Shape shape;
  Memory memory = kAny;
  Shape other = {};
  char const* note = "";

  constexpr Shape const& shape_of(int rank) const {
    return rank > 0 && rank == other.rank ? other : shape;
  }
};

// passes: bits of the passes that check the tensor. of: gives nullptr if the call lacks it.
template <class Call>
struct Row {
  unsigned passes;
  TensorMeta const* (*of)(Call const&);
  Form form;
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

// holds(form, tensor) for all tensors of these passes.
template <auto const& kTable, unsigned kPasses, class Call, class Holds>
[[gnu::always_inline]] inline bool all_rows(Call const& call, Holds const& holds) {
  auto const holds_row = [&]<size_t kIndex>() __attribute__((always_inline)) {
    constexpr auto const& row = kTable[kIndex];
    if constexpr ((row.passes & kPasses) != 0) {
      TensorMeta const* const meta = row.of(call);
      return meta == nullptr || holds(row.form, *meta);
    }
    return true;
  };
  return [&]<size_t... kIndex>(std::index_sequence<kIndex...>) __attribute__((always_inline)) {
    return (holds_row.template operator()<kIndex>() && ...);
  }(std::make_index_sequence<std::size(kTable)>());
}

// Numbers that an argument may have.
constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();
struct Range {
  int64_t least = 0;
  int64_t most = kUnlimited;
  int64_t step = 1;
  char const* note = "";  // what its limits follow from

  bool has(int64_t value) const { return value >= least && value <= most && value % step == 0; }
};

enum class Fault { kRank, kDevice, kDtype, kSize, kStride, kExpanded };

struct Solver {
  char const* op;
  NamedTensor anchor;  // the device of all
  std::string error = {};
  DtypeSet dtypes[kInt32 + 1];
  int64_t sizes[kSizeCount];        // -1: not bound
  char const* binders[kSizeCount];  // the tensors that bound them
  int8_t meanings[kLetterCount] = {};

  Solver(char const* op_, NamedTensor anchor_, DtypeSet types) : op(op_), anchor(anchor_) {
    DtypeSet const own = set_of(anchor.meta);
    std::fill(dtypes, dtypes + kWide, own);
    dtypes[kAnchor] = types;
    dtypes[kWide] = anchor.meta.dtype == Dtype::kFloat64 ? own : k32Bits;
    dtypes[kFloat32] = k32Bits;
    dtypes[kInt32] = kInt32Set;
    std::fill(sizes, sizes + kSizeCount, -1);
    sizes[0] = 0;
  }

  // What a small letter stands for.
  void rename(Letter letter, Letter means) { meanings[letter.index] = int8_t(means.index); }

  // Small letters of a batch and of rows: without a batch if packed.
  void pack(bool is_packed, Letter batch, Letter rows, Letter seqlen, Letter total) {
    meanings[batch.index] = is_packed ? -1 : int8_t(Letter("B").index);
    rename(rows, is_packed ? total : seqlen);
  }
  bool lacks(Letter letter) const { return meanings[letter.index] < 0; }

  void bind(Letter letter, int64_t size, char const* binder) {
    sizes[letter.index] = size;
    binders[letter.index] = binder;
  }
  [[gnu::always_inline]] int size_index(Letter letter) const {
    return letter.index < kSizeCount ? letter.index : meanings[letter.index];
  }
  int64_t operator[](Letter letter) const { return sizes[size_index(letter)]; }
  char const* binder(Letter letter) const { return binders[size_index(letter)]; }

  [[gnu::cold]] std::string word(Letter letter) const;

  bool is_fp8() const { return dtypes[kAnchor] == kE4M3; }
  bool on_cuda() const { return anchor.meta.device == DeviceType::kCuda; }

  [[gnu::cold]] bool refuse(std::string const& expected, std::string const& got,
                            std::string const& hint = "");
  [[gnu::cold]] bool refuse(Form const& form, TensorMeta const& meta, Fault fault, int dim = 0);
  [[gnu::cold]] bool refuse(Range const& range, std::string const& name, int64_t got,
                            std::string const& hint = "");
  bool in_range(char const* name, int64_t value, Range const& range, char const* hint = "") {
    return range.has(value) || refuse(range, name, value, hint);
  }

  // The size of a dimension; a name like "q.size(3), the head_dim," is made on failure.
  bool in_range(NamedTensor const& tensor, int dim, char const* word, Range const& range,
                char const* hint = "") {
    int64_t const size = tensor.meta.size[dim];
    return range.has(size) ||
           refuse(range, text(tensor.name, ".size(", dim, "), the ", word, ","), size, hint);
  }

  // A tensor that is written, if it is given, shares no memory with another one.
  bool apart(char const* name, TensorMeta const* own, char const* other_name,
             TensorMeta const* other) {
    return !own || !other || own == other || !shares_memory(*own, *other) ||
           refuse(text(name, " with memory of its own"), text("the memory of ", other_name));
  }

  // WHY the loop over the letters, which are constants: `absent` is none.
  [[gnu::always_inline]] bool fits(Form const& form, TensorMeta const& meta) {
    Shape const& shape = form.shape_of(meta.rank);
    int const absent = lacks(shape.dims[0].letter);
    int const last = shape.rank - absent - 1;
    if (meta.rank != last + 1) {
      return refuse(form, meta, Fault::kRank);
    }
    if (!same_device(meta, anchor.meta)) {
      return refuse(form, meta, Fault::kDevice);
    }
    bool const has_dtype = form.type == kInt32 ? std::strcmp(meta.dtype_name, "int32") == 0
                                               : (dtypes[form.type] & set_of(meta)) != 0;
    if (!has_dtype) {
      return refuse(form, meta, Fault::kDtype);
    }
    for (int i = 0; i < shape.rank; ++i) {
      if (i < absent) {
        continue;
      }
      int const letter = size_index(shape.dims[i].letter);
      int64_t const size = meta.size[i - absent] - shape.dims[i].plus;
      if (sizes[letter] < 0) {
        sizes[letter] = size;
        binders[letter] = form.name;
      }
      if (sizes[letter] != size || size < 0) {
        return refuse(form, meta, Fault::kSize, i - absent);
      }
    }
    bool const is_own = form.memory == kOwn || form.memory == kOwnColumns;
    bool const has_columns = form.memory == kColumns || form.memory == kOwnColumns;
    if ((form.memory == kList || (has_columns && on_cuda())) && meta.stride[last] != 1 &&
        meta.size[last] > 1) {
      return refuse(form, meta, Fault::kStride, last);
    }
    for (int i = 0; is_own && i <= last; ++i) {
      if (meta.stride[i] == 0 && meta.size[i] > 1 && !is_empty(meta)) {
        return refuse(form, meta, Fault::kExpanded, i);
      }
    }
    return true;
  }
};

// Whether all tensors of these passes fit their rows.
template <auto const& kTable, unsigned kPasses = ~0u, class Call>
bool check_rows(Solver& solver, Call const& call) {
  return all_rows<kTable, kPasses>(
      call, [&](Form const& form, TensorMeta const& meta)
                __attribute__((always_inline)) { return solver.fits(form, meta); });
}

// Whether a tensor that is written shares memory with none of these passes.
template <auto const& kTable, unsigned kPasses = ~0u, class Call>
bool check_apart(Solver& solver, Call const& call, char const* name, TensorMeta const* own) {
  return all_rows<kTable, kPasses>(call, [&](Form const& form, TensorMeta const& meta) {
    return solver.apart(name, own, form.name, &meta);
  });
}

// What a check says of a call, or "".
template <class Call, class... Arguments>
std::string error_of(Solver&& solver, bool (*check)(Solver&, Call const&, Arguments...),
                     Call const& call, Arguments... arguments) {
  check(solver, call, arguments...);
  return std::move(solver.error);
}

}  // namespace fa3
