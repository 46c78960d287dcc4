// A decode step with the GEMMs the other way round: S^T = K Q^T and O^T = V^T P^T, whose N is the
// query rows of a KV head. A producer warpgroup reads K and V by cp.async, 16 bytes a thread, whole
// rows. bf16, head dim 128. Each CTA writes partial results; the host combines and checks them.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include <cuda_bf16.h>
#include <cute/tensor.hpp>

using namespace cute;
using Bf16 = cutlass::bfloat16_t;

constexpr int kD = 128;
constexpr int kMostUnits = 20;  // (sequence, KV head) pairs of a CTA
constexpr float kScale = 0.08838834764f;
constexpr float kScaleLog2 = kScale * 1.44269504f;

struct Params {
  Bf16 const* q;     // (units, N, D); rows after the group are 0
  Bf16 const* k;     // (keys of all, heads, D)
  Bf16 const* v;     // the same
  int const* table;  // (batch, pages)
  float* o;          // (parts, N, D)
  float2* max_sum;   // (parts, N)
  int* unit_of;      // (parts)
  int batch;
  int heads;
  int keys;
  int page_log2;

  __host__ __device__ int units() const { return batch * heads; }
};

template <int kN, int kTile, int kStages>
struct Shared {
  static constexpr int kQueries = kN <= 16 ? 4 : 2;
  alignas(1024) Bf16 stage[kStages][kTile * kD];  // K and V in turn
  alignas(1024) Bf16 q[kQueries][kN * kD];
  alignas(128) Bf16 p[kN * kTile];
  float exchange[4][kN];
  uint64_t full[kStages];
  uint64_t empty[kStages];
};

// ------------------------------------------------------------------------------- instructions
__device__ uint32_t shared_address(void const* x) { return uint32_t(__cvta_generic_to_shared(x)); }

__device__ void init_barrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}
__device__ void wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{ .reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
      "@!p bra again; }" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
__device__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives when this thread's copies are complete.
__device__ void arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
__device__ void copy(uint32_t to, void const* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
               : "memory");
}
__device__ void fence_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ void meet_consumers() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

// Where a chunk of 16 bytes of a row lies: two halves of 64 columns, 128-byte swizzle.
__device__ uint32_t swizzled(int row, int chunk, int rows) {
  return (chunk / 8) * rows * 128 + row * 128 + ((chunk % 8) ^ (row % 8)) * 16;
}

// -------------------------------------------------------------------------------- work of a CTA
// K tiles [tile, end) of all units, one unit after the other.
struct Tiles {
  int tile;
  int end;
  int of_unit;

  __device__ Tiles(Params const& p, int tile_keys) : of_unit(p.keys / tile_keys) {
    int64_t const all = int64_t(p.units()) * of_unit;
    tile = int(all * blockIdx.x / gridDim.x);
    end = int(all * (blockIdx.x + 1) / gridDim.x);
  }
  __device__ int unit() const { return tile / of_unit; }
  __device__ int index() const { return tile % of_unit; }
};

template <int kStages>
struct Ring {
  int stage = 0;
  int phase;

  __device__ explicit Ring(int first_phase) : phase(first_phase) {}
  __device__ void next() {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    phase ^= stage == 0;
  }
};

template <int kN, bool kPaged, int kTile, int kStages>
__device__ void produce(Params const& p, Shared<kN, kTile, kStages>& s) {
  constexpr int kRows = kTile / 8;  // rows of a thread: first_row + 8 * i
  int const thread = threadIdx.x - 128;
  int const first_row = thread / 16;
  int const chunk = thread % 16;
  Tiles tiles(p, kTile);
  Ring<kStages> ring(1);
  int unit = -1;
  int count = 0;
  for (; tiles.tile < tiles.end; ++tiles.tile) {
    int const b = tiles.unit() / p.heads;
    int const first_key = tiles.index() * kTile + first_row;
    int64_t at[kRows];
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      int const key = first_key + 8 * i;
      int const page = key >> p.page_log2;
      int64_t const row =
          !kPaged ? int64_t(b) * p.keys + key
                  : (int64_t(__ldg(p.table + int64_t(b) * (p.keys >> p.page_log2) + page))
                     << p.page_log2) +
                        (key & ((1 << p.page_log2) - 1));
      at[i] = (row * p.heads + tiles.unit() % p.heads) * kD + chunk * 8;
    }
    for (Bf16 const* source : {p.k, p.v}) {
      wait(&s.empty[ring.stage], ring.phase);
      if (unit != tiles.unit()) {  // its queries come with its first keys
        unit = tiles.unit();
        uint32_t const q = shared_address(s.q[count++ % s.kQueries]);
        for (int row = first_row; row < kN; row += 8) {
          copy(q + swizzled(row, chunk, kN), p.q + (int64_t(unit) * kN + row) * kD + chunk * 8);
        }
      }
      uint32_t const to = shared_address(s.stage[ring.stage]);
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        copy(to + swizzled(first_row + 8 * i, chunk, kTile), source + at[i]);
      }
      arrive_after_copies(&s.full[ring.stage]);
      ring.next();
    }
  }
  asm volatile("cp.async.wait_all;");
}

