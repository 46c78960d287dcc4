// append_cache on CUDA: check, copy new rows that the kernel cannot read, allocate rotated queries,
// launch. No synchronisation; everything runs on the current stream of the cache's device.
#include "kvcache/append.h"

#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "dispatch/checks_cache.h"
#include "dispatch/given_tensor.h"
#include "ops/boxed_stack.h"
#include "ops/cuda_call.h"
#include "ops/library.h"

namespace fa3 {
namespace {

constexpr char const* kOp = "append_cache";
constexpr int64_t kMost = int64_t(1) << 30;
constexpr int64_t kMostInt = std::numeric_limits<int>::max();

int64_t bytes_of(Dtype dtype) { return dtype == Dtype::kFloat8E4M3 ? 1 : 2; }

// ------------------------------------------------------------------------------------------ checks
// Whether chunks of 16 bytes of the columns can be loaded and stored.
bool has_chunks(TensorMeta const& meta) {
  int64_t const bytes = bytes_of(meta.dtype);
  int const columns = meta.rank - 1;
  bool fine = meta.address % kAppendChunkBytes == 0 &&
              (meta.size[columns] <= 1 || meta.stride[columns] == 1);
  for (int i = 0; i < columns; ++i) {
    fine = fine && (meta.size[i] <= 1 || meta.stride[i] * bytes % kAppendChunkBytes == 0);
  }
  return fine;
}

std::string check_columns(NamedTensor const& tensor) {
  int64_t const columns = tensor.meta.size[tensor.meta.rank - 1];
  int64_t const step = kAppendChunkBytes / bytes_of(tensor.meta.dtype);
  if (columns % step != 0) {
    return error_text(kOp, text(tensor.name, ".size(-1) to be a multiple of ", step, " on a GPU"),
                      text(columns), "pad the head_dim with zeros");
  }
  return {};
}

std::string check_chunks(NamedTensor const& tensor) {
  if (!is_empty(tensor.meta) && !has_chunks(tensor.meta)) {
    return error_text(kOp,
                      text(tensor.name, " with contiguous columns, at multiples of ",
                           kAppendChunkBytes, " bytes with such strides, on a GPU"),
                      "another layout", "allocate it whole, or pad the head_dim");
  }
  return {};
}

std::string check_rotary(AttentionCall const& call) {
  if (!call.rotary.rotary_cos || !call.rotary.rotary_sin) {
    return {};
  }
  int64_t const columns = 2 * call.rotary.rotary_cos->size[1];
  if (columns % 16 != 0 || columns > call.k.size[3]) {
    return error_text(kOp,
                      text("2 * rotary_cos.size(1), the rotary dim, to be a multiple of 16 up to ",
                           call.k.size[3], " on a GPU"),
                      text(columns));
  }
  std::string const error = check_chunks({"rotary_cos", *call.rotary.rotary_cos});
  return error.empty() ? check_chunks({"rotary_sin", *call.rotary.rotary_sin}) : error;
}

std::string check_rows(NamedTensor const& tensor) {
  TensorMeta const meta = with_batch(tensor.meta);
  double const tokens = double(meta.size[0]) * double(meta.size[1]);
  if (tokens > double(kMost) || double(meta.size[2]) * double(meta.size[3]) > double(kMost)) {
    return error_text(kOp,
                      text(tensor.name, " with at most ", kMost,
                           " tokens, and as many columns "
                           "of all heads"),
                      shape_text(tensor.meta.size, tensor.meta.rank), "split the batch");
  }
  return {};
}

Quantising quantising_of(AttentionCall const& call) {
  return call.v.dtype == call.v_new->dtype   ? Quantising::kNone
         : call.by_page.descale_by_page      ? Quantising::kByPage
         : call.k.dtype == call.k_new->dtype ? Quantising::kLatents
                                             : Quantising::kByHead;
}

// What only the kernel asks for.
std::string check_kernel(AttentionCall const& call) {
  NamedTensor const caches[] = {{"k_cache", call.k}, {"v_cache", call.v}};
  NamedTensor const rows[] = {{"k", *call.k_new}, {"v", *call.v_new}, {"q", call.q}};
  std::string error;
  for (NamedTensor const& cache : caches) {
    error = error.empty() ? check_columns(cache) : error;
    error = error.empty() ? check_chunks(cache) : error;
  }
  for (NamedTensor const& one : rows) {
    error = error.empty() && one.meta.rank > 0 ? check_rows(one) : error;
  }
  bool const is_latent = quantising_of(call) == Quantising::kLatents;
  if (error.empty() && is_latent && call.v.size[3] != kLatentColumns) {
    return error_text(
        kOp, text("v_cache.size(3) to be ", kLatentColumns, ", for scales by key, on a GPU"),
        text(call.v.size[3]));
  }
  return error.empty() ? check_rotary(call) : error;
}

// -------------------------------------------------------------------------------------- parameters
template <class T>
T* data_of(std::optional<TensorMeta> const& meta) {
  return meta ? reinterpret_cast<T*>(meta->address) : nullptr;
}

ByteView byte_view(TensorMeta const& meta, void* data) {
  int64_t const bytes = bytes_of(meta.dtype);
  return ByteView{static_cast<char*>(data), meta.stride[0] * bytes, meta.stride[1] * bytes,
                  meta.stride[2] * bytes};
}

// New k, new v or q, as the kernel reads them: `copy` keeps a copy until the launch.
AppendRows rows_of(OwnedTensor const& tensor, TensorMeta meta, OwnedTensor& copy) {
  if (!is_empty(meta) && !has_chunks(meta)) {
    copy = packed_copy(kOp, tensor, meta);
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

int64_t capacity_of(AttentionCall const& call) {
  auto const& table = call.cache.page_table;
  return table ? table->size[1] * call.k.size[1] : call.k.size[1];
}

ScaleView scale_view(std::optional<TensorMeta> const& scale) {
  ScaleView view;
  if (scale) {
    view.data = reinterpret_cast<float const*>(scale->address);
    view.batch_stride = scale->stride[0];
    view.head_stride = scale->stride[1];
    view.block_stride = scale->rank == 3 && scale->size[2] > 1 ? scale->stride[2] : 0;
  }
  return view;
}

CacheSlots slots_of(AttentionCall const& call) {
  CacheArguments const& given = call.cache;
  CacheSlots slots;
  slots.capacity = int(std::min(capacity_of(call), kMostInt));
  slots.seqlens = data_of<int const>(given.cache_seqlens);
  slots.length = int(
      std::min<int64_t>(given.cache_length >= 0 ? given.cache_length : slots.capacity, kMostInt));
  slots.pages = int(std::min(call.k.size[0], kMostInt));
  slots.batch_idx = data_of<int const>(given.cache_batch_idx);
  slots.page_table = data_of<int const>(given.page_table);
  slots.page_table_stride = given.page_table ? given.page_table->stride[0] : 0;
  slots.by_page = FastDiv(int(std::clamp<int64_t>(call.k.size[1], 1, kMostInt)));
  return slots;
}

Rotary rotary_of(RotaryArguments const& given) {
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
  rotary.pairs = int(cos.size[1] * bytes / kAppendChunkBytes);
  rotary.is_interleaved = given.rotary_interleaved;
  rotary.is_per_query = given.rotary_per_query;
  rotary.seqlens = data_of<int const>(given.rotary_seqlens);
  return rotary;
}

int64_t batch_of(AttentionCall const& call) {
  auto const& packed = call.cache.cu_seqlens_k_new;
  return packed ? packed->size[0] - 1 : call.k_new->size[0];
}

struct Tensors {
  OwnedTensor k_cache;
  OwnedTensor v_cache;
  OwnedTensor k_descale;  // null, unless they are written
  OwnedTensor v_descale;
  OwnedTensor k;
  OwnedTensor v;
  OwnedTensor q;  // null: none
};

template <bool kSetsScales>
AttentionCall describe_call(BoxedStack& args, Tensors& tensors) {
  AttentionCall call;
  tensors.k_cache = args.tensor();
  tensors.v_cache = args.tensor();
  if (kSetsScales) {
    tensors.k_descale = args.optional_tensor();
    tensors.v_descale = args.tensor();
    call.scales.v_descale = describe(tensors.v_descale);
    if (tensors.k_descale) {
      call.scales.k_descale = describe(tensors.k_descale);
      call.by_page.descale_by_page = true;
    }
  }
  tensors.k = args.tensor();
  tensors.v = args.tensor();
  tensors.q = args.optional_tensor();
  args.read_groups(call.cache, call.rotary);
  args.read(call.lengths.cu_seqlens_q);
  if (!kSetsScales) {
    args.read(call.scales.k_descale);
    args.read(call.scales.v_descale);
  }
  call.on_cache = true;
  call.k = describe(tensors.k_cache);
  call.v = describe(tensors.v_cache);
  call.k_new = describe(tensors.k);
  call.v_new = describe(tensors.v);
  if (tensors.q) {
    call.q = describe(tensors.q);
  }
  return call;
}

// The rotated queries, empty if there are none.
OwnedTensor allocate_rotated(AttentionCall const& call) {
  int64_t const nothing[] = {0};
  bool const has_some = call.q.rank > 0 && call.rotary.rotary_cos;
  return has_some ? allocate(kOp, call.q.size, call.q.rank, call.q.dtype, call.k.device_index)
                  : allocate(kOp, nothing, 1, call.k.dtype, call.k.device_index);
}

// Scales by page: the work, by pages.
void set_pages(AppendParams& params, AttentionCall const& call, Tensors const& tensors) {
  TensorMeta const k = with_batch(*call.k_new);
  int64_t const page_size = std::min(call.k.size[1], kMostInt);
  int const tokens = int(k.size[0] * k.size[1]);
  params.pages =
      PageSchedule(params.batch, tokens, call.cache.cu_seqlens_k_new ? -1 : int(k.size[1]),
                   int(k.size[2]), int(page_size));
  for (auto [rows, scales] :
       {std::pair{&params.k, &tensors.k_descale}, std::pair{&params.v, &tensors.v_descale}}) {
    rows->set_scales = static_cast<float*>(mutable_data(*scales));
    double const pairs = std::min<double>(tokens, double(page_size)) * rows->schedule.chunks / 2;
    if (pairs > kMost || params.pages.ctas > kMost / kAppendWarps) {
      throw_if(error_text(kOp, "fewer new tokens", text(tokens), "split the batch"));
    }
  }
}

OwnedTensor run(AttentionCall const& call, Tensors const& tensors) {
  DeviceGuard const guard(call.k.device_index);
  OwnedTensor rotated = allocate_rotated(call);
  OwnedTensor copies[3];
  AppendParams params;
  params.dtype = call.k_new->dtype;
  params.quantising = quantising_of(call);
  params.batch = int(batch_of(call));
  params.cache = slots_of(call);
  params.rotary = rotary_of(call.rotary);
  params.k = rows_of(tensors.k, *call.k_new, copies[0]);
  params.v = rows_of(tensors.v, *call.v_new, copies[1]);
  params.k.target = byte_view(call.k, mutable_data(tensors.k_cache));
  params.v.target = byte_view(call.v, mutable_data(tensors.v_cache));
  params.k.scale = scale_view(call.scales.k_descale);
  params.v.scale = scale_view(call.scales.v_descale);
  params.k.cu = params.v.cu = data_of<int const>(call.cache.cu_seqlens_k_new);
  if (params.rotary.cos != nullptr && call.q.rank > 0) {
    params.q = rows_of(tensors.q, call.q, copies[2]);
    params.q.target = byte_view(with_batch(describe(rotated)), mutable_data(rotated));
    params.q.cu = data_of<int const>(call.lengths.cu_seqlens_q);
  }
  if (params.quantising == Quantising::kByPage) {
    set_pages(params, call, tensors);
  } else if (params.quantising == Quantising::kLatents) {
    params.v.set_scales = static_cast<float*>(mutable_data(tensors.v_descale));
  }
  if (params.ctas() > kMostInt) {
    throw_if(error_text(kOp, "fewer new tokens", text(params.ctas(), " CTAs"), "split the batch"));
  }
  if (params.ctas() > 0) {
    void* stream = nullptr;
    require(aoti_torch_get_current_cuda_stream(call.k.device_index, &stream),
            "find the current stream");
    launch_append(params, stream);
  }
  return rotated;
}

// The arguments are read off the stack in the order of the schema.
template <bool kSetsScales>
void boxed_append(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  constexpr int kArguments = CacheArguments::kCount + RotaryArguments::kCount;
  expect_schema(kOp, {num_args, num_outputs}, {8 + kArguments, 1});
  BoxedStack args(stack);
  Tensors tensors;
  AttentionCall const call = describe_call<kSetsScales>(args, tensors);
  throw_if(check_append(call));
  throw_if(check_kernel(call));
  *stack = boxed(run(call, tensors));
}

}  // namespace

void append_cache_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  boxed_append<false>(stack, num_args, num_outputs);
}

void append_cache_with_scales_boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  boxed_append<true>(stack, num_args, num_outputs);
}

}  // namespace fa3
