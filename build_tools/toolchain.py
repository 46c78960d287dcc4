"""The compilers: which g++ and which nvcc, where their headers and libraries lie, what they are.

nvcc comes from CUDA_HOME, else from PATH, else from the package index (third_party/fetch.py).
"""
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from third_party.fetch import FetchError, cuda_toolkit

OLDEST_NVCC = (12, 8)


class BuildError(RuntimeError):
    """The text says what is wrong and what helps; setup.py shows it without a traceback."""


@dataclass(frozen=True)
class Cuda:
    nvcc: Path
    version: str
    include: Path
    library_dir: Path


def output_of(command: Sequence[str | Path]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.stdout + done.stderr


def _first(root: Path, patterns: Sequence[str], what: str) -> Path:
    for pattern in patterns:
        for path in sorted(root.glob(pattern)):
            return path.parent
    raise BuildError(f'flash_attn3.build: expected {what} below {root}; hint: install the '
                         f'whole CUDA toolkit, or unset CUDA_HOME to take it from the index')


def _describe(nvcc: Path) -> Cuda:
    """Asks nvcc itself for its folder: the nvcc on PATH may be a link or a wrapper script."""
    version = re.search(r'release (\d+)\.(\d+), V(\S+)', output_of([nvcc, '--version']))
    top = re.search(r'^#\$ TOP=(.+)$', output_of([nvcc, '--dryrun', '-x', 'cu', '-c', os.devnull]),
                    re.MULTILINE)
    if not version or not top:
        raise BuildError(f'flash_attn3.build: expected a working nvcc, got {nvcc}')
    if (int(version[1]), int(version[2])) < OLDEST_NVCC:
        wanted = '.'.join(map(str, OLDEST_NVCC))
        raise BuildError(f'flash_attn3.build: expected nvcc {wanted} or later, got {version[3]} '
                         f'({nvcc}); hint: without CUDA_HOME, and with no nvcc on PATH, 13.0 comes '
                         f'from the package index')
    root = Path(top[1].strip()).resolve()
    return Cuda(nvcc, version[3],
                _first(root, ['include/cuda_runtime.h', 'targets/*/include/cuda_runtime.h'],
                       'cuda_runtime.h'),
                _first(root, ['lib*/libcudart_static.a', 'targets/*/lib/libcudart_static.a'],
                       'libcudart_static.a'))


def find_cuda() -> Cuda:
    home = os.environ.get('CUDA_HOME')
    nvcc = shutil.which('nvcc', path=f'{home}/bin') if home else None
    nvcc = nvcc or shutil.which('nvcc')
    if nvcc:
        return _describe(Path(nvcc).absolute())
    try:
        return _describe(cuda_toolkit() / 'bin' / 'nvcc')
    except FetchError as error:
        raise BuildError(
            f'flash_attn3.build: expected nvcc, found none in CUDA_HOME, on PATH or in the package '
            f'index ({error}); hint: install CUDA 13.0 and set CUDA_HOME') from error


def find_cxx() -> str:
    for name in filter(None, (os.environ.get('CXX'), 'g++', 'c++')):
        path = shutil.which(name)
        if path:
            return path
    raise BuildError('flash_attn3.build: expected a C++20 compiler, found none; hint: install '
                         'g++ 11 or later, or set CXX')


def python_include() -> Path:
    include = Path(sysconfig.get_path('include'))
    if not (include / 'Python.h').exists():
        raise BuildError(f'flash_attn3.build: expected Python.h in {include}; hint: install the '
                             f'development package of this Python (python3-dev)')
    return include