// ------------------------------------------------------------------------------------ consumer
// Over the lanes of a warp that have the same columns.
template <class Combine>
__device__ float over_lanes(float x, Combine const& combine) {
  for (int distance = 4; distance < 32; distance *= 2) {
    x = combine(x, __shfl_xor_sync(~0u, x, distance));
  }
  return x;
}

// A thread has columns 8 * (i / 2) + 2 * (lane % 4) + i % 2 of S^T and O^T, i < kN / 4.
template <int kN>
__device__ int column_of(int i) {
  return 8 * (i / 2) + 2 * (threadIdx.x % 4) + i % 2;
}

// Over all lanes and the four warps.
template <int kN, class Combine>
__device__ void over_rows(float (&x)[kN / 4], float (&exchange)[4][kN], Combine const& combine) {
  CUTE_UNROLL
  for (int i = 0; i < kN / 4; ++i) {
    x[i] = over_lanes(x[i], combine);
    if (threadIdx.x % 32 < 4) {
      exchange[threadIdx.x / 32][column_of<kN>(i)] = x[i];
    }
  }
  meet_consumers();
  CUTE_UNROLL
  for (int i = 0; i < kN / 4; ++i) {
    int const column = column_of<kN>(i);
    x[i] = combine(combine(exchange[0][column], exchange[1][column]),
                   combine(exchange[2][column], exchange[3][column]));
  }
}

// Which of a thread's columns element i of S^T or O^T is in.
template <int kN>
__device__ int index_of(int i) {
  return (i / 4) % (kN / 8) * 2 + i % 2;
}

template <int kN>
struct Softmax {
  float most[kN / 4];    // in units of log2
  float sum[kN / 4];     // over this thread's keys
  float shrink[kN / 4];  // rescales what earlier K tiles gave

  __device__ Softmax() {
    CUTE_UNROLL
    for (int i = 0; i < kN / 4; ++i) {
      most[i] = -INFINITY;
      sum[i] = 0.f;
    }
  }

  // P^T of a K tile into shared memory.
  template <class Scores, class Where, class P>
  __device__ void update(Scores const& r_s, Where const& where, P const& s_p,
                         float (&exchange)[4][kN]) {
    float now[kN / 4];
    CUTE_UNROLL
    for (int i = 0; i < kN / 4; ++i) {
      now[i] = -INFINITY;
    }
    CUTE_UNROLL
    for (int i = 0; i < size(r_s); ++i) {
      now[index_of<kN>(i)] = fmaxf(now[index_of<kN>(i)], r_s(i));
    }
    over_rows<kN>(now, exchange, [](float a, float b) { return fmaxf(a, b); });
    CUTE_UNROLL
    for (int i = 0; i < kN / 4; ++i) {
      float const next = fmaxf(most[i], now[i] * kScaleLog2);
      shrink[i] = exp2f(most[i] - next);
      most[i] = next;
      sum[i] *= shrink[i];
    }
    CUTE_UNROLL
    for (int i = 0; i < size(r_s); i += 2) {
      int const column = index_of<kN>(i);
      float const a = exp2f(fmaf(r_s(i), kScaleLog2, -most[column]));
      float const b = exp2f(fmaf(r_s(i + 1), kScaleLog2, -most[column + 1]));
      sum[column] += a;
      sum[column + 1] += b;
      auto const [key, row] = where(i);
      *reinterpret_cast<__nv_bfloat162*>(&s_p(row, key)) = __floats2bfloat162_rn(a, b);
    }
  }
};

