// Combines the parts of a tile in key order. Each warp counts and combines the columns of O that it
// owns, independently of other warps: the warp that stores the last part does the work.
#pragma once

#include "decode/softmax.h"
#include "device/flags.h"
#include "forward/cache/combine_parts.h"

namespace fa3 {

// The buffers of the parts, as seen by one warp. For each part (slot) there are float4s of O^T,
// indexed by (index, warp, lane), LSEs, indexed by (warp, row), and a 64-bit counter of stored
// parts with one byte per warp.
template <class Traits>
struct WarpParts {
  static constexpr int kWarps = min_of(Traits::kBlocks, Traits::kConsumers) * kWarpgroupWarps;

  typename Traits::Params const& p;
  DecodeThread at;

  CUTE_DEVICE float4* fours(int slot) const {
    return reinterpret_cast<float4*>(p.parts + int64_t(slot) * p.part_rows * Traits::kPartColumns) +
           at.warp * 32 + at.lane;
  }

  // Offset of the float4s that hold rows 8 i to 8 i + 7 and the columns of one stage of V.
  CUTE_DEVICE static constexpr int four_of(int i, int part) {
    return (i * Traits::kPartsV + part) * kWarps * 32;
  }

  // The LSEs of a slot in `all`, which is p.part_lses or p.group_lses.
  template <class Float>
  CUTE_DEVICE Float* lses(Float* all, int slot) const {
    return all + (int64_t(slot) * Traits::kConsumerWarps + at.warp) * p.part_rows;
  }

  // Counts this warp's part as stored. Returns whether it is the last of `count` parts; if so, all
  // parts are visible to this warp, and its byte of the counter is reset to 0.
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

// Writes rows of a tile to the results.
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

  // Writes a float4 of O^T to rows 8 i to 8 i + 7 of O, two columns at a time.
  CUTE_DEVICE void write(float4 const& four, int i, int part) const {
    int const first = part * Traits::kOutputColumns + at.warp / kWarpgroupWarps * 64;
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
  static constexpr int kMost = 16;  // most parts in a list: the square root of kMaxSplits
  // A warp's weights, indexed by (part, row). They reuse the memory of P.
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
        weights(reinterpret_cast<float*>(&shared.p) + at.warp * kWeights) {}

  // Counts this part as stored. Combines its group once that is complete, then the groups.
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
      for (int i = 0; 8 * i < rows_of_tile(p, work.rows); ++i) {
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
  // The slots of the parts in a list: `first`, then `second` and every `step`-th slot after it.
  struct Slots {
    int first;
    int second;
    int step;
    int count;

    // The slot of part n, or of the last part if n is past the end.
    CUTE_DEVICE int of(int n) const {
      return n == 0 ? first : second + (min_of(n, count - 1) - 1) * step;
    }
  };

  CUTE_DEVICE Slots slots_of(PartList const& list) const {
    KeyPart const& part = results.work.location.part;
    return Slots{part.slot_of(list.first), part.slot_of(list.first + list.stride),
                 part.slot_step * list.stride, list.count};
  }

  // Combines rows 8 i to 8 i + 7. If is_final, writes them to the results, otherwise to the slot of
  // the first part, with the LSE of the group.
  CUTE_DEVICE void combine(PartList const& list, int i, bool is_final) const {
    auto const& [p, work, at] = results;
    Slots const slots = slots_of(list);
    // A lane loads the LSEs of row lane % 8, for every fourth part.
    float lses[kMost / 4];
    float const* const all = list.stride > 1 ? p.group_lses : p.part_lses;
    CUTE_UNROLL
    for (int j = 0; j < kMost / 4; ++j) {
      lses[j] = __ldcg(parts.lses(all, slots.of(4 * j + at.lane / 8)) + 8 * i + at.lane % 8);
    }
    float lane_factor = 0.f;
    CUTE_NO_UNROLL
    for (int v = 0; v < Traits::kPartsV; ++v) {
      float4 values[kMost];
      CUTE_UNROLL
      for (int n = 0; n < kMost; ++n) {
        values[n] = __ldcg(parts.fours(slots.of(n)) + Parts::four_of(i, v));
      }
      if (v == 0) {
        lane_factor = weigh(lses, slots, i, is_final);
      }
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
      CUTE_UNROLL
      for (int n = 0; n < kMost; ++n) {
        float2 const weight = *reinterpret_cast<float2 const*>(weights + n * 8 + at.lane % 4 * 2);
        sum = make_float4(fmaf(weight.x, values[n].x, sum.x), fmaf(weight.y, values[n].y, sum.y),
                          fmaf(weight.x, values[n].z, sum.z), fmaf(weight.y, values[n].w, sum.w));
      }
      float2 const factors =
          make_float2(__shfl_sync(0xffffffffu, lane_factor, at.lane % 4 * 2),
                      __shfl_sync(0xffffffffu, lane_factor, at.lane % 4 * 2 + 1));
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

  // Stores exp(LSE - largest LSE) of each part to `weights`, and 0 past the last part. Returns 1 /
  // sum of the weights.
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
