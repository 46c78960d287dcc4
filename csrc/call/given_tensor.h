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

// A packed tensor (rows, heads, columns) as a batch of one; others as they are.
inline TensorMeta with_batch(TensorMeta meta) {
  if (meta.rank == 3) {
    for (int i = 3; i > 0; --i) {
      meta.size[i] = meta.size[i - 1];
      meta.stride[i] = meta.stride[i - 1];
    }
    meta.size[0] = 1;
    meta.rank = 4;
  }
  return meta;
}

// Bytes of an element. Lists are int32: 4.
inline int64_t bytes_of(Dtype dtype) {
  return dtype == Dtype::kFloat8E4M3                             ? 1
         : dtype == Dtype::kFloat16 || dtype == Dtype::kBFloat16 ? 2
         : dtype == Dtype::kFloat64                              ? 8
                                                                 : 4;
}

// The address after a tensor's last element.
inline int64_t end_address(TensorMeta const& meta) {
  int64_t last = 0;
  for (int i = 0; i < meta.rank; ++i) {
    last += (meta.size[i] - 1) * meta.stride[i];
  }
  return meta.address + (last + 1) * bytes_of(meta.dtype);
}

// Whether the elements of a tensor fill a range of addresses, each its own.
inline bool is_dense(TensorMeta const& meta) {
  int64_t extent = 1;
  int64_t elements = 1;
  for (int i = 0; i < meta.rank; ++i) {
    elements *= meta.size[i];
    for (int inner = 0; inner < meta.rank; ++inner) {
      extent *= meta.size[inner] > 1 && meta.stride[inner] == extent ? meta.size[inner] : 1;
    }
  }
  return extent == elements;
}

// Whether two elements may share an address: dimensions that do not lie around one another.
inline bool may_overlap(TensorMeta const& meta) {
  bool overlaps = false;
  for (int outer = 0; outer < meta.rank; ++outer) {
    // Distance between the first and the last element of the dimensions with smaller strides.
    int64_t extent = 0;
    for (int dim = 0; dim < meta.rank; ++dim) {
      bool const is_within = dim != outer && meta.stride[dim] <= meta.stride[outer];
      extent += is_within && meta.size[dim] > 1 ? (meta.size[dim] - 1) * meta.stride[dim] : 0;
    }
    overlaps = overlaps || (meta.size[outer] > 1 && meta.stride[outer] <= extent);
  }
  return overlaps && !is_empty(meta);
}

// Whether two tensors may share bytes. Those without an address (fakes, plans) share none.
inline bool may_share_memory(TensorMeta const& a, TensorMeta const& b) {
  auto const& [low, high] = std::minmax(a, b, [](TensorMeta const& one, TensorMeta const& other) {
    return one.address < other.address;
  });
  return low.address != 0 && high.address < end_address(low) && !is_empty(a) && !is_empty(b);
}

// Whether they do for certain: elements of tensors with gaps may lie between one another.
inline bool shares_memory(TensorMeta const& a, TensorMeta const& b) {
  return may_share_memory(a, b) && (a.address == b.address || (is_dense(a) && is_dense(b)));
}

}  // namespace fa3
