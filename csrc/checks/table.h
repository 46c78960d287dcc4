// The language of the checks. A Form says what a tensor must look like: shape, dtype, memory. Equal
// letters in shapes are equal sizes: a Solver binds each letter to the first size that it meets and
// holds later tensors to it. A check gives true, or has called Solver::refuse(), which alone makes
// text.
#pragma once

#include <cstring>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

#include "call/tma_rules.h"

namespace fa3 {

// Letters and their words. One in capitals is the name of a size. A small one is renamed to one of
// those, or there is no such dimension, as where the argument that is its word makes a call packed.
inline constexpr std::string_view kLetters =
    " |B batch|Sq seqlen|Sk seqlen|Sn tokens|Tq total|Tk total|Tn total|Hq heads|Hk heads|E batch"
    "|D head_dim|Dv head_dim|C slots|N pages|P page size|Np pages|R rows|L positions|X parts"
    "|Dr rotary_dim / 2|Z blocks|Zq blocks|Zk blocks|Lq tiles|Lk tiles|Mq q blocks|Mk k blocks"
    "|Wq entries|Wk entries|Bz batch|b cu_seqlens_q|bk cu_seqlens_k|bn cu_seqlens_k_new"
    "|bx cu_seqlens|s |sk |sn |sx |e |c |bt |bs |bz ";
constexpr int kLetterCount = int(std::ranges::count(kLetters, '|')) + 1;

// (letter, word)
constexpr std::pair<std::string_view, std::string_view> letter_at(int index) {
  std::string_view rest = kLetters;
  for (; index > 0; --index) {
    rest = rest.substr(rest.find('|')).substr(1);  // an unknown letter does not compile
  }
  size_t const space = rest.find(' ');
  return {rest.substr(0, space), rest.substr(space + 1, rest.find('|') - space - 1)};
}

struct Letter {
  int index = 0;

  template <class Text>
  consteval Letter(Text const& letter) {
    while (letter_at(index).first != letter) {
      ++index;
    }
  }
};
constexpr int kSizeCount = Letter("b").index;

// The size that a letter stands for, plus a number, or also 1; or a number alone.
struct Dim {
  Letter letter = "";
  int plus = 0;
  bool or_one = false;
};

// "B Sq Hq D", "B+1", "B? Sq 4".
struct Shape {
  int rank = 0;
  Dim dims[5] = {};

  consteval Shape(char const* text = "") {
    for (std::string_view rest = text; !rest.empty(); ++rank) {
      std::string_view const word = rest.substr(0, rest.find(' '));
      size_t const letters = word.find_first_of("?+0123456789");
      bool const has_number = letters != word.npos, or_one = word.back() == '?';
      dims[rank] = {word.substr(0, letters), has_number && !or_one ? word.back() - '0' : 0, or_one};
      rest.remove_prefix(word.size() + (word.size() < rest.size()));
    }
  }
};

// Sets of dtypes, which the Solver of a call holds: up to kNewV by default the anchor's. Tensors of
// kInt32 are lists.
enum Type { kAnchor, kKeys, kValues, kOut, kTables, kNewK, kNewV, kWide, kFloat, kInt32, kBool };

using DtypeSet = unsigned;
constexpr DtypeSet set_of(Dtype dtype) { return 1u << int(dtype); }
constexpr DtypeSet k16Bits = set_of(Dtype::kFloat16) | set_of(Dtype::kBFloat16);
constexpr DtypeSet kE4M3 = set_of(Dtype::kFloat8E4M3);
constexpr DtypeSet k32Bits = set_of(Dtype::kFloat32);
constexpr DtypeSet kCpuOnly = k32Bits | set_of(Dtype::kFloat64);
constexpr DtypeSet kInt32Set = 2 * set_of(Dtype::kOther);
constexpr DtypeSet kBoolSet = 2 * kInt32Set;

inline DtypeSet set_of(TensorMeta const& meta) {
  auto const is = [&](char const* name) { return std::strcmp(meta.dtype_name, name) == 0; };
  return meta.dtype != Dtype::kOther ? set_of(meta.dtype)
         : is("int32")               ? kInt32Set
         : is("bool")                ? kBoolSet
                                     : set_of(Dtype::kOther);
}

// kColumns: on CUDA the last dimension is contiguous; kList: everywhere. kOwn: the call writes it,
// and no element has stride 0. kWhole: nothing that the call writes lies between its rows. kChunks:
// on CUDA, chunks of 16 bytes; kInt4Rows: everywhere, and a row follows another.
enum Memory { kAny, kColumns = 1, kList = 2, kOwn = 4, kWhole = 8, kChunks = 16, kInt4Rows = 32 };
constexpr Memory operator|(Memory a, Memory b) { return Memory(int(a) | int(b)); }

// What a tensor must look like. other: the shape of a tensor of another rank, unless its first
// letter stands for no dimension.
struct Form {
  char const* name;
  Type type;
  Shape shape;
  Memory memory = kAny;
  Shape other = {};
};

constexpr TensorMeta const* pointer_to(TensorMeta const& meta) { return &meta; }
constexpr TensorMeta const* pointer_to(std::optional<TensorMeta> const& meta) {
  return meta ? &*meta : nullptr;
}

// Numbers that an argument may have.
constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();
constexpr int64_t kMostIndex = int64_t(1) << 30;  // 32 bits, with room for a tile past the end
struct Range {
  int64_t least = 0;
  int64_t most = kUnlimited;
  int64_t step = 1;
  char const* note = "";  // what its limits follow from