// One group of wgmma, from descriptors; waits for it.
template <class Mma, class A, class B, class D>
__device__ void multiply(Mma mma, A const& a, B const& b, D& d, GMMA::ScaleOut first) {
  warpgroup_fence_operand(d);
  warpgroup_arrive();
  mma.accumulate_ = first;
  CUTE_UNROLL
  for (int k = 0; k < size<2>(a); ++k) {
    cute::gemm(mma, a(_, _, k), b(_, _, k), d);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
  warpgroup_wait<0>();
  warpgroup_fence_operand(d);
}

template <int kN, int kTile, int kStages>
__device__ void consume(Params const& p, Shared<kN, kTile, kStages>& s) {
  constexpr auto kK = GMMA::Major::K;
  constexpr auto kMn = GMMA::Major::MN;
  using Rows = Shape<Int<kTile>, Int<kD>>;
  auto const mma_s = make_tiled_mma(
      GMMA::ss_op_selector<Bf16, Bf16, float, Shape<_64, Int<kN>, Int<kD>>, kK, kK>());
  auto const mma_o = make_tiled_mma(
      GMMA::ss_op_selector<Bf16, Bf16, float, Shape<_64, Int<kN>, Int<kTile>>, kMn, kMn>());
  auto const layout_k = tile_to_shape(GMMA::Layout_K_SW128_Atom<Bf16>{}, Rows{});
  auto const layout_q = tile_to_shape(GMMA::Layout_K_SW128_Atom<Bf16>{}, Shape<Int<kN>, Int<kD>>{});
  auto const layout_v = tile_to_shape(GMMA::Layout_MN_SW128_Atom<Bf16>{},
                                      Shape<Int<kD>, Int<kTile>>{}, Step<_2, _1>{});
  auto const layout_p =
      tile_to_shape(GMMA::Layout_MN_INTER_Atom<Bf16>{}, Shape<Int<kN>, Int<kTile>>{});
  auto const of_s = mma_s.get_thread_slice(threadIdx.x);
  auto const of_o = mma_o.get_thread_slice(threadIdx.x);
  auto r_s = partition_fragment_C(mma_s, Shape<Int<kTile>, Int<kN>>{});  // S^T
  auto r_o = partition_fragment_C(mma_o, Shape<Int<kD>, Int<kN>>{});     // O^T
  auto const where_s =
      of_s.partition_C(make_identity_tensor(Shape<Int<kTile>, Int<kN>>{}));  // (key, row)
  auto const where_o = of_o.partition_C(make_identity_tensor(Shape<Int<kD>, Int<kN>>{}));
  auto const s_p = make_tensor(make_smem_ptr(s.p), layout_p);
  Softmax<kN> softmax;
  int unit = -1;
  int count = -1;
  auto const finish = [&] {
    over_rows<kN>(softmax.sum, s.exchange, [](float a, float b) { return a + b; });
    int const part = blockIdx.x * kMostUnits + count % kMostUnits;
    p.unit_of[part] = unit;
    CUTE_UNROLL
    for (int i = 0; i < kN / 4; ++i) {
      p.max_sum[part * kN + column_of<kN>(i)] = make_float2(softmax.most[i], softmax.sum[i]);
    }
    CUTE_UNROLL
    for (int i = 0; i < size(r_o); ++i) {
      auto const [d, row] = where_o(i);
      p.o[(int64_t(part) * kN + row) * kD + d] = r_o(i);
    }
    meet_consumers();
  };
  Tiles tiles(p, kTile);
  Ring<kStages> ring(0);
  auto const next_stage = [&] {
    Bf16* const data = s.stage[ring.stage];
    wait(&s.full[ring.stage], ring.phase);
    fence_for_wgmma();
    return data;
  };
  auto const release = [&] {
    if (threadIdx.x == 0) {
      arrive(&s.empty[ring.stage]);
    }
    ring.next();
  };
  for (; tiles.tile < tiles.end; ++tiles.tile) {
    auto const s_k = make_tensor(make_smem_ptr(next_stage()), layout_k);
    if (unit != tiles.unit()) {
      if (unit >= 0) {
        finish();
      }
      unit = tiles.unit();
      ++count;
      clear(r_o);
      softmax = {};
    }
    auto const s_q = make_tensor(make_smem_ptr(s.q[count % s.kQueries]), layout_q);
    multiply(mma_s, of_s.make_fragment_A(of_s.partition_A(s_k)),
             of_s.make_fragment_B(of_s.partition_B(s_q)), r_s, GMMA::ScaleOut::Zero);
    release();
    softmax.update(r_s, where_s, s_p, s.exchange);
    CUTE_UNROLL
    for (int i = 0; i < size(r_o); ++i) {
      r_o(i) *= softmax.shrink[index_of<kN>(i)];
    }
    fence_for_wgmma();
    meet_consumers();
    auto const s_v = make_tensor(make_smem_ptr(next_stage()), layout_v);
    multiply(mma_o, of_o.make_fragment_A(of_o.partition_A(s_v)),
             of_o.make_fragment_B(of_o.partition_B(s_p)), r_o, GMMA::ScaleOut::One);
    release();
  }
  if (unit >= 0) {
    finish();
  }
}

template <int kN, bool kPaged, int kTile, int kStages, int kCtas>
__global__ void __launch_bounds__(256, kCtas) decode(Params const __grid_constant__ p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& s = *reinterpret_cast<Shared<kN, kTile, kStages>*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      init_barrier(&s.full[i], 128);
      init_barrier(&s.empty[i], 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    consume<kN>(p, s);
  } else {
    produce<kN, kPaged>(p, s);
  }
}

__global__ void fill(Bf16* x, int64_t size, uint32_t seed) {
  int64_t const step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += step) {
    uint32_t hash = (uint32_t(i) + seed) * 2654435761u;
    hash = (hash ^ hash >> 15) * 2246822519u;
    x[i] = Bf16(float(int(hash >> 16) - 32768) * (2.f / 32768));
  }
}

