// Attention on a cache on CUDA, after an append if there is one. A call is checked, planned and
// allocated whole before its first launch, so that one that fails leaves the cache as it was. No
// synchronisation; everything runs on the current stream of q's device.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "call/cache_form.h"
#include "checks/checks.h"
#include "call/device_info.h"
#include "call/given_tensor.h"
#include "plan/shared_prefix.h"
#include "ops/append_launch.h"
#include "ops/cache_launch.h"
#include "ops/library.h"
#include "ops/merge.h"

namespace fa3 {
namespace {

constexpr char const* kOp = "attend_cache";

enum class CacheOp { kAttend, kAttendOut, kAppend };

// ---------------------------------------------------------------------------------------- results
// (batch, heads, seqlen_q) or (heads, total_q).
OwnedTensor allocate_lse(AttentionCall const& call) {
  TensorMeta const& q = call.q;
  int64_t const packed[] = {q.size[1], q.size[0]};
  int64_t const dense[] = {q.size[0], q.size[2], q.size[1]};
  return allocate(kOp, q.rank == 3 ? packed : dense, q.rank - 1, Dtype::kFloat32, q.device_index);
}

OwnedTensor allocate_out(AttentionCall const& call, Dtype dtype) {
  TensorMeta const& q = call.q;
  int64_t size[4];
  std::copy(q.size, q.size + q.rank, size);
  size[q.rank - 1] = call.v.size[call.v.rank - 1];
  return allocate(kOp, size, q.rank, dtype, q.device_index);
}

OwnedTensor allocate_nothing(AttentionCall const& call, Dtype dtype) {
  int64_t const nothing[] = {0};
  return allocate(kOp, nothing, 1, dtype, call.q.device_index);
}

Dtype out_dtype_of(AttentionCall const& call) {
  bool const is_fp8 = call.q.dtype == Dtype::kFloat8E4M3;
  return call.out               ? call.out->dtype
         : !is_fp8              ? call.q.dtype
         : call.fp8.float16_out ? Dtype::kFloat16
                                : Dtype::kBFloat16;
}

// ------------------------------------------------------------------------------------------- call
// A call, as it arrives, and what an append changes of it.
struct CacheCall : ForwardCall {
  CacheCall(StableIValue* stack, CacheOp op) : ForwardCall(stack, op == CacheOp::kAttendOut) {
    call.on_cache = true;
    if (op == CacheOp::kAppend) {
      read_append();
    }
    args.read_groups(call.cache, call.score, call.splits, call.prefix, call.lengths);
    if (op == CacheOp::kAppend) {
      count_appended();
    }
    args.read(call.execution.pack_gqa);
    args.read(call.execution.sm_margin);
    read_scales();
    args.read_groups(call.tree, call.by_page);
    read_qv();
    if (op != CacheOp::kAttendOut) {
      args.read(call.fp8.float16_out);
    }
    call.device = limits_of(device_info_of(call.q));
  }

  // Throws where the ops refuse the call.
  void check() const {
    throw_if(check_cache(call));
    if (has_prefix()) {
      throw_if(check_cache(call_of_prefix(call, as_one_sequence(call.q))));
    }
    if (appends(call)) {
      throw_if(check_append(call));
      throw_if(check_append_kernel(call, bool(appended.v_scales)));
    }
  }

  // A prefix of one sequence is not shared.
  bool has_prefix() const { return call.prefix.shared_prefix > 0 && batch_of(call) > 1; }

  CacheInputs inputs() { return CacheInputs{q, k, v, qv}; }

  AppendTensors appended;

 private:
  // Describes a tensor that the call may lack.
  static void describe_if(OwnedTensor const& tensor, std::optional<TensorMeta>& meta) {
    if (tensor) {
      meta = describe(tensor);
    }
  }

  void read_append() {
    for (auto [tensor, meta] : {std::pair{&appended.k, &call.k_new},
                                std::pair{&appended.v, &call.v_new}, std::pair{&out, &call.out}}) {
      *tensor = args.optional_tensor();
      describe_if(*tensor, *meta);
    }
    appended.k_scales = args.optional_tensor();
    appended.v_scales = args.optional_tensor();
    args.read_groups(call.rotary);
  }

  // New keys of each sequence, as k has them.
  void count_appended() {
    bool const is_dense = call.k_new && call.k_new->rank == 4;
    call.cache.appended = is_dense ? call.k_new->size[1] : 0;
  }

