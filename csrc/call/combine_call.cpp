#include "call/combine_call.h"

#include <algorithm>

namespace fa3 {

int MergeCall::parts() const {
  int count = 2;
  while (count < kMost && part[count]) {
    ++count;
  }
  return count;
}

TensorMeta rows_like(TensorMeta const& part, TensorMeta const& out) {
  TensorMeta like = part;
  int64_t const* const inner = part.stride + part.rank - 3;  // row, head, column
  bool const has_one_entry = part.rank == 3 || part.size[0] == 1;
  std::copy_n(inner, 3, like.stride + 1);
  like.stride[0] = has_one_entry ? inner[0] * out.size[1] : part.stride[0];
  std::copy_n(out.size, 4, like.size);
  like.rank = 4;
  return like;
}

TensorMeta lse_like(TensorMeta const& lse, TensorMeta const& out) {
  TensorMeta like = lse;
  int64_t const head = lse.stride[lse.rank - 2];
  int64_t const row = lse.stride[lse.rank - 1];
  bool const has_one_entry = lse.rank == 2 || lse.size[0] == 1;
  like.stride[0] = has_one_entry ? row * out.size[1] : lse.stride[0];
  like.stride[1] = row;
  like.stride[2] = head;
  std::copy_n(out.size, 3, like.size);
  like.rank = 3;
  return like;
}

}  // namespace fa3
