// The operands of the two GEMMs of a K tile. 16-bit K and V are read from shared memory; e4m3 K and
// V are loaded and converted exactly to fp16, as operand A in registers, and Q is converted to
// match.
//
// With e4m3 both GEMMs permute their operands. In a k-step of S, columns 4 j, 4 j + 1, 4 j + 2 and
// 4 j + 3 of 16 become 2 j, 2 j + 1, 2 j + 8 and 2 j + 9, so that a thread converts its four bytes
// into two words of its own; QueryConverter gives Q the same order. Rows i and i + 8 of O^T hold
// columns 2 i and 2 i + 1.
#pragma once

#include "decode/storage.h"
#include "device/gemm.h"
#include "device/math.h"
#include "forward/cache/result_rows.h"

namespace fa3 {

// The columns of Q that S multiplies with a part of K (rows, columns).
template <class Traits, int kRows, int kPart>
CUTE_DEVICE auto queries_of_part(typename Traits::Element* queries) {
  using Tile = cute::Shape<cute::Int<kRows>, cute::Int<Traits::kStageColumns>>;
  return cute::local_tile(
      cute::make_tensor(
          cute::make_smem_ptr(queries + kPart * Traits::kStageColumns * Traits::kQRows),
          typename Traits::SmemLayoutQ{}),
      Tile{}, cute::make_coord(0, 0));
}

// 16-bit K and V. A stage may be released once the GEMM that reads it is complete.
template <class Traits, int kRows>
struct SharedKeys {
  using Gemms = DecodeGemms<Traits, kRows>;
  using Element = typename Traits::Element;

  // Makes the data of cp.async visible to the GEMMs.
  CUTE_DEVICE static void fence() { fence_shared_for_async_proxy(); }

  // Issues S^T of 64 keys (+)= K Q^T, over the columns of a part.
  template <int kPart, class Sums, class Release>
  CUTE_DEVICE static void issue_scores(char* stage, Element* queries, int warpgroup, int thread,
                                       Sums& sums, Release const&) {
    auto mma = typename Gemms::MmaS{}.get_slice(thread);
    using Tile = cute::Shape<cute::_64, cute::Int<Traits::kStageColumns>>;
    auto sK =
        cute::local_tile(cute::make_tensor(cute::make_smem_ptr(reinterpret_cast<Element*>(stage)),
                                           typename Traits::SmemLayoutK{}),
                         Tile{}, cute::make_coord(Traits::kIsLatent ? 0 : warpgroup, 0));
    auto tSrK = mma.partition_fragment_A(sK);  // (MMA, 1, columns / 16)
    auto tSrQ = mma.partition_fragment_B(queries_of_part<Traits, kRows, kPart>(queries));
    issue_gemm<Traits::steps_of_part(kPart)>(typename Gemms::MmaS{}, tSrK, tSrQ, sums, kPart == 0);
  }

  // Issues O^T of 64 columns += V^T P^T, over all keys of the K tile.
  template <class Sums, class Release>
  CUTE_DEVICE static void issue_output(char* stage, Element* probabilities, int block, int thread,
                                       Sums& sums, Release const&) {
    auto mma = typename Gemms::MmaO{}.get_slice(thread);
    using Tile = cute::Shape<cute::_64, cute::Int<Traits::kTileN>>;
    auto sV =
        cute::local_tile(cute::make_tensor(cute::make_smem_ptr(reinterpret_cast<Element*>(stage)),
                                           typename Traits::SmemLayoutV{}),
                         Tile{}, cute::make_coord(block, 0));
    auto tOrV = mma.partition_fragment_A(sV);
    auto tOrP = mma.partition_fragment_B(
        cute::make_tensor(cute::make_smem_ptr(probabilities), typename Gemms::SmemLayoutP{}));
    issue_gemm<Traits::kOutputSteps>(typename Gemms::MmaO{}, tOrV, tOrP, sums, false);
  }

  // An elected thread of each warpgroup releases the stage: the GEMM is complete for all its warps.
  template <class Release>
  CUTE_DEVICE static void release_after_gemm(int thread, Release const& release) {
    if (thread == 0) {
      release();
    }
  }