  // Scales that the append sets take the place of the others.
  void read_scales() {
    args.read_groups(call.scales);
    describe_if(appended.k_scales, call.scales.k_descale);
    describe_if(appended.v_scales, call.scales.v_descale);
  }
};

// Queries that lie in a cache which the append writes are copied first.
void copy_from_cache(CacheCall& given) {
  AttentionCall& call = given.call;
  auto const copy_if_shared = [&](OwnedTensor& tensor, TensorMeta& meta) {
    if (may_share_memory(meta, call.k) || may_share_memory(meta, call.v)) {
      tensor = packed_copy(kOp, tensor, meta);
      meta = describe(tensor);
    }
  };
  copy_if_shared(given.q, call.q);
  if (given.qv) {
    copy_if_shared(given.qv, *call.latent.qv);
  }
}

// ---------------------------------------------------------------------------------- shared prefix
// Attention on the shared keys and on those of each sequence, and their merge.
class PrefixLaunch {
 public:
  PrefixLaunch(CacheCall& given, OwnedTensor const& out, OwnedTensor const& lse, void* stream)
      : out_(out), lse_(lse) {
    AttentionCall const& call = given.call;
    Dtype const dtype = out_dtype_of(call);
    AttentionCall own = call;
    own.splits.return_lse = true;
    own.out = std::nullopt;
    AttentionCall const shared = call_of_prefix(own, packed(given.q, call.q, q_copy_));
    parts_[0] = allocate_out(shared, dtype);
    parts_[1] = allocate_lse(shared);
    parts_[2] = allocate_out(own, dtype);
    parts_[3] = allocate_lse(own);
    merge_.out = describe(out);
    for (int i = 0; i < 2; ++i) {
      merge_.part[i] = like_rank(describe(parts_[2 * i]), call.q.rank);
      merge_.lse[i] = like_rank(describe(parts_[2 * i + 1]), call.q.rank - 1);
    }
    throw_if(check_merge(merge_));
    OwnedTensor& q = q_copy_ ? q_copy_ : given.q;
    AttentionCall with_rows = shared;
    if (call.latent.qv) {
      with_rows.latent.qv = packed(given.qv, *call.latent.qv, qv_copy_);
    }
    OwnedTensor& qv = qv_copy_ ? qv_copy_ : given.qv;
    shared_.emplace(with_rows, CacheInputs{q, given.k, given.v, qv},
                    CacheOutputs{parts_[0], parts_[1], dtype}, stream);
    own_.emplace(own, given.inputs(), CacheOutputs{parts_[2], parts_[3], dtype}, stream);
  }

  // WHY own keys first: that launch starts early, the one on shared keys does not.
  void run(void* stream) const {
    own_->run(stream);
    shared_->run(stream);
    launch_merge(merge_, out_, lse_);
  }

 private:
  // Without a leading 1 where the call's tensors have no batch.
  static TensorMeta like_rank(TensorMeta meta, int rank) {
    if (meta.rank > rank) {
      meta.rank = rank;
      std::copy_n(meta.size + 1, rank, meta.size);
      std::copy_n(meta.stride + 1, rank, meta.stride);
    }
    return meta;
  }

  // All queries as one sequence, copied where their strides have no such view that TMA reads.
  static TensorMeta packed(OwnedTensor const& tensor, TensorMeta const& meta, OwnedTensor& copy) {
    if (!has_one_sequence(meta) || !tma_can_address(as_one_sequence(meta))) {
      copy = packed_copy(kOp, tensor, meta);
      return as_one_sequence(describe(copy));
    }
    return as_one_sequence(meta);
  }

