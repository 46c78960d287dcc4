// A warp has up to 128 columns of a row: it computes the weights of 32 parts at a time, one a lane,
// and adds the parts in their order.
#include "combine/combine.h"

#include "device/barriers.h"
#include "device/combine.h"
#include "launch/launch.h"

namespace fa3 {
namespace {

constexpr int kWarps = 4;  // of a CTA
constexpr int kLaneColumns = kCombineColumns / 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

struct CombineRow {
  int batch;
  int row;
  int head;
  int first_column;

  // Column i of the lane. A vector: its columns are neighbours.
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

// What a lane has of a part.
template <bool kIsVector>
CUTE_DEVICE void load_columns(CombineParams const& p, CombineRow const& row, float const* source,
                              float (&columns)[kLaneColumns]) {
  if constexpr (kIsVector) {
    float4 four = make_float4(0.f, 0.f, 0.f, 0.f);
    int const column = row.column<true>(0);
    if (column < p.columns) {
      four = __ldg(reinterpret_cast<float4 const*>(source + column));
    }
    columns[0] = four.x;
    columns[1] = four.y;
    columns[2] = four.z;
    columns[3] = four.w;
  } else {
    CUTE_UNROLL
    for (int i = 0; i < kLaneColumns; ++i) {
      int const column = row.column<false>(i);
      columns[i] = column < p.columns ? __ldg(source + column * p.partial_stride[4]) : 0.f;
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

// Adds the parts of a row in their order, not yet divided by the sum of their weights.
template <bool kIsVector, class LseOf>
CUTE_DEVICE void add_parts(CombineParams const& p, CombineRow const& row,
                           PartWeights const& weights, LseOf const& lse_of,
                           float (&sums)[kLaneColumns]) {
  float const* const first = p.partial + row.batch * p.partial_stride[1] +
                             row.row * p.partial_stride[2] + row.head * p.partial_stride[3];
  for (int begin = 0; begin < p.parts; begin += 32) {
    int const own_part = begin + lane_of_warp();
    float const own_lse = own_part < p.parts ? lse_of(own_part) : -INFINITY;
    float const own_weight = weights.weight(own_lse);
    uint32_t const used = __ballot_sync(kAllLanes, own_lse != -INFINITY);
    int const count = min_of(32, p.parts - begin);
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
      float const weight = __shfl_sync(kAllLanes, own_weight, i);
      float columns[kLaneColumns] = {};
      if ((used >> i & 1) != 0) {
        load_columns<kIsVector>(p, row, first + (begin + i) * p.partial_stride[0], columns);
      }
      CUTE_UNROLL
      for (int j = 0; j < kLaneColumns; ++j) {
        sums[j] += weight * columns[j];
      }
    }
  }
}

template <bool kIsVector>
__global__ void __launch_bounds__(32 * kWarps)
    combine_kernel(CombineParams const __grid_constant__ p) {
  int const warp = int(blockIdx.x) * kWarps + int(threadIdx.x) / 32;
  wait_for_earlier_launches();
  allow_later_launches();
  if (warp >= p.warps) {
    return;
  }
  CombineRow const row = row_of_warp(p, warp);
  float const* const part_lse = p.part_lse + row.batch * p.lse_stride[1] +
                                row.row * p.lse_stride[2] + row.head * p.lse_stride[3];
  auto const lse_of = [&](int part) { return __ldg(part_lse + part * p.lse_stride[0]); };
  PartWeights const weights = PartWeights::of_warp(p.parts, lse_of);
  if (row.first_column == 0 && is_first_lane()) {
    p.lse[p.by_blocks.div(warp)] = weights.lse();
  }
  float sums[kLaneColumns] = {};
  add_parts<kIsVector>(p, row, weights, lse_of, sums);
  float const inverse = weights.inverse();
  CUTE_UNROLL
  for (float& sum : sums) {
    sum *= inverse;
  }
  store_columns<kIsVector>(p, row, sums);
}

}  // namespace

void launch_combine(CombineParams const& params, void* stream) {
  LaunchShape const shape{"combine", ceil_div(params.warps, kWarps), 32 * kWarps, 0};
  bind_thread(shape.variant, shape.grid, 0);
  launch_early(params.is_vector ? combine_kernel<true> : combine_kernel<false>, shape, params,
               stream);
}

}  // namespace fa3
