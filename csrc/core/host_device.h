// FA3_HD marks a function for both compilers: g++ for the host tests and the planner, nvcc for the
// kernels. core/ holds plain integer and float arithmetic: no CUDA, no CuTe, no torch.
#pragma once

#if defined(__CUDACC__)
#define FA3_HD __host__ __device__ __forceinline__
#else
#define FA3_HD inline
#endif
