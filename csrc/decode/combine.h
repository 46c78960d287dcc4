// The combination of the parts of a tile, in the order of their keys, by the warp that completes
// the last part of its columns. It needs no other warp for that.
#pragma once

#include "decode/softmax.h"
#include "device/flags.h"
#include "forward/combine_parts.h"

namespace fa3 {

// Where the parts of this warp's columns of O lie. A slot has its fours of O^T by (four, warp,
// lane), its LSEs by (warp, row), and how many parts are complete in a byte for each warp.
template <class Traits>
struct WarpParts {
  static constexpr int kWarps = min_of(Traits::kBlocks, Traits::kConsumers) * kWarpgroupWarps;

  typename Traits::Params const& p;
  DecodeThread at;

  CUTE_DEVICE float4* fours(int slot) const {
    return reinterpret_cast<float4*>(p.parts + int64_t(slot) * p.part_rows * Traits::kPartColumns) +
           at.warp * 32 + at.lane;
  }

  // The fours of the rows 8 i to 8 i + 7, of a part of V.
  CUTE_DEVICE static constexpr int four_of(int i, int part) {
    return (i * Traits::kPartsV + part) * kWarps * 32;
  }

  // all: those of parts, or of groups of them.
  template <class Float>
  CUTE_DEVICE Float* lses(Float* all, int slot) const {
    return all + (int64_t(slot) * Traits::kConsumerWarps + at.warp) * p.part_rows;
  }

  // Whether this warp is the last of `count` to get here, whose parts are then visible to it. The
  // counter is 0 again after the last.
  CUTE_DEVICE bool completes(int slot, bool is_group, int count) const {
    auto* const counters = reinterpret_cast<unsigned long long*>(p.arrived);
    int const shift = 8 * at.warp;
    bool is_last = false;
    __syncwarp();
    if (at.lane == 0) {
      auto* const counter = counters + slot + (is_group ? p.slots : 0);
      auto const before = add_in_order(counter, 1ull << shift);
      is_last = int(before >> shift & 0xff) == count - 1;
      if (is_last) {
        atomicAdd(counter, 0ull - (static_cast<unsigned long long>(count) << shift));
      }
    }
    is_last = __shfl_sync(0xffffffffu, int(is_last), 0) != 0;
    __syncwarp();
    return is_last;
  }
};

// The rows of a tile, in the result.
template <class Traits, class Keys>
struct DecodeResults {
  typename Traits::Params const& p;
  FwdWork<Traits> const& work;
  DecodeThread at;

  CUTE_DEVICE RowOfTile row_of(int column) const {
    return row_of_tile(p, work.rows, at.row_of(column));
  }

  CUTE_DEVICE float sink_of(RowOfTile const& row) const {
    return p.sinks != nullptr && row.exists ? p.sinks[work.rows.head + row.head] : -INFINITY;
  }

  // Fours of O^T to the rows 8 i + ... of O, two columns at a time.
  CUTE_DEVICE void write(float4 const& four, int i, int part) const {
    int const first = part * Traits::kStageColumns + at.warp / kWarpgroupWarps * 64;
    Keys::for_each_pair(four, p.out_is_half, at.warp % kWarpgroupWarps * 32 + at.lane,
                        [&](int j, int column, uint32_t pair) {
                          RowOfTile const row = row_of(2 * i + j);
                          if (row.exists) {
                            ResultRow<Traits>::of(p, work, row).write_pair(first + column, pair);
                          }
                        });
  }

  CUTE_DEVICE void write_lse(RowOfTile const& row, float lse) const {
    if (p.lse != nullptr && row.exists) {
      p.lse[index_of_row(p, work.rows, row)] = lse;
    }
  }
};

template <class Traits, class Keys>
struct DecodeCombiner {
  using Parts = WarpParts<Traits>;
  static constexpr int kMost = 16;  // parts of a list: at most the root of kMaxSplits
  // Weights of a warp, by (part, row), where P was.
  static constexpr int kWeights = kMost * 8;
  static_assert(Traits::kConsumerWarps * kWeights * sizeof(float) <=
                sizeof(DecodeStorage<Traits>::p));

  DecodeResults<Traits, Keys> results;
  Parts parts;
  float* weights;

  CUTE_DEVICE DecodeCombiner(DecodeStorage<Traits>& shared, typename Traits::Params const& p,
                             FwdWork<Traits> const& work, DecodeThread at)
      : results{p, work, at},
        parts{p, at},
        weights(reinterpret_cast<float*>(shared.p) + at.warp * kWeights) {}

