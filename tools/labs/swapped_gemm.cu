// Whether S^T = K Q^T has the bits of S = Q K^T, and O^T = V^T P^T those of O = P V, on one K tile
// of 128 keys and head dim 128; and the cycles of each, one group of wgmma after the other.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <cute/tensor.hpp>

using namespace cute;

constexpr int kKeys = 128;
constexpr int kD = 128;

// D += A B^T of shared memory, A (M, K) and B (N, K) row-major in global memory. In shared memory
// their K or their other mode is contiguous.
template <class T, int kM, int kN, int kK, GMMA::Major kA, GMMA::Major kB>
__global__ void multiply(T const* a, T const* b, float* d, int repeats, long long* cycles) {
  extern __shared__ __align__(1024) unsigned char memory[];
  using AtomA = std::conditional_t<kA == GMMA::Major::K, GMMA::Layout_K_SW128_Atom<T>,
                                   GMMA::Layout_MN_SW128_Atom<T>>;
  using AtomB = std::conditional_t<kB == GMMA::Major::K, GMMA::Layout_K_SW128_Atom<T>,
                                   GMMA::Layout_MN_SW128_Atom<T>>;
  auto const layout_a = tile_to_shape(AtomA{}, Shape<Int<kM>, Int<kK>>{});
  auto const layout_b = tile_to_shape(AtomB{}, Shape<Int<kN>, Int<kK>>{});
  T* const data = reinterpret_cast<T*>(memory);
  auto const s_a = make_tensor(make_smem_ptr(data), layout_a);
  auto const s_b = make_tensor(make_smem_ptr(data + cosize(layout_a)), layout_b);
  for (int i = threadIdx.x; i < kM * kK; i += 128) {
    s_a(i / kK, i % kK) = a[i];
  }
  for (int i = threadIdx.x; i < kN * kK; i += 128) {
    s_b(i / kK, i % kK) = b[i];
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  auto mma =
      make_tiled_mma(GMMA::ss_op_selector<T, T, float, Shape<_64, Int<kN>, Int<kK>>, kA, kB>());
  auto const own = mma.get_thread_slice(threadIdx.x);
  auto const r_a = own.make_fragment_A(own.partition_A(s_a));
  auto const r_b = own.make_fragment_B(own.partition_B(s_b));
  auto r_d = partition_fragment_C(mma, Shape<Int<kM>, Int<kN>>{});
  auto const where = own.partition_C(make_identity_tensor(Shape<Int<kM>, Int<kN>>{}));
  for (int i = 0; i < size(r_d); ++i) {
    r_d(i) = d[get<0>(where(i)) * kN + get<1>(where(i))];
  }
  long long const begin = clock64();
  for (int repeat = 0; repeat < repeats; ++repeat) {
    warpgroup_fence_operand(r_d);
    warpgroup_arrive();
    mma.accumulate_ = GMMA::ScaleOut::One;
    CUTE_UNROLL
    for (int k = 0; k < size<2>(r_a); ++k) {
      cute::gemm(mma, r_a(_, _, k), r_b(_, _, k), r_d);
    }
    warpgroup_commit_batch();
    warpgroup_wait<0>();
    warpgroup_fence_operand(r_d);
  }
  *cycles = (clock64() - begin) / repeats;
  for (int i = 0; i < size(r_d); ++i) {
    d[get<0>(where(i)) * kN + get<1>(where(i))] = r_d(i);
  }
}

template <class T, int kM, int kN, int kK, GMMA::Major kA, GMMA::Major kB>
long long run(std::vector<T> const& a, std::vector<T> const& b, std::vector<float>& d,
              int repeats = 1) {
  T *on_a, *on_b;
  float* on_d;
  long long cycles, *on_cycles;
  cudaMalloc(&on_a, a.size() * sizeof(T));
  cudaMalloc(&on_b, b.size() * sizeof(T));
  cudaMalloc(&on_d, d.size() * sizeof(float));
  cudaMalloc(&on_cycles, sizeof(cycles));
  cudaMemcpy(on_a, a.data(), a.size() * sizeof(T), cudaMemcpyHostToDevice);
  cudaMemcpy(on_b, b.data(), b.size() * sizeof(T), cudaMemcpyHostToDevice);
  cudaMemcpy(on_d, d.data(), d.size() * sizeof(float), cudaMemcpyHostToDevice);
  auto* const kernel = multiply<T, kM, kN, kK, kA, kB>;
  constexpr int kBytes = (kM + kN) * kK * sizeof(T) + 2048;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  kernel<<<1, 128, kBytes>>>(on_a, on_b, on_d, repeats, on_cycles);
  cudaMemcpy(d.data(), on_d, d.size() * sizeof(float), cudaMemcpyDeviceToHost);
  cudaMemcpy(&cycles, on_cycles, sizeof(cycles), cudaMemcpyDeviceToHost);
  if (cudaError_t const error = cudaGetLastError()) {
    std::printf("%s\n", cudaGetErrorString(error));
    std::exit(1);
  }
  cudaFree(on_a);
  cudaFree(on_b);
  cudaFree(on_d);
  cudaFree(on_cycles);
  return cycles;
}

float normal() {
  float const u = (rand() + 1.f) / (RAND_MAX + 2.f);
  return std::sqrt(-2 * std::log(u)) * std::cos(6.2831853f * rand() / float(RAND_MAX));
}

template <class T>
std::vector<T> random_values(int size, float spread) {
  std::vector<T> x(size);
  for (T& one : x) {
    one = T(normal() * std::exp(spread * normal()));
  }
  return x;
}

// Elements (row, column) of a that differ from (column, row) of b, of the first rows.
int differing(std::vector<float> const& a, std::vector<float> const& b, int rows, int columns) {
  int count = 0;
  for (int i = 0; i < rows * columns; ++i) {
    float const& swapped = b[i % columns * rows + i / columns];
    count += std::memcmp(&a[i], &swapped, sizeof(float)) != 0;
  }
  return count;
}

// kN query rows; as N of a plain GEMM's M they are padded to 64. The sums begin at random numbers.
template <class T, int kN, GMMA::Major kV>
void compare(char const* name, float spread) {
  constexpr auto kK = GMMA::Major::K;
  int differ_s = 0, differ_o = 0;
  for (int trial = 0; trial < 20; ++trial) {
    auto const k = random_values<T>(kKeys * kD, spread), vt = random_values<T>(kD * kKeys, 0.f);
    auto q = random_values<T>(kN * kD, spread), p = random_values<T>(kN * kKeys, spread);
    auto s = random_values<float>(64 * kKeys, 1.f), o = random_values<float>(64 * kD, 1.f);
    std::vector<float> st(kKeys * kN), ot(kD * kN);
    for (int i = 0; i < kN * 128; ++i) {
      st[i % 128 * kN + i / 128] = s[i];
      ot[i % 128 * kN + i / 128] = o[i];
    }
    run<T, kKeys, kN, kD, kK, kK>(k, q, st);
    run<T, kD, kN, kKeys, kV, kK>(vt, p, ot);
    q.resize(64 * kD, T(0.f));
    p.resize(64 * kKeys, T(0.f));
    run<T, 64, kKeys, kD, kK, kK>(q, k, s);
    run<T, 64, kD, kKeys, kK, kV>(p, vt, o);
    differ_s += differing(s, st, kN, kKeys);
    differ_o += differing(o, ot, kN, kD);
  }
  std::vector<T> const rows(64 * 128, T(1.f)), few(kN * 128, T(1.f)), tile(128 * 128, T(1.f));
  std::vector<float> plain(64 * 128), swapped(128 * kN);
  std::printf(
      "%s, %d rows, spread %.0f: of %d elements S differs in %d, O in %d; cycles plain %lld, "
      "swapped %lld\n",
      name, kN, spread, 20 * kN * 128, differ_s, differ_o,
      run<T, 64, kKeys, kD, kK, kK>(rows, tile, plain, 200),
      run<T, kKeys, kN, kD, kK, kK>(tile, few, swapped, 200));
}

int main() {
  for (float const spread : {0.f, 2.f}) {
    compare<bfloat16_t, 8, GMMA::Major::MN>("bf16", spread);
    compare<bfloat16_t, 16, GMMA::Major::MN>("bf16", spread);
    compare<bfloat16_t, 32, GMMA::Major::MN>("bf16", spread);
    compare<bfloat16_t, 64, GMMA::Major::MN>("bf16", spread);
    compare<half_t, 8, GMMA::Major::MN>("fp16", spread);
    compare<float_e4m3_t, 8, GMMA::Major::K>("e4m3", spread);
    compare<float_e4m3_t, 32, GMMA::Major::K>("e4m3", spread);
  }
}