  // Calls visit(row, column, pair) for pairs of adjacent columns of O in a block of 64. four:
  // column fragment_row(thread) of rows 0 and 1, then column fragment_row(thread) + 8. Lanes with
  // adjacent columns exchange a row.
  template <class Visit>
  CUTE_DEVICE static void for_each_pair(float4 const& four, bool is_half, int thread,
                                        Visit const& visit) {
    uint32_t const rows[2] = {pack_result(is_half, four.x, four.y),
                              pack_result(is_half, four.z, four.w)};
    bool const is_odd = (thread & 4) != 0;
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      uint32_t const other = __shfl_xor_sync(0xffffffffu, rows[half], 4);
      uint32_t const pair =
          is_odd ? __byte_perm(other, rows[half], 0x7632) : __byte_perm(rows[half], other, 0x5410);
      visit(is_odd ? 1 : 0, fragment_row(thread) / 2 * 2 + 8 * half, pair);
    }
  }
};

// e4m3 K and V. Each warp releases a stage as soon as it has read it.
template <class Traits, int kRows>
struct ConvertedKeys {
  using Gemms = DecodeGemms<Traits, kRows>;
  using Element = typename Traits::Element;
  static constexpr bool kIsNarrow = Traits::kStageColumns == 64;
  static_assert(!Traits::kConverts || cute::is_same_v<Element, cutlass::half_t>);

  CUTE_DEVICE static void fence() {}

  // Operand A: ((2, 2, 2), 1, steps), four words per k-step.
  template <int kSteps>
  static constexpr auto fragment() {
    return cute::make_tensor<Element>(
        cute::Layout<
            cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, cute::Int<kSteps>>>{});
  }

  template <int kPart, class Sums, class Release>
  CUTE_DEVICE static void issue_scores(char* stage, Element* queries, int warpgroup, int thread,
                                       Sums& sums, Release const& release) {
    constexpr int kSteps = Traits::steps_of_part(kPart);
    auto tSrK = fragment<kSteps>();
    load_keys(stage, warpgroup, thread, cute::recast<uint32_t>(tSrK));
    release_per_warp(release);
    auto mma = typename Gemms::MmaS{}.get_slice(thread);
    auto tSrQ = mma.partition_fragment_B(queries_of_part<Traits, kRows, kPart>(queries));
    cute::warpgroup_fence_operand(tSrK);
    issue_gemm<kSteps>(typename Gemms::MmaS{}, tSrK, tSrQ, sums, kPart == 0);
  }

  template <class Sums, class Release>
  CUTE_DEVICE static void issue_output(char* stage, Element* probabilities, int block, int thread,
                                       Sums& sums, Release const& release) {
    auto tOrV = fragment<Traits::kOutputSteps>();
    load_values(stage, block, thread, cute::recast<uint32_t>(tOrV));
    release_per_warp(release);
    auto mma = typename Gemms::MmaO{}.get_slice(thread);
    auto tOrP = mma.partition_fragment_B(
        cute::make_tensor(cute::make_smem_ptr(probabilities), typename Gemms::SmemLayoutP{}));
    cute::warpgroup_fence_operand(tOrV);
    issue_gemm<Traits::kOutputSteps>(typename Gemms::MmaO{}, tOrV, tOrP, sums, false);
  }

  template <class Release>
  CUTE_DEVICE static void release_after_gemm(int, Release const&) {}

  // As in SharedKeys, but a thread holds both columns of a pair.
  template <class Visit>
  CUTE_DEVICE static void for_each_pair(float4 const& four, bool is_half, int thread,
                                        Visit const& visit) {
    int const column = thread / 32 * 16 + thread % 32 / 4 * 2;
    visit(0, column, pack_result(is_half, four.x, four.z));
    visit(1, column, pack_result(is_half, four.y, four.w));
  }

 private:
  template <class Release>
  CUTE_DEVICE static void release_per_warp(Release const& release) {
    __syncwarp();
    if (is_first_lane()) {
      release();
    }
  }

  CUTE_DEVICE static char* chunk_at(char* stage, int key, int chunk) {
    return stage + (kIsNarrow ? key * 64 + (chunk ^ key / 2 % 4) * 16
                              : chunk_offset_bytes<Traits::kTileN>(key, chunk));
  }

