// Each warp combines up to 128 columns of a row. It computes the weights of 32 parts at a time, one
// per lane, and adds the parts in order.
#include "combine/combine.h"

#include "device/barriers.h"
#include "device/combine.h"
#include "launch/launch.h"

namespace fa3 {
namespace {

constexpr int kWarps = 4;  // per CTA
constexpr int kLaneColumns = kCombineColumns / 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

struct CombineRow {
  int batch;
  int row;
  int head;
  int first_column;

  // Column i of the lane. With kIsVector the columns of a lane are adjacent.
  template <bool kIsVector>
  CUTE_DEVICE int column(int i) const {
    int const lane = lane_of_warp();
    return first_column + (kIsVector ? kLaneColumns * lane + i : lane + 32 * i);
  }
};

CUTE_DEVICE CombineRow row_of_warp(CombineParams const& p, int warp) {
  int const row = p.by_blocks.div(warp);
  int const in_batch = p.by_heads.div(row);
  return CombineRow{p.by_rows.div(in_batch), p.by_rows.mod(in_batch), p.by_heads.mod(row),
                    p.by_blocks.mod(warp) * kCombineColumns};
}

// Loads four adjacent columns.
template <class Element>
CUTE_DEVICE float4 load_four(Element const* at) {
  if constexpr (cute::is_same_v<Element, float>) {
    return __ldg(reinterpret_cast<float4 const*>(at));
  } else {
    uint2 const words = __ldg(reinterpret_cast<uint2 const*>(at));
    float2 const low = unpack_two<Element>(words.x);
    float2 const high = unpack_two<Element>(words.y);
    return make_float4(low.x, low.y, high.x, high.y);
  }
}

template <class Element>
CUTE_DEVICE float load_one(Element const* at) {
  if constexpr (cute::is_same_v<Element, float>) {
    return __ldg(at);
  } else {
    return unpack_two<Element>(__ldg(reinterpret_cast<uint16_t const*>(at))).x;
  }
}

// Loads a lane's columns of a part. stride: distance between columns.
template <bool kIsVector, class Element>
CUTE_DEVICE void load_columns(CombineParams const& p, CombineRow const& row, Element const* source,
                              int64_t stride, float (&columns)[kLaneColumns]) {
  if constexpr (kIsVector) {
    float4 four = make_float4(0.f, 0.f, 0.f, 0.f);
    int const column = row.column<true>(0);
    if (column < p.columns) {
      four = load_four(source + column);
    }
    columns[0] = four.x;
    columns[1] = four.y;
    columns[2] = four.z;
    columns[3] = four.w;
  } else {
    CUTE_UNROLL
    for (int i = 0; i < kLaneColumns; ++i) {
      int const column = row.column<false>(i);
      columns[i] = column < p.columns ? load_one(source + column * stride) : 0.f;
    }
  }
}

CUTE_DEVICE void store_four(void* target, Dtype dtype, float const (&x)[kLaneColumns]) {
  if (dtype == Dtype::kFloat32) {
    *static_cast<float4*>(target) = make_float4(x[0], x[1], x[2], x[3]);
  } else if (dtype == Dtype::kFloat16) {
    *static_cast<uint2*>(target) =
        make_uint2(pack_two<cutlass::half_t>(x[0], x[1]), pack_two<cutlass::half_t>(x[2], x[3]));
  } else {
    *static_cast<uint2*>(target) = make_uint2(pack_two<cutlass::bfloat16_t>(x[0], x[1]),
                                              pack_two<cutlass::bfloat16_t>(x[2], x[3]));
  }
}

CUTE_DEVICE void store_one(void* target, Dtype dtype, float x) {
  if (dtype == Dtype::kFloat32) {
    *static_cast<float*>(target) = x;
  } else {
    uint32_t const word = dtype == Dtype::kFloat16 ? pack_two<cutlass::half_t>(x, 0.f)
                                                   : pack_two<cutlass::bfloat16_t>(x, 0.f);
    *static_cast<uint16_t*>(target) = uint16_t(word);
  }
}

template <bool kIsVector>
CUTE_DEVICE void store_columns(CombineParams const& p, CombineRow const& row,
                               float const (&sums)[kLaneColumns]) {
  int const bytes = p.out_dtype == Dtype::kFloat32 ? 4 : 2;
  int64_t const offset =
      row.batch * p.out_stride[0] + row.row * p.out_stride[1] + row.head * p.out_stride[2];
  char* const target = static_cast<char*>(p.out) + offset * bytes;
  CUTE_UNROLL
  for (int i = 0; i < (kIsVector ? 1 : kLaneColumns); ++i) {
    int const column = row.column<kIsVector>(i);
    char* const at = target + column * p.out_stride[3] * bytes;
    if (column < p.columns) {
      kIsVector ? store_four(at, p.out_dtype, sums) : store_one(at, p.out_dtype, sums[i]);
    }
  }
}

// The addresses of a row in each part. The parts of a stack are equally far apart. kIsStack: there
// are no others.
template <class Element, bool kIsStack>
struct PartRows {
  static constexpr bool kIsOneTensor = kIsStack;

