// The op `mask_lists` on CUDA: check, allocate, launch. No synchronisation; everything runs on the
// current stream of the mask's device.
#include "mask/lists.h"

#include <string_view>
#include <utility>

#include "attention_ops.h"
#include "checks/table.h"
#include "ops/boxed_stack.h"
#include "ops/cuda_call.h"
#include "ops/library.h"

namespace fa3 {
namespace {

using Args = ops::mask_lists;
constexpr Dtype kInts = Dtype::kOther;

struct MaskCall {
  Args const& args;
  std::optional<TensorMeta> intervals, blocks, cu_q, cu_k;

  explicit MaskCall(Args const& args_) : args(args_) {
    describe_if(args.intervals, intervals);
    describe_if(args.block_mask, blocks);
    describe_if(args.starts_q, cu_q);
    describe_if(args.starts_k, cu_k);
    if (!intervals && !blocks) {
      throw std::runtime_error(error_text(Args::kName, "intervals or block_mask", "None"));
    }
  }

  bool is_packed() const { return bool(cu_q); }
  TensorMeta const& anchor() const { return intervals ? *intervals : *blocks; }

  // Of packed sequences, or of what is given for each sequence.
  int64_t batch() const {
    return is_packed()                                      ? cu_q->size[0] - 1
           : !blocks || (intervals && blocks->size[0] == 1) ? intervals->size[0]
                                                            : blocks->size[0];
  }
};

bool check_tensors(Solver& solver, MaskCall const& call) {
  auto const is_of = [&](char const* name, std::optional<TensorMeta> const& meta, int rank,
                         char const* dtype, auto const& has_sizes) {
    return !meta ||
           (meta->rank == rank && std::string_view(meta->dtype_name) == dtype &&
            same_device(*meta, call.anchor()) && has_sizes(*meta)) ||
           solver.refuse(text(name, " of a mask, ", dtype, ", and all on one device"),
                         text(shape_text(meta->size, meta->rank), ", ", meta->dtype_name));
  };
  auto const serves = [&](int64_t size) { return size == 1 || size == call.batch(); };
  auto const are_starts = [&](TensorMeta const& t) {
    return t.size[0] > 0 && t.size[0] == call.batch() + 1 && (t.size[0] == 1 || t.stride[0] == 1);
  };
  int const rank = call.is_packed() ? 3 : 4;
  return (bool(call.cu_k) == call.is_packed() ||
          solver.refuse("both of starts_q and starts_k, or neither", "one of them")) &&
         is_of("starts_q", call.cu_q, 1, "int32", are_starts) &&
         is_of("starts_k", call.cu_k, 1, "int32", are_starts) &&
         is_of("intervals", call.intervals, rank, "int32",
               [&](TensorMeta const& t) {
                 int64_t const* const size = t.size + rank - 3;
                 return size[0] == call.args.queries && (size[1] == 1 || size[1] == 2) &&
                        size[2] == 2 && (call.is_packed() || serves(t.size[0]));
               }) &&
         is_of("block_mask", call.blocks, 4, "bool", [&](TensorMeta const& t) {
           return serves(t.size[0]) && t.size[1] > 0 && call.args.heads % t.size[1] == 0;
         });
}

// Warps and threads are counted in an int.
bool check_counts(Solver& solver, MaskListParams const& p) {
  double const of_batches = std::max(1, p.interval_batch);
  double const of_heads = double(p.list_batch()) * p.heads;
  return solver.in_int(of_batches * p.queries, kMostIndex, "the queries of a mask") &&
         solver.in_int(of_batches * p.lists() * p.block_words(), kMostIndex,
                       "pieces of 128 queries and 2,048 keys") &&
         solver.in_int(of_heads * std::max(p.lists(), p.query_list_count()), kMostIndex,
                       "the lists of a mask");
}

bool check_numbers(Solver& solver, Args const& args) {
  Range const sizes{0, kMostIndex};
  Range const tiles{kMaskBlock, 2 * kMaskBlock, kMaskBlock};
  return solver.in_range("queries", args.queries, sizes) &&
         solver.in_range("keys", args.keys, sizes) &&
         solver.in_range("all_keys", args.all_keys, sizes) &&
         solver.in_range("heads", args.heads, {0, kMostIndex}) &&
         solver.in_range("tile_keys", args.tile_keys, tiles) &&
         solver.in_range("tile_rows", args.tile_rows, tiles) &&
         (args.tile_rows == kListedRows || (args.tile_queries == 0 && !args.starts_q) ||
          solver.refuse("tile_rows of 128 with tile_queries or starts_q", text(args.tile_rows))) &&
         (args.tile_queries == 0 ||
          (solver.in_range("tile_queries", args.tile_queries, tiles) &&
           (args.tile_keys == kListedKeys ||
            solver.refuse("tile_keys of 128 with tile_queries", text(args.tile_keys)))));
}

MaskListParams params_of(MaskCall const& call) {
  Args const& args = call.args;
  MaskListParams params;
  params.queries = int(args.queries);
  params.keys = int(args.keys);
  params.all_keys = int(args.all_keys);
  params.batch = int(call.batch());
  params.lengths.cu_q = data_of<int>(call.cu_q);
  params.lengths.cu_k = data_of<int>(call.cu_k);
  params.tile_keys = int(args.tile_keys);
  params.tile_rows = int(args.tile_rows);
  params.tile_queries = int(args.tile_queries);
  if (call.intervals) {
    TensorMeta const intervals = with_batch(*call.intervals);
    params.intervals = data_of<int>(call.intervals);
    params.interval_count = int(intervals.size[2]);
    params.interval_batch = int(intervals.size[0]);
    std::copy_n(intervals.stride, 4, params.interval_stride);
  }
  if (auto const& blocks = call.blocks) {
    params.has_blocks = true;
    params.blocks = data_of<uint8_t>(blocks);
    params.heads = blocks->size[1] > 1 ? int(args.heads) : 1;
    params.sharing_heads = params.heads / int(blocks->size[1]);
    params.block_rows = int(std::min(blocks->size[2], kMostIndex));
    params.block_columns = int(std::min(blocks->size[3], kMostIndex));
    std::copy_n(blocks->stride, 4, params.block_stride);
    params.block_stride[0] = blocks->size[0] > 1 ? blocks->stride[0] : 0;
  }
  return params;
}

void boxed_mask_lists(StableIValue* stack, uint64_t, uint64_t) {
  struct {
    OwnedTensor mask_rows, key_lists, query_lists;
  } results;
  BoxedStack values(stack);
  Args args;
  args.read(values);
  MaskCall const call(args);
  Solver solver(Args::kName, {"the mask", call.anchor()}, kInt32Set);
  check_numbers(solver, args) && check_tensors(solver, call);
  throw_if(solver.error);
  MaskListParams params = params_of(call);
  check_counts(solver, params);
  throw_if(solver.error);

  int const device = call.anchor().device_index;
  DeviceGuard const guard(device);
  auto const make = [&](int rank, std::initializer_list<int64_t> sizes) {
    return allocate(Args::kName, sizes.begin(), rank, kInts, device);
  };
  auto const ints_of = [](OwnedTensor const& tensor) {
    return static_cast<int*>(mutable_data(tensor));
  };
  OwnedTensor seen, marks;
  int64_t const batches = params.interval_batch;
  int64_t const of_heads = int64_t(params.list_batch()) * params.heads;
  results.mask_rows = !call.intervals    ? make(1, {0})
                      : call.is_packed() ? make(2, {args.queries, 4})
                                         : make(3, {batches, args.queries, 4});
  results.key_lists =
      make(4, {params.list_batch(), params.heads, params.lists(), kListHeader + params.tiles()});
  results.query_lists = params.tile_queries == 0
                            ? make(1, {0})
                            : make(4, {params.list_batch(), params.heads, params.query_list_count(),
                                       kListHeader + 2 * int64_t(params.query_tiles())});
  seen = make(1, {batches * params.lists() * params.block_words() *
                  int64_t(sizeof(SeenBlocks) / sizeof(int))});
  marks = make(1, {of_heads * params.tile_words() * params.lists() * params.tiles_of_list() *
                   int64_t(sizeof(QueryMarks) / sizeof(int))});
  params.rows = ints_of(results.mask_rows);
  params.key_lists = ints_of(results.key_lists);
  params.query_lists = ints_of(results.query_lists);
  params.seen = reinterpret_cast<SeenBlocks*>(ints_of(seen));
  params.marks = reinterpret_cast<QueryMarks*>(ints_of(marks));
  launch_mask_lists(params, current_stream(device));
  Args::box(stack, results);
}

constexpr BoxedOp kOps[] = {{Args::kName, &boxed_mask_lists}};

}  // namespace

std::span<BoxedOp const> mask_list_ops() { return kOps; }

}  // namespace fa3