  // Loads the 16 keys of a warp, 32 columns (two k-steps) at a time.
  template <class Words>
  CUTE_DEVICE static void load_keys(char* stage, int warpgroup, int thread, Words&& words) {
    constexpr int kSteps = decltype(cute::size(words))::value / 4;
    int const key = warpgroup * Traits::kKeys + thread / 32 * 16 + thread % 16;
    CUTE_UNROLL
    for (int step = 0; step < kSteps; step += 2) {
      uint32_t raw[4];
      cute::SM75_U32x4_LDSM_N::copy(
          *reinterpret_cast<cute::uint128_t const*>(chunk_at(stage, key, step + thread % 32 / 16)),
          raw[0], raw[1], raw[2], raw[3]);
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        int const at = 4 * (step + i);
        convert_four_e4m3<Element>(raw[2 * i], words(at), words(at + 2));
        convert_four_e4m3<Element>(raw[2 * i + 1], words(at + 1), words(at + 3));
      }
    }
  }

  // Loads the 16 columns of a warp, 32 keys (two k-steps) at a time. A word of the transposed load
  // holds two columns of two keys.
  template <class Words>
  CUTE_DEVICE static void load_values(char* stage, int block, int thread, Words&& words) {
    int const chunk = block * 4 + thread / 32;
    CUTE_UNROLL
    for (int step = 0; step < Traits::kOutputSteps; step += 2) {
      uint32_t raw[4];
      cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<cute::uint128_t const*>(
                                        chunk_at(stage, step * 16 + thread % 32, chunk)),
                                    raw[0], raw[1], raw[2], raw[3]);
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        int const at = 4 * step + 2 * i;
        convert_four_e4m3<Element>(__byte_perm(raw[i], 0, 0x3120), words(at), words(at + 1));
      }
    }
  }
};

// Converts rows of Q to fp16 in place, with the columns in the order of the k-steps of
// ConvertedKeys. A bf16 row is scaled by a power of two that brings its largest value near 2^14,
// and DecodeRow::factor undoes the scaling. Values down to 2^-30 of the largest are exact. Smaller
// ones have an absolute error of at most 2^-38 of the largest.
template <class Traits>
struct QueryConverter {
  static constexpr int kGroups = Traits::kHeadDim / 16;  // groups of 16 columns per row
  static constexpr int kLanes = kGroups <= 4 ? 4 : kGroups <= 8 ? 8 : 16;  // per row
  static constexpr int kRowsOfWarp = 32 / kLanes;

  // rows: how many to convert. Whole warps of both consumer warpgroups call this.
  CUTE_DEVICE static void run(char* queries, bool is_bf16, int rows, float scale,
                              DecodeRow (&row_states)[kWarpgroupRows], int consumer_thread) {
    int const group = consumer_thread % kLanes;
    CUTE_NO_UNROLL
    for (int first = 0; first < rows; first += kRowsOfWarp * Traits::kConsumerWarps) {
      int const row = first + consumer_thread / kLanes;
      bool const is_used = row < rows && group < kGroups;
      char* const at[2] = {
          queries + chunk_offset_bytes<kWarpgroupRows>(is_used ? row : 0, is_used ? 2 * group : 0),
          queries +
              chunk_offset_bytes<kWarpgroupRows>(is_used ? row : 0, is_used ? 2 * group + 1 : 1)};
      uint4 const low = *reinterpret_cast<uint4 const*>(at[0]);
      uint4 const high = *reinterpret_cast<uint4 const*>(at[1]);
      uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      float const factor = is_bf16 ? scale_row(words, is_used) : 1.f;
      if (is_used) {
        *reinterpret_cast<uint4*>(at[0]) = make_uint4(words[0], words[2], words[4], words[6]);
        *reinterpret_cast<uint4*>(at[1]) = make_uint4(words[1], words[3], words[5], words[7]);
        if (group == 0) {
          row_states[row].factor = scale * factor;
        }
      }
    }
  }

 private:
  // Scales a row by a power of two and returns the factor that undoes it.
  CUTE_DEVICE static float scale_row(uint32_t (&words)[8], bool is_used) {
    uint32_t most = 0;  // the largest exponent, in its bit position
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) {
      most = max(most, max(words[i] & 0x7f80u, (words[i] >> 16) & 0x7f80u));
    }
    most = is_used ? most : 0;
    CUTE_UNROLL
    for (int distance = 1; distance < kLanes; distance *= 2) {
      most = max(most, __shfl_xor_sync(0xffffffffu, most, distance));
    }
    // A row with an infinity or NaN is not scaled. The clamp keeps both powers of two in fp32.
    int const exponent = int(most >> 7) - 127;
    int const shift = exponent == 128 ? 0 : clamp(13 - exponent, -114, 114);
    float const power = __int_as_float((127 + shift) << 23);
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) {
      float2 const pair = unpack_two<cutlass::bfloat16_t>(words[i]);
      words[i] = pack_two<cutlass::half_t>(pair.x * power, pair.y * power);
    }
    return __int_as_float((127 - shift) << 23);
  }
};

}  // namespace fa3
