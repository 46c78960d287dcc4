"""The wgmma shapes that CuTe only offers behind CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED.

csrc/plan/generate.py writes them to wgmma_shapes.h. Defining that macro instead would add half
a minute to every compile unit.
"""
# N of the MMAs that tiles use beyond CuTe's own 32, 64, 96, 128, 192 and 256. Scores: keys of a
# tile, both operands in shared memory. Outputs: head dim of V, P in registers.
SCORE_WIDTHS = (48, 80, 112, 144, 160, 176)
OUTPUT_WIDTHS = (48, 80, 112, 144, 160, 176, 208, 224, 240)
DTYPES = {'BF16': ('bf16', 'cutlass::bfloat16_t'), 'F16': ('f16', 'cutlass::half_t')}

HEADER = '''\
// Written by csrc/device/generate_wgmma_shapes.py: shapes that CuTe hides.
//
// 64 rows, fp32 accumulators. Ss: both operands in shared memory; Rs: the first in registers.
#pragma once

#include "device/cute.h"

namespace fa3 {

using cute::GMMA::Major;
using cute::GMMA::ScaleOut;
'''

OP = '''
template <Major kMajorA, Major kMajorB>
struct Wgmma64x{n}x16{dtype}{kind} {{
  using DRegisters = void;
  using ARegisters = {a_type};
  using BRegisters = uint64_t[1];
  using CRegisters = float[{regs}];

  CUTE_HOST_DEVICE static void fma(
      {a_params}, uint64_t const& desc_b,
{params},
      ScaleOut const scale_d = ScaleOut::One) {{
#if defined(__CUDA_ARCH__)
    asm volatile(
        "{{\\n"
        ".reg .pred p;\\n"
        "setp.ne.b32 p, %{scale}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{ptx}.{ptx} {{"
{slots}
        "}}, {a_slots}, %{b}, p, 1, 1, {majors};\\n"
        "}}\\n"
        : {outputs}
        : {a_inputs}, "l"(desc_b), "r"(int32_t(scale_d)), {major_inputs});
#endif
  }}
}};
'''

TRAITS = '''
template <fa3::Major kMajorA, fa3::Major kMajorB>
struct cute::MMA_Traits<fa3::Wgmma64x{n}x16{dtype}{kind}<kMajorA, kMajorB>> {{
  using ValTypeD = float;
  using ValTypeA = {element};
  using ValTypeB = {element};
  using ValTypeC = float;
{a_fragment}  using FrgTypeB = GMMA::smem_desc<kMajorB>;
  using Shape_MNK = Shape<_64, Int<{n}>, _16>;
  using ThrID = Layout<_128>;
  using ALayout = {a_layout};
  using BLayout = GMMA::ABLayout<{n}, 16>;
  using CLayout = GMMA::CLayout_64xN<{n}>;
  GMMA::ScaleOut accumulate_ = GMMA::ScaleOut::One;
}};
'''

CHOICE = '''
// The shape with {what} for {n} columns; void where CuTe has it.
template <class Element, int kColumns, Major kMajorA, Major kMajorB>
struct {name} {{
  using type = void;
}};
'''

CHOSEN = '''
template <Major kMajorA, Major kMajorB>
struct {name}<{element}, {n}, kMajorA, kMajorB> {{
  using type = Wgmma64x{n}x16{dtype}{kind}<kMajorA, kMajorB>;
}};
'''


def _rows(items: list[str], per_line: int, indent: int) -> str:
    lines = [items[i:i + per_line] for i in range(0, len(items), per_line)]
    return ',\n'.join(' ' * indent + ', '.join(line) for line in lines)


def _operand_a(kind: str, regs: int) -> dict[str, str | int]:
    """The parts of an op that depend on the location of operand A."""
    if kind == 'Ss':
        return {'a_type': 'uint64_t[1]', 'a_params': 'uint64_t const& desc_a',
                'a_slots': f'%{regs}', 'a_inputs': '"l"(desc_a)', 'b': regs + 1, 'scale': regs + 2,
                'majors': f'%{regs + 3}, %{regs + 4}',
                'major_inputs': '"n"(int32_t(kMajorA)), "n"(int32_t(kMajorB))'}
    names = [f'a{i}' for i in range(4)]
    slots = ', '.join(f'%{regs + i}' for i in range(4))
    return {'a_type': 'uint32_t[4]', 'b': regs + 4, 'scale': regs + 5, 'majors': f'%{regs + 6}',
            'a_params': ', '.join(f'uint32_t const& {name}' for name in names),
            'a_slots': f'{{{slots}}}', 'a_inputs': ', '.join(f'"r"({name})' for name in names),
            'major_inputs': '"n"(int32_t(kMajorB))'}


def _op(n: int, dtype: str, kind: str) -> str:
    regs = n // 2
    slots = [f'%{i}' for i in range(regs)]
    lines = [', '.join(slots[i:i + 16]) for i in range(0, regs, 16)]
    return OP.format(
        n=n, dtype=dtype, kind=kind, ptx=DTYPES[dtype][0], regs=regs,
        params=_rows([f'float& d{i}' for i in range(regs)], 7, 6),
        slots='\n'.join(f'        "{line}{", " if i + 1 < len(lines) else ""}"'
                        for i, line in enumerate(lines)),
        outputs=_rows([f'"+f"(d{i})' for i in range(regs)], 7, 10).lstrip(),
        **_operand_a(kind, regs))


def _traits(n: int, dtype: str, kind: str) -> str:
    in_registers = kind == 'Rs'
    return TRAITS.format(
        n=n, dtype=dtype, kind=kind, element=DTYPES[dtype][1],
        a_fragment='' if in_registers else '  using FrgTypeA = GMMA::smem_desc<kMajorA>;\n',
        a_layout='GMMA::ALayout_64x16' if in_registers else 'GMMA::ABLayout<64, 16>')


def header() -> str:
    """The text of wgmma_shapes.h."""
    shapes = [(n, dtype, kind) for kind, widths in (('Ss', SCORE_WIDTHS), ('Rs', OUTPUT_WIDTHS))
              for n in widths for dtype in DTYPES]
    names = {'Ss': 'ExtraWgmmaSs', 'Rs': 'ExtraWgmmaRs'}
    choices = [CHOICE.format(name=names['Ss'], n='kColumns', what='both operands in shared memory'),
               CHOICE.format(name=names['Rs'], n='kColumns', what='the first operand in registers')]
    chosen = [CHOSEN.format(name=names[kind], element=DTYPES[dtype][1], n=n, dtype=dtype, kind=kind)
              for n, dtype, kind in shapes]
    return (HEADER + ''.join(_op(*shape) for shape in shapes) + ''.join(choices + chosen)
            + '\n}  // namespace fa3\n' + ''.join(_traits(*shape) for shape in shapes))
