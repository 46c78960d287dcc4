// Steps on S^T between the GEMM and the softmax: scales of an e4m3 cache, softcap, mask.
#pragma once

#include "core/tree_mask.h"
#include "decode/softmax.h"

namespace fa3 {

template <class Traits>
struct DecodeScores {
  DecodeStorage<Traits>& shared;
  typename Traits::Params const& p;
  DecodeThread at;
  int tree_begin = 0;  // slot of the first key with a bit in the tree
  // Page scales of this thread's two keys, for the current S and for the next S.
  float key_scale[2] = {1.f, 1.f};
  float next_key_scale[2] = {1.f, 1.f};
  float value_scale = 0.f;  // largest page scale of V in the tile so far

  CUTE_DEVICE DecodeScores(DecodeStorage<Traits>& shared_, typename Traits::Params const& p_,
                           DecodeThread at_)
      : shared(shared_), p(p_), at(at_) {}

  // Makes the next S, with the scales of its keys, the current one.
  template <class Sums>
  CUTE_DEVICE void take(Sums& scores, Sums const& next) {
    cute::copy(next, scores);
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      key_scale[half] = next_key_scale[half];
    }
  }

  template <class Scores>
  CUTE_DEVICE void transform(Scores& scores, FwdWork<Traits> const& work, int n,
                             bool is_masked) const {
    scale_scores(scores);
    if (is_masked) {
      mask_scores(scores, n);
    }
    if (p.is_chosen) {
      hide_missing(scores, work, n);
    }
  }

  // Reads the scales of the keys of the next S, before the stage is released.
  CUTE_DEVICE void read_key_scales(int stage) {
    if constexpr (Traits::kConverts) {
      if (p.has_page_scales()) {
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          next_key_scale[half] = shared.key_scales[stage][at.first_key() + 8 * half];
        }
      }
    }
  }

  // Raises value_scale to the largest page scale of V so far and returns the factor that rescales O
  // to it. P is multiplied by its key's scale over value_scale. stage: the stage of V.
  CUTE_DEVICE float raise_value_scale(int stage) {
    float const before = value_scale;
    if constexpr (Traits::kConverts) {
      CUTE_UNROLL
      for (int i = 0; i < Traits::kTileN; i += 32) {
        value_scale = fmaxf(value_scale, fabsf(shared.key_scales[stage][i + at.lane]));
      }
      value_scale = max_over_lanes(value_scale);
    }
    return before * inverse_value_scale();
  }

  template <class Scores>
  CUTE_DEVICE void scale_probabilities(Scores& scores, int stage) const {
    if constexpr (Traits::kConverts) {
      float const inverse = inverse_value_scale();
      CUTE_UNROLL
      for (int i = 0; i < cute::size(scores); ++i) {
        int const key = at.first_key() + 8 * half_of_element(i);
        scores(i) *= shared.key_scales[stage][key] * inverse;
      }
    }
  }

 private:
  CUTE_DEVICE float inverse_value_scale() const {
    return value_scale > 0.f ? 1.f / value_scale : 0.f;
  }

  // With a softcap, S becomes tanh(S * softcap_scale), and the softmax scale is the cap.
  template <class Scores>
  CUTE_DEVICE void scale_scores(Scores& scores) const {
    if constexpr (Traits::kConverts) {
      CUTE_UNROLL
      for (int i = 0; i < cute::size(scores); ++i) {
        int const row = at.row_of(column_of_element(i));
        scores(i) *= shared.rows[row].factor * key_scale[half_of_element(i)];
      }
    }
    if (p.softcap_scale > 0.f) {
      CUTE_UNROLL
      for (int i = 0; i < cute::size(scores); ++i) {
        scores(i) = tanh_of(scores(i) * p.softcap_scale);
      }
    }
  }

  // Hides keys that the query did not choose: their entries are outside the cache. The producer has
  // read the same entries, so they are in L1.
  template <class Scores>
  CUTE_DEVICE void hide_missing(Scores& scores, FwdWork<Traits> const& work, int n) const {
    CacheLocation const& location = work.location;
    int const* const entries = p.page_table + location.sequence * p.table_stride;
    // WHY: without this, addresses derived from the thread index stay in registers for all tiles.
    int first = at.first_key();
    asm volatile("" : "+r"(first));
    bool exists[2];
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      int const slot = n * Traits::kTileN + first + 8 * half;
      exists[half] =
          slot < location.end_k() && uint32_t(entries[p.page_size.div(slot)]) < uint32_t(p.entries);
    }
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) {
      scores(i) = exists[half_of_element(i)] ? scores(i) : -INFINITY;
    }
  }

  template <class Scores>
  CUTE_DEVICE void mask_scores(Scores& scores, int n) const {
    int const first = n * Traits::kTileN + at.first_key();
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) {
      DecodeRow const& row = shared.rows[at.row_of(column_of_element(i))];
      int const slot = first + 8 * half_of_element(i);
      bool const is_visible = slot >= row.begin && slot < row.end;
      scores(i) = is_visible ? scores(i) : -INFINITY;
    }
    if (p.tree != nullptr) {
      mask_tree(scores, first);
    }
  }

  // Applies the tree mask: a row has a bit for each of the last keys of its sequence.
  template <class Scores>
  CUTE_DEVICE void mask_tree(Scores& scores, int first) const {
    int const column = first - tree_begin;
    auto const* const bits = reinterpret_cast<uint32_t const*>(p.tree);
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) {
      int const bit = column + 8 * half_of_element(i);
      int const row = shared.rows[at.row_of(column_of_element(i))].tree_row;
      if (bit >= 0) {
        uint32_t const word =
            bit < kTreeColumns ? __ldg(bits + int64_t(row) * kTreeWords + bit / 32) : 0;
        scores(i) = (word >> bit % 32 & 1) != 0 ? scores(i) : -INFINITY;
      }
    }
  }
};

}  // namespace fa3