  bool has(int64_t value) const { return value >= least && value <= most && value % step == 0; }
};

struct Solver {
  char const* op;
  NamedTensor anchor;      // the device of all
  std::string error = {};  // the text of the check that failed
  DtypeSet dtypes[kBool + 1];
  int64_t sizes[kSizeCount];        // -1: not bound
  char const* binders[kSizeCount];  // the tensors that bound them
  int8_t meanings[kLetterCount] = {};

  Solver(char const* op_, NamedTensor anchor_, DtypeSet types) : op(op_), anchor(anchor_) {
    DtypeSet const own = set_of(anchor.meta);
    std::fill(dtypes, dtypes + kWide, own);
    dtypes[kAnchor] = types;
    dtypes[kWide] = anchor.meta.dtype == Dtype::kFloat64 ? own : k32Bits;
    dtypes[kFloat] = k32Bits;
    dtypes[kInt32] = kInt32Set;
    dtypes[kBool] = kBoolSet;
    std::fill(sizes, sizes + kSizeCount, -1);
    sizes[0] = 0;
    std::fill(meanings + kSizeCount, meanings + kLetterCount, -1);
  }

  // What a small letter stands for.
  void rename(Letter letter, Letter means) { meanings[letter.index] = int8_t(means.index); }

  // Small letters of a batch and of rows: without a batch if packed.
  void pack(bool is_packed, Letter batch, Letter rows, Letter seqlen, Letter total) {
    meanings[batch.index] = is_packed ? -1 : int8_t(Letter("B").index);
    rename(rows, is_packed ? total : seqlen);
  }
  bool lacks(Letter letter) const { return meanings[letter.index] < 0; }
  bool has_other(Form const& form) const {
    return form.other.rank > 0 && !lacks(form.other.dims[0].letter);
  }

  void bind(Letter letter, int64_t size, char const* binder) {
    sizes[letter.index] = size;
    binders[letter.index] = binder;
  }
  [[gnu::always_inline]] int size_index(Letter letter) const {
    return letter.index < kSizeCount ? letter.index : meanings[letter.index];
  }
  int64_t operator[](Letter letter) const { return sizes[size_index(letter)]; }
  char const* binder(Letter letter) const { return binders[size_index(letter)]; }
  std::string_view word(Letter letter) const { return letter_at(size_index(letter)).second; }

  bool is_fp8() const { return dtypes[kAnchor] == kE4M3; }
  bool on_cuda() const { return anchor.meta.device == DeviceType::kCuda; }