  OwnedTensor const& out_;
  OwnedTensor const& lse_;
  OwnedTensor q_copy_;
  OwnedTensor qv_copy_;
  OwnedTensor parts_[4];  // out and LSE of the shared keys, of the own ones
  MergeCall merge_;
  std::optional<CacheLaunch> shared_;
  std::optional<CacheLaunch> own_;
};

// ----------------------------------------------------------------------------------------- the ops
void clear_results(OwnedTensor const& out, OwnedTensor const& lse) {
  require(aoti_torch_zero_(out.get()), "fill out");
  if (lse) {
    require(aoti_torch_aten_fill__Scalar(lse.get(), -INFINITY), "fill the LSE");
  }
}

// Fills out and, unless it is null, lse. Returns the rotated queries; null where nothing rotates.
OwnedTensor run(CacheCall& given, OwnedTensor const& out, OwnedTensor const& lse) {
  AttentionCall& call = given.call;
  void* stream = nullptr;
  require(aoti_torch_get_current_cuda_stream(call.q.device_index, &stream),
          "read the current stream");
  std::optional<AppendLaunch> append;
  OwnedTensor rotated;
  if (appends(call)) {
    append.emplace(given, given.appended);
    if (append->rotated) {
      rotated = std::move(append->rotated);
      std::swap(given.q, rotated);  // what was given lives until the launch
      call.q = describe(given.q);
    }
    copy_from_cache(given);
  }
  std::optional<CacheLaunch> attention;
  std::optional<PrefixLaunch> with_prefix;
  OwnedTensor unread;
  bool const has_work = !is_empty(call.k) && !is_empty(call.q);
  if (has_work && given.has_prefix()) {
    unread = lse ? OwnedTensor() : allocate_lse(call);
    with_prefix.emplace(given, out, lse ? lse : unread, stream);
  } else if (has_work) {
    call.prefix.shared_prefix = 0;
    attention.emplace(call, given.inputs(), CacheOutputs{out, lse, out_dtype_of(call)}, stream);
  }
  if (append) {
    append->run(stream);
  }
  if (with_prefix) {
    with_prefix->run(stream);
  } else if (attention) {
    attention->run(stream);
  } else if (is_empty(call.k)) {
    clear_results(out, lse);
  }
  return append && call.rotary.rotary_cos ? std::move(given.q) : OwnedTensor();
}

template <CacheOp kCacheOp>
void boxed_attend(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  constexpr bool kHasOut = kCacheOp == CacheOp::kAttendOut;
  constexpr bool kAppends = kCacheOp == CacheOp::kAppend;
  constexpr int kTensors = kAppends ? 8 + RotaryArguments::kCount : 3 + kHasOut;
  constexpr int kArguments =
      CacheArguments::kCount + ScoreArguments::kCount + SplitArguments::kCount +
      PrefixArgument::kCount + LengthArguments::kCount + 2 + ScaleArguments::kCount +
      TreeArguments::kCount + ByPageArgument::kCount + LatentArgument::kCount + !kHasOut;
  constexpr char const* kName = kAppends ? "append_and_attend" : kHasOut ? "attend_cache_out" : kOp;
  expect_schema(kName, {num_args, num_outputs},
                {kTensors + kArguments, kAppends  ? 3
                                        : kHasOut ? 1
                                                  : 2});
  CacheCall given(stack, kCacheOp);
  AttentionCall& call = given.call;
  given.check();
  DeviceGuard const guard(call.q.device_index);
  bool const has_lse = call.splits.return_lse;
  bool const is_given = bool(given.out);
  OwnedTensor out = is_given ? std::move(given.out) : allocate_out(call, out_dtype_of(call));
  OwnedTensor lse = has_lse ? allocate_lse(call) : OwnedTensor();
  // What the op returns instead of a result that is given, not asked for, or none.
  OwnedTensor no_out = !kHasOut && is_given ? allocate_nothing(call, call.out->dtype) : nullptr;
  OwnedTensor no_lse = has_lse ? nullptr : allocate_nothing(call, Dtype::kFloat32);
  bool const rotates = kAppends && call.rotary.rotary_cos;
  OwnedTensor no_q = kAppends && !rotates ? allocate_nothing(call, call.q.dtype) : nullptr;
  OwnedTensor rotated = run(given, out, lse);
  if (!kHasOut) {
    *stack++ = boxed(std::move(is_given ? no_out : out));
  }
  *stack++ = boxed(std::move(has_lse ? lse : no_lse));
  if (kAppends) {
    *stack = boxed(std::move(rotates ? rotated : no_q));
  }
}

constexpr BoxedOp kOps[] = {{"attend_cache", &boxed_attend<CacheOp::kAttend>},
                            {"attend_cache_out", &boxed_attend<CacheOp::kAttendOut>},
                            {"append_and_attend", &boxed_attend<CacheOp::kAppend>}};

}  // namespace

std::span<BoxedOp const> cache_ops() { return kOps; }

}  // namespace fa3
