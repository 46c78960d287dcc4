// Appends on CUDA: copies of new rows that the kernel cannot read, rotated queries, the launch. No
// synchronisation.
#include "ops/append_launch.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "call/cache_form.h"
#include "call/given_tensor.h"
#include "ops/cuda_call.h"

namespace fa3 {
namespace {

constexpr int64_t kMost = int64_t(1) << 30;
constexpr int64_t kMostInt = std::numeric_limits<int>::max();

bool has_rows(AttentionCall const& call) { return call.k_new && call.v_new; }

Quantising quantising_of(AttentionCall const& call) {
  return !has_rows(call) || call.v.dtype == call.v_new->dtype ? Quantising::kNone
         : call.by_page.descale_by_page                       ? Quantising::kByPage
         : call.k.dtype == call.k_new->dtype                  ? Quantising::kLatents
                                                              : Quantising::kByHead;
}

// -------------------------------------------------------------------------------------- parameters
ByteView byte_view(TensorMeta const& meta, void* data) {
  int64_t const bytes = bytes_of(meta.dtype);
  return ByteView{static_cast<char*>(data), meta.stride[0] * bytes, meta.stride[1] * bytes,
                  meta.stride[2] * bytes};
}

// Whether new rows must be copied before the cache is written.
bool shares_cache(TensorMeta const& meta, AttentionCall const& call) {
  return may_share_memory(meta, call.k) || may_share_memory(meta, call.v);
}

// New k, new v or q, as the kernel reads them. `copy` keeps a copy alive until the launch.
AppendRows rows_of(AttentionCall const& call, OwnedTensor const& tensor, TensorMeta meta,
                   OwnedTensor& copy) {
  if (!is_empty(meta) && (shares_cache(meta, call) || !has_chunks(meta))) {
    copy = packed_copy(call.op(), tensor, meta);
    meta = describe(copy);
  }
  meta = with_batch(meta);
  int64_t const chunks = meta.size[3] * bytes_of(meta.dtype) / kAppendChunkBytes;
  AppendRows rows;
  rows.schedule = RowSchedule(int(meta.size[0] * meta.size[1]), int(meta.size[2]), int(chunks));
  rows.source = byte_view(meta, reinterpret_cast<void*>(meta.address));
  rows.by_entry = FastDiv(int(std::max<int64_t>(1, meta.size[1])));
  return rows;
}

CacheSlots slots_of(AttentionCall const& call) {
  CacheArguments const& given = call.cache;
  CacheSlots slots;
  slots.capacity = int(std::min(capacity_of(call), kMostInt));
  slots.seqlens = data_of<int>(given.cache_seqlens);
  slots.length = int(std::min(held_by_all(call), kMostInt));
  slots.pages = int(std::min(call.k.size[0], kMostInt));
  slots.batch_idx = data_of<int>(given.cache_batch_idx);
  slots.page_table = data_of<int>(given.page_table);
  slots.page_table_stride = given.page_table ? given.page_table->stride[0] : 0;
  slots.by_page = FastDiv(int(std::clamp<int64_t>(call.k.size[1], 1, kMostInt)));
  return slots;
}

// rows: the dtype of the rotated tensors.
Rotary rotary_of(RotaryArguments const& given, Dtype rows) {
  Rotary rotary;
  if (!given.rotary_cos || !given.rotary_sin) {
    return rotary;
  }
  TensorMeta const& cos = *given.rotary_cos;
  int64_t const bytes = bytes_of(cos.dtype);
  rotary.cos = reinterpret_cast<char const*>(cos.address);
  rotary.sin = reinterpret_cast<char const*>(given.rotary_sin->address);
  rotary.cos_stride = cos.stride[0] * bytes;
  rotary.sin_stride = given.rotary_sin->stride[0] * bytes;
  rotary.positions = std::min(cos.size[0], given.rotary_sin->size[0]);
  rotary.dtype = cos.dtype;
  rotary.pairs = int(cos.size[1] * bytes_of(rows) / kAppendChunkBytes);
  rotary.is_interleaved = given.rotary_interleaved;
  rotary.is_per_query = given.rotary_per_query;
  rotary.seqlens = data_of<int>(given.rotary_seqlens);
  return rotary;
}

// Queries that lie in a cache which the append writes are copied first.
void copy_from_cache(AttentionCall const& call, OwnedTensor& tensor, TensorMeta& meta) {
  if (shares_cache(meta, call)) {
    tensor = packed_copy(call.op(), tensor, meta);
    meta = describe(tensor);
  }
}

}  // namespace

void count_appended(AttentionCall& call, OpTensors const& tensors) {
  // New keys of each sequence.
  bool const is_dense = call.k_new && call.k_new->rank == 4;
  call.cache.appended = is_dense ? call.k_new->size[1] : 0;
  // Scales that the append sets take the place of the others.
  describe_if(tensors.k_scales, call.scales.k_descale);
  describe_if(tensors.v_scales, call.scales.v_descale);
}

AppendLaunch::AppendLaunch(AttentionCall& call, OpTensors& tensors) {
  AppendParams& params = params_;
  OwnedTensor rotated;
  params.dtype = has_rows(call) ? call.k_new->dtype : call.q.dtype;
  params.quantising = quantising_of(call);
  params.batch = int(call.batch());
  params.cache = slots_of(call);
  params.rotary = rotary_of(call.rotary, params.dtype);
  if (params.rotary.cos != nullptr) {
    rotated = allocate_like(call.op(), call.q);
    params.q = rows_of(call, tensors.q, call.q, copies_[2]);
    params.q.target = byte_view(with_batch(describe(rotated)), mutable_data(rotated));
    params.q.cu = lengths_of(call).cu_q;
  }
  if (has_rows(call)) {
    params.k = rows_of(call, tensors.k_new, *call.k_new, copies_[0]);
    params.v = rows_of(call, tensors.v_new, *call.v_new, copies_[1]);
    params.k.target = byte_view(call.k, mutable_data(tensors.k));
    params.v.target = byte_view(call.v, mutable_data(tensors.v));
    params.k.scale = scale_view(call.scales.k_descale);
    params.v.scale = scale_view(call.scales.v_descale);
    params.k.cu = params.v.cu = data_of<int>(call.cache.cu_seqlens_k_new);
    if (params.quantising == Quantising::kByPage) {
      set_pages(call, tensors);
    } else if (params.quantising == Quantising::kLatents) {
      params.v.set_scales = static_cast<float*>(mutable_data(tensors.v_scales));
    }
  }
  if (params.ctas() > kMostInt) {
    throw_if(error_text(call.op(), text("new tokens for at most ", kMostInt, " CTAs"),
                        text(params.ctas(), " CTAs"), "split the batch"));
  }
  if (rotated) {
    given_q_ = std::exchange(tensors.q, std::move(rotated));
    call.q = describe(tensors.q);
  }
  copy_from_cache(call, tensors.q, call.q);
  if (tensors.qv) {
    copy_from_cache(call, tensors.qv, *call.latent.qv);
  }
}

// Schedules the work by page, for scales by page.
void AppendLaunch::set_pages(AttentionCall const& call, OpTensors const& tensors) {
  TensorMeta const k = with_batch(*call.k_new);
  int64_t const page_size = std::min(call.k.size[1], kMostInt);
  int const tokens = int(k.size[0] * k.size[1]);
  params_.pages =
      PageSchedule(params_.batch, tokens, call.cache.cu_seqlens_k_new ? -1 : int(k.size[1]),
                   int(k.size[2]), int(page_size));
  for (auto [rows, scales] :
       {std::pair{&params_.k, &tensors.k_scales}, std::pair{&params_.v, &tensors.v_scales}}) {
    rows->set_scales = static_cast<float*>(mutable_data(*scales));
    double const pairs = std::min<double>(tokens, double(page_size)) * rows->schedule.chunks / 2;
    if (pairs > kMost || params_.pages.ctas > kMost / kAppendWarps) {
      throw_if(error_text(call.op(),
                          text("new tokens of at most ", kMost, " pairs of chunks a page"),
                          text(tokens, " tokens"), "split the batch"));
    }
  }
}

void AppendLaunch::run(void* stream) const {
  if (params_.ctas() > 0) {
    launch_append(params_, stream);
  }
}

}  // namespace fa3
