"""What the two libraries of the package are made of: sources, flags and what they link.

    flash_attn3/_plan.abi3.so   the planner and the checks; g++ alone, in every install
    flash_attn3/_C.abi3.so      ops and kernels; needs nvcc and a CUDA build of torch

torch.utils.cpp_extension is not used: it links cudart and c10, refuses a torch of another CUDA
major, has no cache, and would pick another CUDA_HOME. The kernels use the static CUDA runtime and
LibTorch's stable ABI, so that one library serves every torch from 2.10 on.
"""
import functools
import hashlib
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

from build_tools import toolchain
from build_tools.toolchain import BuildError, Cuda, output_of
from build_tools.units import BUILD, ROOT, Unit
from csrc.plan.generate import generate
from third_party.fetch import FetchError, cutlass_include

CSRC = ROOT / 'csrc'
INSTANCES = BUILD / 'instances'
CXX_FLAGS = ('-std=c++20', '-O3', '-DNDEBUG', '-fPIC', '-fvisibility=hidden', '-Wall', '-Wextra')
NVCC_FLAGS = (
    '-std=c++20', '-O3', '-gencode=arch=compute_90a,code=sm_90a', '--expt-relaxed-constexpr',
    '--use_fast_math', '-lineinfo', '-DNDEBUG', '-Xptxas', '-v',
    '-Xcompiler', '-fPIC,-fvisibility=hidden')
LIMITED_API = '-DPy_LIMITED_API=0x030a0000'
OPS_FLAGS = ('-DTORCH_TARGET_VERSION=0x020A000000000000ULL', '-DUSE_CUDA', LIMITED_API)
LINK_FLAGS = ('-shared', '-Wl,--exclude-libs,ALL', '-Wl,-z,relro,-z,now')


def find_cuda() -> Cuda | None:
    """The CUDA compiler if kernels can be built; None, with a line that says why, if not."""
    import torch
    reason = None
    if os.environ.get('FLASH_ATTN3_CPU_ONLY', '') not in ('', '0'):
        reason = 'FLASH_ATTN3_CPU_ONLY is set'
    elif torch.version.cuda is None:
        reason = f'torch {torch.__version__} is not a CUDA build'
    if reason is None:
        try:
            cutlass_include()
            cuda = toolchain.find_cuda()
            print(f'flash_attn3.build: kernels with nvcc {cuda.version} ({cuda.nvcc})', flush=True)
            return cuda
        except (BuildError, FetchError) as error:
            reason = str(error)
    print(f'flash_attn3.build: installing without kernels, for CPU tensors only: {reason}',
          flush=True)
    return None


@functools.cache
def _tree_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob('*') if path.is_file()):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _cxx_version() -> str:
    return output_of([toolchain.find_cxx(), '--version']).splitlines()[0]


def _cxx_unit(source: Path, flags: Sequence[str] = (), foreign: Sequence[Path] = (),
              versions: Sequence[str] = ()) -> Unit:
    return Unit(source, (toolchain.find_cxx(),), (*CXX_FLAGS, *flags), (CSRC, INSTANCES),
                tuple(foreign), (_cxx_version(), platform.machine(), *versions))


def plain_sources() -> list[Path]:
    """C++ without torch and CUDA, which both libraries and the tests' module link."""
    return [path for folder in ('call', 'checks', 'plan')
            for path in sorted((CSRC / folder).glob('*.cpp'))]


def plain_units() -> list[Unit]:
    return [_cxx_unit(source) for source in plain_sources()]


def host_unit(includes: Sequence[Path], versions: Sequence[str]) -> Unit:
    """The pybind11 module of the tests, which also reads CuTe (and that, CUDA's headers)."""
    cuda = toolchain.find_cuda()
    return _cxx_unit(ROOT / 'tests' / 'host' / 'host_module.cpp', (),
                     [*includes, cutlass_include(), cuda.include, cuda.include / 'cccl'],
                     [*versions, cuda.version, _tree_digest(cutlass_include())])


def plan_units() -> list[Unit]:
    module = _cxx_unit(CSRC / 'python' / 'plan_module.cpp', [LIMITED_API],
                       [toolchain.python_include()], [platform.python_version()])
    return [module, *plain_units()]


def kernel_unit(source: Path, cuda: Cuda) -> Unit:
    flags_around = [os.environ.get(f'NVCC_{side}_FLAGS', '') for side in ('PREPEND', 'APPEND')]
    return Unit(source, (str(cuda.nvcc), '-ccbin', toolchain.find_cxx()), NVCC_FLAGS,
                (CSRC, INSTANCES), (cutlass_include(),),
                (cuda.version, _cxx_version(), platform.machine(), _tree_digest(cutlass_include()),
                 *flags_around))


def kernel_units(cuda: Cuda) -> list[Unit]:
    import torch
    foreign = [Path(torch.__path__[0], 'include'), cuda.include]
    ops = [_cxx_unit(source, OPS_FLAGS, foreign, (torch.__version__, cuda.version))
           for source in sorted((CSRC / 'ops').glob('*.cpp'))]
    small = sorted(CSRC.glob('*/*.cu'))
    kernels = [kernel_unit(path, cuda)
               for path in (*small, *(INSTANCES / path.name for path in generate_instances()))]
    return [*kernels, *ops, *plain_units()]


def generate_instances() -> list[Path]:
    try:
        return generate(INSTANCES, os.environ.get('FLASH_ATTN3_VARIANTS', ''))
    except ValueError as error:
        raise BuildError(str(error)) from error


def runtime_libraries(cuda: Cuda) -> list[str]:
    return [f'-L{cuda.library_dir}', '-lcudart_static', '-ldl', '-lrt', '-lpthread']


def kernel_libraries(cuda: Cuda) -> list[str]:
    import torch
    return [f'-L{torch.__path__[0]}/lib', '-ltorch', '-ltorch_cpu', '-ltorch_cuda',
            *runtime_libraries(cuda)]


def link(objects: Sequence[Path], libraries: Sequence[str], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [toolchain.find_cxx(), *LINK_FLAGS, *map(str, objects), *libraries, '-o', str(target)]
    if subprocess.run(command, stdin=subprocess.DEVNULL).returncode != 0:
        raise BuildError(f'flash_attn3.build: {target.name} did not link; see above')