  [[gnu::cold]] bool refuse(std::string const& expected, std::string const& got,
                            std::string const& hint = "");
  [[gnu::cold]] bool refuse_shape(Form const& form, TensorMeta const& meta);
  [[gnu::cold]] bool refuse_device(Form const& form, TensorMeta const& meta);
  [[gnu::cold]] bool refuse_dtype(Form const& form, TensorMeta const& meta);
  [[gnu::cold]] bool refuse_stride(Form const& form, TensorMeta const& meta, int dim);
  [[gnu::cold]] bool refuse_chunks(Form const& form, TensorMeta const& meta);
  [[gnu::cold]] bool refuse_number(Range const& range, std::string const& name, int64_t got,
                                   char const* hint = "");

  // A count that kernels hold in an int, by the parts of its name.
  template <class... Name>
  bool in_int(double count, Name const&... name) {
    return count <= double(kMostIndex) || !on_cuda() ||
           refuse(text(name..., " to be at most ", kMostIndex), text(int64_t(count)),
                  "split the batch");
  }

  bool in_range(char const* name, int64_t value, Range const& range, char const* hint = "") {
    return range.has(value) || refuse_number(range, name, value, hint);
  }

  // A size; a name like "the head_dim of q" is made on failure.
  bool in_range(Letter letter, Range const& range, char const* hint = "") {
    int64_t const size = (*this)[letter];
    return range.has(size) ||
           refuse_number(range, text("the ", word(letter), " of ", binder(letter)), size, hint);
  }

  // A tensor that is written, if it is given, shares no memory with another one.
  bool apart(char const* name, TensorMeta const* own, char const* other_name,
             TensorMeta const* other, bool is_whole = false) {
    return !own || !other || own == other ||
           !(is_whole ? may_share_memory : shares_memory)(*own, *other) ||
           refuse(text(name, " with memory of its own"), text("the memory of ", other_name));
  }

  // The sizes from dimension `absent` of a shape on. Kernels count in 32 bits. WHY the loop over
  // all: letters are constants.
  [[gnu::always_inline]] bool has_sizes(Form const& form, Shape const& shape, int absent,
                                        TensorMeta const& meta) {
    for (int i = 0; i < shape.rank; ++i) {
      if (i < absent) {
        continue;
      }
      auto const& [dim, plus, or_one] = shape.dims[i];
      int const letter = size_index(dim);
      int64_t const size = meta.size[i - absent] - plus;
      if (sizes[letter] < 0) {
        sizes[letter] = size;
        binders[letter] = form.name;
      }
      if ((sizes[letter] != size && !(or_one && size == 1)) || size < 0 ||
          (size > kMostIndex && on_cuda())) {
        return refuse_shape(form, meta);
      }
    }
    return true;
  }

  [[gnu::always_inline]] bool has_strides(Form const& form, TensorMeta const& meta) {
    bool const has_columns =
        (form.memory & kList) || form.type == kInt32 || ((form.memory & kColumns) && on_cuda());
    for (int last = meta.rank - 1, i = last; i >= 0; --i) {
      bool const is_wrong = (has_columns && i == last && meta.stride[i] != 1) ||
                            ((form.memory & kInt4Rows) && i == last - 1 && meta.stride[i] != 4) ||
                            ((form.memory & kOwn) && meta.stride[i] == 0 && !is_empty(meta));
      if (is_wrong && meta.size[i] > 1) {
        return refuse_stride(form, meta, i);
      }
    }
    return true;
  }

  bool has_memory(Form const& form, TensorMeta const& meta) {
    bool const in_chunks = (form.memory & kInt4Rows) || ((form.memory & kChunks) && on_cuda());
    return !in_chunks || is_empty(meta) || has_chunks(meta) || refuse_chunks(form, meta);
  }

  [[gnu::always_inline]] bool fits(Form const& form, TensorMeta const& meta) {
    Shape const& shape = meta.rank == form.other.rank && has_other(form) ? form.other : form.shape;
    int const absent = lacks(shape.dims[0].letter);
    return (meta.rank == shape.rank - absent || refuse_shape(form, meta)) &&
           (same_device(meta, anchor.meta) || refuse_device(form, meta)) &&
           ((dtypes[form.type] & set_of(meta)) != 0 || refuse_dtype(form, meta)) &&
           has_sizes(form, shape, absent, meta) && has_strides(form, meta);
  }
};

}  // namespace fa3