// ---------------------------------------------------------------------------------------- host
float random_number() { return rand() / float(RAND_MAX) * 4 - 2; }

template <class T>
T* on_device(std::vector<T> const& x) {
  T* data = nullptr;
  cudaMalloc(&data, x.size() * sizeof(T));
  cudaMemcpy(data, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice);
  return data;
}

template <class T>
std::vector<T> on_host(T const* data, int64_t size) {
  std::vector<T> x(size);
  cudaMemcpy(x.data(), data, size * sizeof(T), cudaMemcpyDeviceToHost);
  return x;
}

// Relative error of the first row of a unit, the parts combined, against double.
double error_of(Params const& p, int parts, int rows_of_unit, int unit, std::vector<int> table) {
  std::vector<Bf16> k(int64_t(p.keys) * kD), v(int64_t(p.keys) * kD);
  auto const q = on_host(p.q + int64_t(unit) * rows_of_unit * kD, kD);
  std::vector<double> weight(p.keys), wanted(kD), got(kD);
  double most = -INFINITY, total = 0, error = 0, norm = 0;
  auto const at = [&](int key) {
    int const page = (unit / p.heads) * (p.keys >> p.page_log2) + (key >> p.page_log2);
    int64_t const slot = key & ((1 << p.page_log2) - 1);
    return (((int64_t(table[page]) << p.page_log2) + slot) * p.heads + unit % p.heads) * kD;
  };
  for (int key = 0; key < p.keys; ++key) {
    cudaMemcpy(&k[key * kD], p.k + at(key), kD * sizeof(Bf16), cudaMemcpyDeviceToHost);
    cudaMemcpy(&v[key * kD], p.v + at(key), kD * sizeof(Bf16), cudaMemcpyDeviceToHost);
  }
  for (int key = 0; key < p.keys; ++key) {
    for (int d = 0; d < kD; ++d) {
      weight[key] += kScale * double(float(q[d])) * double(float(k[key * kD + d]));
    }
    most = std::max(most, weight[key]);
  }
  for (int key = 0; key < p.keys; ++key) {
    total += weight[key] = std::exp(weight[key] - most);
    for (int d = 0; d < kD; ++d) {
      wanted[d] += weight[key] * double(float(v[key * kD + d]));
    }
  }
  auto const unit_of = on_host(p.unit_of, parts);
  auto const sums = on_host(p.max_sum, int64_t(parts) * rows_of_unit);
  auto const o = on_host(p.o, int64_t(parts) * rows_of_unit * kD);
  double got_total = 0;
  for (int part = 0; part < parts; ++part) {
    double const factor =
        unit_of[part] == unit
            ? std::exp2(sums[int64_t(part) * rows_of_unit].x - most * 1.4426950408889634)
            : 0;
    got_total += factor * (factor > 0 ? sums[int64_t(part) * rows_of_unit].y : 0);
    for (int d = 0; factor > 0 && d < kD; ++d) {
      got[d] += factor * o[int64_t(part) * rows_of_unit * kD + d];
    }
  }
  for (int d = 0; d < kD; ++d) {
    error += std::pow(got[d] / got_total - wanted[d] / total, 2);
    norm += std::pow(wanted[d] / total, 2);
  }
  return std::sqrt(error / norm);
}

