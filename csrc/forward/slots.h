// Maps the enums of a FwdConfig to the types of its slots.
#pragma once

#include "device/score.h"
#include "forward/column_ctas.h"
#include "forward/helpers.h"
#include "forward/cache/keys_pages.h"
#include "forward/cache/output_parts.h"
#include "forward/keys_tma.h"
#include "forward/mask.h"
#include "forward/fp8/output_fp8.h"
#include "forward/queries.h"
#include "forward/fp8/scales.h"
#include "forward/softmax.h"
#include "forward/fp8/softmax_fp8.h"
#include "forward/sums.h"

namespace fa3 {

template <class Traits, OutputKind kOutput>
struct OutputOf {
  using type = OutputOverQueries<Traits>;
};
template <class Traits>
struct OutputOf<Traits, OutputKind::kRegisters> {
  using type = OutputFromRegisters<Traits>;
};
template <class Traits>
struct OutputOf<Traits, OutputKind::kStaged> {
  using type = OutputStaged<Traits>;
};
template <class Traits>
struct OutputOf<Traits, OutputKind::kSent> {
  using type = OutputSent<Traits>;
};
template <class Traits>
struct OutputOf<Traits, OutputKind::kParts> {
  using type = OutputParts<Traits>;
};

template <class Traits>
struct FwdSlots {
  static constexpr FwdConfig k = Traits::k;
  template <bool kCondition, class A, class B>
  using If = cute::conditional_t<kCondition, A, B>;

  using Batch = If<k.kind.is_dense(), DenseBatch, AnyBatch>;
  using Keys = If<k.kind.is_cache(), PagedKeys<Traits>, TmaKeys<Traits>>;
  using LoadedKeys = If<Traits::kConverts, RawKeys, DirectKeys>;
  using Values = If<Traits::kTransposesV || Traits::kConverts, RawValues, DirectValues>;
  using Helpers = If<Traits::kTransposesV, ScaleAndTransposeWarps,
                     If<k.kind.is_cache(), NoHelpers, StoreWarps>>;
  using Columns = ColumnsOf<Traits>;
  using Queries = If<(k.tuning.query_steps > 0), HeldQueries<Traits>, SharedQueries<Traits>>;
  using Limits = If<Traits::kHasLists, ListedLimits<Traits>,
                    RowLimits<Traits, If<Traits::kHasScales, ColumnBits, ColumnComparison>>>;
  using Score = ScoreOf<k.kind.score>;
  using Probabilities = PlainProbabilities;
  using Softmax = If<Traits::kHasScales, Fp8Softmax<Traits>, OnlineSoftmax<Traits>>;
  using Scales = If<Traits::kHasScales, BlockScales<Traits>,
                    If<Traits::kConverts, HeadScales<Traits>, NoScales<Traits>>>;
  using Sums = If<k.is_promoted() && k.is_skewed(), PromotedSums<Traits>,
                  If<k.folds(), FoldedSums<Traits>, FastSums<Traits>>>;
  using Output = typename OutputOf<Traits, k.output>::type;
};

}  // namespace fa3
