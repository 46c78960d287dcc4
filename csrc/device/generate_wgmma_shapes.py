"""Writes wgmma_shapes.h, when a tile needs another width:

    python generate_wgmma_shapes.py > wgmma_shapes.h
"""

WIDTHS = (80, 176)
DTYPES = {'BF16': ('bf16', 'cutlass::bfloat16_t'), 'F16': ('f16', 'cutlass::half_t')}

HEADER = '''\
// wgmma shapes that CuTe only offers behind CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED: 64 rows, fp32
// accumulators, both operands in shared memory. Text written by generate_wgmma_shapes.py; do not
// edit by hand.
#pragma once

#include "device/cute.h"

namespace fa3 {

using cute::GMMA::Major;
using cute::GMMA::ScaleIn;
using cute::GMMA::ScaleOut;
'''

OP = '''
template <Major kMajorA, Major kMajorB>
struct Wgmma64x{n}x16{dtype} {{
  using DRegisters = void;
  using ARegisters = uint64_t[1];
  using BRegisters = uint64_t[1];
  using CRegisters = float[{regs}];

  CUTE_HOST_DEVICE static void fma(
      uint64_t const& desc_a, uint64_t const& desc_b,
{params},
      ScaleOut const scale_d = ScaleOut::One) {{
#if defined(__CUDA_ARCH__)
    asm volatile(
        "{{\\n"
        ".reg .pred p;\\n"
        "setp.ne.b32 p, %{scale}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{ptx}.{ptx} {{"
{slots}
        "}}, %{a}, %{b}, p, 1, 1, %{ta}, %{tb};\\n"
        "}}\\n"
        : {outputs}
        : "l"(desc_a), "l"(desc_b), "r"(int32_t(scale_d)), "n"(int32_t(kMajorA)),
          "n"(int32_t(kMajorB)));
#endif
  }}
}};
'''

TRAITS = '''
template <fa3::Major kMajorA, fa3::Major kMajorB>
struct cute::MMA_Traits<fa3::Wgmma64x{n}x16{dtype}<kMajorA, kMajorB>> {{
  using ValTypeD = float;
  using ValTypeA = {element};
  using ValTypeB = {element};
  using ValTypeC = float;
  using FrgTypeA = GMMA::smem_desc<kMajorA>;
  using FrgTypeB = GMMA::smem_desc<kMajorB>;
  using Shape_MNK = Shape<_64, Int<{n}>, _16>;
  using ThrID = Layout<_128>;
  using ALayout = GMMA::ABLayout<64, 16>;
  using BLayout = GMMA::ABLayout<{n}, 16>;
  using CLayout = GMMA::CLayout_64xN<{n}>;
  GMMA::ScaleOut accumulate_ = GMMA::ScaleOut::One;
}};
'''


def rows(items, per_line, indent, end=','):
    lines = [items[i:i + per_line] for i in range(0, len(items), per_line)]
    return (end + '\n').join(' ' * indent + ', '.join(line) for line in lines)


def op(n, dtype, ptx):
    regs = n // 2
    slots = [f'%{i}' for i in range(regs)]
    lines = [', '.join(slots[i:i + 16]) for i in range(0, regs, 16)]
    return OP.format(
        n=n, dtype=dtype, ptx=ptx, regs=regs, scale=regs + 2, a=regs, b=regs + 1, ta=regs + 3,
        tb=regs + 4,
        params=rows([f'float& d{i}' for i in range(regs)], 7, 6),
        slots='\n'.join(f'        "{line}{", " if i + 1 < len(lines) else ""}"'
                        for i, line in enumerate(lines)),
        outputs=rows([f'"+f"(d{i})' for i in range(regs)], 7, 10).lstrip())


def main():
    print(HEADER, end='')
    for n in WIDTHS:
        for dtype, (ptx, _) in DTYPES.items():
            print(op(n, dtype, ptx), end='')
    print('\n}  // namespace fa3')
    for n in WIDTHS:
        for dtype, (_, element) in DTYPES.items():
            print(TRAITS.format(n=n, dtype=dtype, element=element), end='')


if __name__ == '__main__':
    main()