  CombineParams const& p;
  CombineRow const& row;
  Element const* first;
  float const* first_lse;

  CUTE_DEVICE PartRows(CombineParams const& p_, CombineRow const& row_)
      : p(p_), row(row_), first(data_of(p_.source[0])), first_lse(lse_of(p_.source[0])) {}

  CUTE_DEVICE Element const* data(int part) const {
    return is_stacked(part) ? first + part * p.part_stride : data_of(p.source[source_of(part)]);
  }

  CUTE_DEVICE float lse(int part) const {
    return __ldg(is_stacked(part) ? first_lse + part * p.lse_part_stride
                                  : lse_of(p.source[source_of(part)]));
  }

  CUTE_DEVICE int64_t column_stride(int part) const {
    return p.source[is_stacked(part) ? 0 : source_of(part)].stride[3];
  }

 private:
  CUTE_DEVICE bool is_stacked(int part) const { return kIsStack || part < p.stacked; }
  CUTE_DEVICE int source_of(int part) const { return part - p.stacked + 1; }

  CUTE_DEVICE Element const* data_of(CombineSource const& source) const {
    return static_cast<Element const*>(source.data) + row.batch * source.stride[0] +
           row.row * source.stride[1] + row.head * source.stride[2];
  }

  CUTE_DEVICE float const* lse_of(CombineSource const& source) const {
    return source.lse + row.batch * source.lse_stride[0] + row.row * source.lse_stride[1] +
           row.head * source.lse_stride[2];
  }
};

// Adds the weighted parts of a row in order. The caller divides by the sum of the weights.
template <bool kIsVector, class Parts>
CUTE_DEVICE void add_parts(CombineParams const& p, CombineRow const& row, Parts const& parts,
                           PartWeights const& weights, float (&sums)[kLaneColumns]) {
  constexpr int kUnrolled = Parts::kIsOneTensor ? 8 : kMostMergedParts;  // loads in flight
  for (int begin = 0; begin < p.parts; begin += 32) {
    int const own_part = begin + lane_of_warp();
    float const own_lse = own_part < p.parts ? parts.lse(own_part) : -INFINITY;
    float const own_weight = weights.weight(own_lse);
    uint32_t const used = __ballot_sync(kAllLanes, own_lse != -INFINITY);
    int const count = min_of(32, p.parts - begin);
#pragma unroll kUnrolled
    for (int i = 0; i < count; ++i) {
      float const weight = __shfl_sync(kAllLanes, own_weight, i);
      float columns[kLaneColumns] = {};
      if ((used >> i & 1) != 0) {
        load_columns<kIsVector>(p, row, parts.data(begin + i), parts.column_stride(begin + i),
                                columns);
      }
      CUTE_UNROLL
      for (int j = 0; j < kLaneColumns; ++j) {
        sums[j] += weight * columns[j];
      }
    }
  }
}

template <class Element, bool kIsStack, bool kIsVector>
__global__ void __launch_bounds__(32 * kWarps)
    combine_kernel(CombineParams const __grid_constant__ p) {
  int const warp = int(blockIdx.x) * kWarps + int(threadIdx.x) / 32;
  wait_for_earlier_launches();
  allow_later_launches();
  if (warp >= p.warps) {
    return;
  }
  CombineRow const row = row_of_warp(p, warp);
  PartRows<Element, kIsStack> const parts(p, row);
  PartWeights const weights =
      PartWeights::reduce(p.parts, [&](int part) { return parts.lse(part); });
  if (p.lse != nullptr && row.first_column == 0 && is_first_lane()) {
    p.lse[row.batch * p.lse_stride[0] + row.row * p.lse_stride[1] + row.head * p.lse_stride[2]] =
        weights.lse();
  }
  float sums[kLaneColumns] = {};
  add_parts<kIsVector>(p, row, parts, weights, sums);
  float const inverse = weights.inverse();
  CUTE_UNROLL
  for (float& sum : sums) {
    sum *= inverse;
  }
  store_columns<kIsVector>(p, row, sums);
}

using Kernel = void (*)(CombineParams);

template <class Element, bool kIsStack>
Kernel kernel_of(CombineParams const& params) {
  return params.is_vector ? combine_kernel<Element, kIsStack, true>
                          : combine_kernel<Element, kIsStack, false>;
}

template <class Element>
Kernel kernel_of(CombineParams const& params) {
  return params.is_stack ? kernel_of<Element, true>(params) : kernel_of<Element, false>(params);
}

}  // namespace

void launch_combine(CombineParams const& params, void* stream) {
  LaunchShape const shape{"combine", ceil_div(params.warps, kWarps), 32 * kWarps, 0};
  bind_thread(shape.variant, shape.grid, 0);
  Kernel const kernel = params.dtype == Dtype::kFloat16    ? kernel_of<cutlass::half_t>(params)
                        : params.dtype == Dtype::kBFloat16 ? kernel_of<cutlass::bfloat16_t>(params)
                                                           : kernel_of<float, true>(params);
  launch_early(kernel, shape, params, stream);
}

}  // namespace fa3