  // Combines what is complete with this part.
  CUTE_DEVICE void run() const {
    auto const& [p, work, at] = results;
    if (at.warp >= Parts::kWarps) {
      return;
    }
    KeyPart const& part = work.location.part;
    int const group = min_of(parts_of_group(part.parts), kMost);
    int const first = part.index / group * group;
    PartList list{first, 1, min_of(group, part.parts - first)};
    bool is_final = group == part.parts;
    CUTE_NO_UNROLL
    while (parts.completes(part.slot_of(list.first), !is_final, list.count)) {
      CUTE_NO_UNROLL
      for (int i = 0; 8 * i < rows_of_tile(p, work); ++i) {
        combine(list, i, is_final);
      }
      if (is_final) {
        return;
      }
      list = PartList{0, group, ceil_div(part.parts, group)};
      is_final = true;
    }
  }

 private:
  // The slots of a list: `first`, and those from `second` on, `step` apart.
  struct Slots {
    int first;
    int second;
    int step;
    int count;

    // That of part n, or the last one.
    CUTE_DEVICE int of(int n) const {
      return n == 0 ? first : second + (min_of(n, count - 1) - 1) * step;
    }
  };

  CUTE_DEVICE Slots slots_of(PartList const& list) const {
    KeyPart const& part = results.work.location.part;
    return Slots{part.slot_of(list.first), part.slot_of(list.first + list.stride),
                 part.slot_step * list.stride, list.count};
  }

  // The rows 8 i and on. is_final: into the result; else into the first part, with an LSE of the
  // group.
  CUTE_DEVICE void combine(PartList const& list, int i, bool is_final) const {
    auto const& [p, work, at] = results;
    Slots const slots = slots_of(list);
    // A lane has the LSEs of the row lane % 8, of every fourth part.
    float lses[kMost / 4];
    float const* const all = list.stride > 1 ? p.group_lses : p.part_lses;
    CUTE_UNROLL
    for (int j = 0; j < kMost / 4; ++j) {
      lses[j] = __ldcg(parts.lses(all, slots.of(4 * j + at.lane / 8)) + 8 * i + at.lane % 8);
    }
    float of_lane = 0.f;
    CUTE_NO_UNROLL
    for (int v = 0; v < Traits::kPartsV; ++v) {
      float4 values[kMost];
      CUTE_UNROLL
      for (int n = 0; n < kMost; ++n) {
        values[n] = __ldcg(parts.fours(slots.of(n)) + Parts::four_of(i, v));
      }
      if (v == 0) {
        of_lane = weigh(lses, slots, i, is_final);
      }
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
      CUTE_UNROLL
      for (int n = 0; n < kMost; ++n) {
        float2 const weight = *reinterpret_cast<float2 const*>(weights + n * 8 + at.lane % 4 * 2);
        sum = make_float4(fmaf(weight.x, values[n].x, sum.x), fmaf(weight.y, values[n].y, sum.y),
                          fmaf(weight.x, values[n].z, sum.z), fmaf(weight.y, values[n].w, sum.w));
      }
      float2 const factors = make_float2(__shfl_sync(0xffffffffu, of_lane, at.lane % 4 * 2),
                                         __shfl_sync(0xffffffffu, of_lane, at.lane % 4 * 2 + 1));
      float4 const four =
          make_float4(sum.x * factors.x, sum.y * factors.y, sum.z * factors.x, sum.w * factors.y);
      if (is_final) {
        results.write(four, i, v);
      } else {
        parts.fours(slots.first)[Parts::four_of(i, v)] = four;
      }
    }
    __syncwarp();
  }

  // exp(LSE - the largest one) of the parts into `weights`, 0 for those after the last; gives 1 /
  // their sum.
  CUTE_DEVICE float weigh(float (&lses)[kMost / 4], Slots const& slots, int i,
                          bool is_final) const {
    auto const& [p, work, at] = results;
    int const r = at.lane % 8;
    float most = -INFINITY;
    CUTE_UNROLL
    for (int j = 0; j < kMost / 4; ++j) {
      lses[j] = 4 * j + at.lane / 8 < slots.count ? lses[j] : -INFINITY;
      most = fmaxf(most, lses[j]);
    }
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 8));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 16));
    float const used = finite_max(most);
    float sum = 0.f;
    CUTE_UNROLL
    for (int j = 0; j < kMost / 4; ++j) {
      float const weight = exp2_approx((lses[j] - used) * kLog2E);
      weights[32 * j + at.lane] = weight;
      sum += weight;
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 8);
    sum += __shfl_xor_sync(0xffffffffu, sum, 16);
    RowOfTile const row = row_of_tile(p, work.rows, 8 * i + r);
    float const sink = is_final ? results.sink_of(row) : -INFINITY;
    float const lse = sum == 0.f ? -INFINITY : most + __logf(sum);
    if (at.lane < 8) {
      if (!is_final) {
        parts.lses(p.group_lses, slots.first)[8 * i + r] = lse;
      } else if (at.warp == 0) {
        results.write_lse(row, with_sink(lse, sink));
      }
    }
    __syncwarp();
    return inverse_sum(sum + exp2_approx((sink - used) * kLog2E));
  }
};

}  // namespace fa3
