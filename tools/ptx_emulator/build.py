"""Builds the emulator: kernels as nvcc translates them to PTX, turned into C++ for this CPU, below
the ops of the package.

    python -m tools.ptx_emulator.build 'FwdBf16D64*,BwdBf16D64*'

makes tools/ptx_emulator/_emulated.so, with those variants and all kernels that have none;
`pytest tests/gpu --device emulated` uses it. Objects are cached as those of the package are.
"""
from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from build_tools import native, toolchain, units
from build_tools.toolchain import BuildError, Cuda
from build_tools.units import ROOT, Unit
from csrc.plan.generate import generate
from tools.ptx_emulator.library import LIBRARY
from tools.ptx_emulator.translate import translate
from third_party.fetch import cutlass_include

FOLDER = Path(__file__).resolve().parent
BUILD = units.BUILD / 'emulator'
FLAGS = ('-std=c++20', '-O2', '-DNDEBUG', '-fPIC', '-fvisibility=hidden')
# What the ops ask of PyTorch that has to do with CUDA; torch_calls.cpp answers.
RENAMED = {f'aoti_torch_{name}': f'emulator_{name}' for name in (
    'get_device_type', 'get_device_index', 'get_current_device_index', 'get_current_cuda_stream',
    'create_device_guard', 'delete_device_guard', 'get_data_ptr', 'empty_strided')}
RENAMED['torch_get_const_data_ptr'] = 'emulator_get_const_data_ptr'
REGISTRATION = '''#include <torch/csrc/stable/library.h>

#include <cstdlib>
#include <utility>
#include <vector>

#include "memory.h"
#include "ops/library.h"

constexpr size_t kMostOps = 64;

std::vector<fa3::BoxedOp> const& ops() {{
  static std::vector<fa3::BoxedOp> const all = [] {{
    std::vector<fa3::BoxedOp> found;
    for (auto const list : {{{lists}}}) {{
      found.insert(found.end(), list.begin(), list.end());
    }}
    found.size() <= kMostOps ? void() : std::abort();
    return found;
  }}();
  return all;
}}

// Each op knows its own tensors only.
template <size_t kIndex>
void emulated(StableIValue* stack, uint64_t arguments, uint64_t results) {{
  emulator::forget_memory();
  ops()[kIndex].run(stack, arguments, results);
}}

template <size_t kIndex>
void register_one(torch::stable::detail::StableLibrary& m) {{
  if (kIndex < ops().size()) {{
    m.impl(ops()[kIndex].name, &emulated<kIndex>);
  }}
}}

template <size_t... kIndices>
void register_all(torch::stable::detail::StableLibrary& m, std::index_sequence<kIndices...>) {{
  (register_one<kIndices>(m), ...);
}}

STABLE_TORCH_LIBRARY_IMPL(flash_attn3, CPU, m) {{
  register_all(m, std::make_index_sequence<kMostOps>());
}}
'''


def _unit(source: Path, flags: Sequence[str] = (), foreign: Sequence[Path] = ()) -> Unit:
    own = (FOLDER, native.CSRC, BUILD / 'instances')
    versions = (toolchain.output_of([toolchain.find_cxx(), '--version']).splitlines()[0],
                torch.__version__)
    return Unit(source, (toolchain.find_cxx(),), (*FLAGS, *flags), own, tuple(foreign), versions)


def machine_units(cuda: Cuda) -> list[Unit]:
    """The emulator, without kernels."""
    return [_unit(path, ['-O3', '-Wall', '-Wextra'], [cuda.include])
            for path in sorted(FOLDER.glob('*.cpp')) if path.name != 'torch_calls.cpp']


def kernel_units(ptx: Sequence[str], folder: Path) -> list[Unit]:
    """C++ of the kernels of PTX files. The optimiser takes most of the time: -O1."""
    folder.mkdir(parents=True, exist_ok=True)
    return [_unit(path, ['-O1', '-w']) for path in translate(ptx, folder)]


