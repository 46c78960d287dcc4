// Names, bytes and overlaps of the tensors of a call.
#pragma once

#include <algorithm>

#include "call/tensor_text.h"

namespace fa3 {

struct NamedTensor {
  char const* name;
  TensorMeta const& meta;
};

inline bool is_empty(TensorMeta const& meta) {
  return std::find(meta.size, meta.size + meta.rank, 0) != meta.size + meta.rank;
}

// The address after a tensor's last element. Elements of dtypes that no kernel knows count 8 bytes.
inline int64_t end_address(TensorMeta const& meta) {
  int64_t last = 0;
  for (int i = 0; i < meta.rank; ++i) {
    last += (meta.size[i] - 1) * meta.stride[i];
  }
  int const bytes = meta.dtype == Dtype::kFloat8E4M3                                  ? 1
                    : meta.dtype == Dtype::kFloat16 || meta.dtype == Dtype::kBFloat16 ? 2
                    : meta.dtype == Dtype::kFloat32                                   ? 4
                                                                                      : 8;
  return meta.address + (last + 1) * bytes;
}

// Whether two tensors may share bytes. Those without an address (fakes, plans) share none.
inline bool may_share_memory(TensorMeta const& a, TensorMeta const& b) {
  return a.address != 0 && b.address != 0 && !is_empty(a) && !is_empty(b) &&
         a.address < end_address(b) && b.address < end_address(a);
}

}  // namespace fa3