// page_log2 of a dense cache: that of `keys`, a power of two.
template <int kN, bool kPaged, int kTile = 128, int kStages = 6, int kCtas = 1>
void run(int batch, int keys, int page_log2, int group) {
  constexpr int kHeads = 8;
  int const grid = 132 * kCtas;
  int const parts = grid * kMostUnits;
  int64_t const size = int64_t(batch) * keys * kHeads * kD;
  std::vector<Bf16> q(int64_t(batch) * kHeads * kN * kD);
  Bf16 *k, *v;
  cudaMalloc(&k, size * sizeof(Bf16));
  cudaMalloc(&v, size * sizeof(Bf16));
  fill<<<1024, 256>>>(k, size, 1);
  fill<<<1024, 256>>>(v, size, 12345);
  for (size_t i = 0; i < q.size(); ++i) {
    q[i] = Bf16(int(i / kD % kN) < group ? random_number() : 0.f);
  }
  std::vector<int> table(int64_t(batch) * (keys >> page_log2));
  for (size_t i = 0; i < table.size(); ++i) {
    table[i] = int(i);
    std::swap(table[i], table[kPaged ? rand() % (i + 1) : i]);
  }
  std::vector<float> o(int64_t(parts) * kN * kD);
  std::vector<float2> max_sum(int64_t(parts) * kN);
  Params const p{on_device(q),
                 k,
                 v,
                 on_device(table),
                 on_device(o),
                 on_device(max_sum),
                 on_device(std::vector<int>(parts, -1)),
                 batch,
                 kHeads,
                 keys,
                 page_log2};
  auto* const kernel = decode<kN, kPaged, kTile, kStages, kCtas>;
  constexpr int kBytes = sizeof(Shared<kN, kTile, kStages>);
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  std::vector<float> us(30);
  for (float& x : us) {
    cudaEventRecord(begin);
    kernel<<<grid, 256, kBytes>>>(p);
    cudaEventRecord(end);
    cudaEventSynchronize(end);
    cudaEventElapsedTime(&x, begin, end);
    x *= 1000;
  }
  std::sort(us.begin(), us.end());
  double const error =
      std::max(error_of(p, parts, kN, 0, table), error_of(p, parts, kN, p.units() - 1, table));
  printf(
      "%d rows, %s of %d, %d x %d keys, %d heads; K tile %d, %d stages, %d CTAs: %.1f us, "
      "%.0f GB/s, relative error %.1e, %s\n",
      group, kPaged ? "pages" : "rows", 1 << page_log2, batch, keys, kHeads, kTile, kStages, kCtas,
      us[15], size * 4 / us[15] / 1e3, error, cudaGetErrorString(cudaGetLastError()));
  void const* const all[] = {p.q, p.k, p.v, p.table, p.o, p.max_sum, p.unit_of};
  for (void const* data : all) {
    cudaFree(const_cast<void*>(data));
  }
}

int main() {
  run<8, false>(64, 4096, 12, 4);
  run<8, true>(64, 4096, 6, 4);
  run<8, true>(64, 4096, 0, 4);
  run<8, false, 64, 6, 2>(64, 4096, 12, 4);
  run<8, false>(256, 1024, 10, 4);
  run<16, false>(64, 4096, 12, 16);
  run<32, false>(64, 4096, 12, 32);
  run<64, false, 128, 5>(64, 4096, 12, 64);
}