def op_units(cuda: Cuda) -> list[Unit]:
    """The ops of the package, for CPU tensors."""
    text = (native.CSRC / 'ops' / 'registration.cpp').read_text()
    registration = BUILD / 'registration.cpp'
    registration.write_text(REGISTRATION.format(
        lists=', '.join(re.findall(r'fa3::\w+_ops\(\)', text))))
    foreign = [Path(torch.__path__[0], 'include'), cuda.include]
    renames = [f'-D{name}={other}' for name, other in RENAMED.items()]
    ops = [path for path in sorted((native.CSRC / 'ops').glob('*.cpp'))
           if path.name != 'registration.cpp']
    return [*(_unit(path, [*native.OPS_FLAGS, *renames], foreign) for path in (*ops, registration)),
            _unit(FOLDER / 'torch_calls.cpp', native.OPS_FLAGS, foreign),
            *(_unit(path) for path in native.plain_sources())]


def compile_to_ptx(source: Path, cuda: Cuda) -> tuple[str, Path]:
    """The PTX of a CUDA source and the object with its host's side, from the cache or made now."""
    flags = [flag.replace('code=sm_90a', 'code=compute_90a') for flag in native.NVCC_FLAGS
             if flag not in ('-lineinfo', '-Xptxas', '-v')]
    flags.append('-D__noinline__=inline')    # ptx.py knows no calls
    own = (native.CSRC, BUILD / 'instances')
    unit = Unit(source, (str(cuda.nvcc), '-ccbin', toolchain.find_cxx()), tuple(flags), own,
                (cutlass_include(),), (cuda.version,))
    cached = units.cache_folder() / f'emulator_{unit.name}-{units.key(unit)}'
    ptx, host = cached.with_suffix('.ptx'), cached.with_suffix('.o')
    if not (ptx.exists() and host.exists()):
        print(f'tools.ptx_emulator: {source.relative_to(ROOT)}', flush=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:
            made = Path(folder, 'host.o')
            command = [*unit.compiler, *flags, *(f'-I{path}' for path in own), '-isystem',
                       str(cutlass_include()), '--keep', '--keep-dir', folder, '-c', str(source),
                       '-o', str(made)]
            if subprocess.run(command, stdin=subprocess.DEVNULL).returncode != 0:
                raise BuildError(f'tools.ptx_emulator: nvcc did not compile {source}')
            shutil.move(Path(folder, f'{source.stem}.ptx'), ptx)
            shutil.move(made, host)
    for path in (ptx, host):
        os.utime(path)    # units.py removes what nobody has used for long
    return ptx.read_text(), host


def link(objects: Sequence[Path], target: Path, libraries: Sequence[str] = ()) -> None:
    """PyTorch has a CUDA runtime of its own: each library keeps to its own names."""
    native.link(list(objects), ['-Wl,-Bsymbolic', *libraries], target)


def build(variants: str) -> Path:
    """The ops of the package on the emulator; raises BuildError."""
    cuda = toolchain.find_cuda()
    BUILD.mkdir(parents=True, exist_ok=True)
    sources = [*sorted(native.CSRC.glob('*/*.cu')), *generate(BUILD / 'instances', variants)]
    with ThreadPoolExecutor(units.max_jobs()) as pool:
        compiled = list(pool.map(lambda source: compile_to_ptx(source, cuda), sources))
    all_units = [*kernel_units([ptx for ptx, _ in compiled], BUILD / 'kernels'),
                 *machine_units(cuda), *op_units(cuda)]
    objects = units.compile_units(all_units)
    link([*objects.values(), *(host for _, host in compiled)], LIBRARY,
         [f'-L{torch.__path__[0]}/lib', '-ltorch', '-ltorch_cpu', '-ldl'])
    return LIBRARY


if __name__ == '__main__':
    try:
        print(build(sys.argv[1] if len(sys.argv) > 1 else ''))
    except BuildError as error:
        sys.exit(str(error))
