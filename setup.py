"""Builds the two libraries of the package (build_tools/native.py says of what) into an abi3 wheel.

The environment that it reads: CUDA_HOME, CUTLASS_DIR, CXX, MAX_JOBS, FLASH_ATTN3_VARIANTS,
FLASH_ATTN3_CPU_ONLY, FLASH_ATTN3_KEEP, FLASH_ATTN3_CACHE_DIR.
"""
import importlib.util
import sys
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

PLAN = 'flash_attn3._plan'
KERNELS = 'flash_attn3._C'
PLAIN = ('csrc/call/*.cpp', 'csrc/checks/*.cpp', 'csrc/plan/*.cpp')  # what both compile
OLDEST_SETUPTOOLS = 77

if int(setuptools.__version__.split('.')[0]) < OLDEST_SETUPTOOLS:
    sys.exit(f'flash_attn3.build: expected setuptools {OLDEST_SETUPTOOLS} or later, got '
             f'{setuptools.__version__}; hint: pip install --upgrade setuptools')


class BuildLibraries(build_ext):
    """Compiles all units of both libraries together, then links them."""

    def run(self) -> None:
        for module in ('torch', 'ninja'):
            if importlib.util.find_spec(module) is None:
                sys.exit(f'flash_attn3.build: expected {module} to be installed; hint: pip install '
                         f'{module}, or install without --no-build-isolation')
        from build_tools import native, toolchain
        self.cuda = native.find_cuda()
        if self.cuda is None:
            self._drop_kernels()
        try:
            super().run()
        except toolchain.BuildError as error:
            sys.exit(str(error))

    def _drop_kernels(self) -> None:
        """No kernels in this build, nor those that an earlier build left behind."""
        name = self.get_ext_filename(KERNELS)
        for folder in (Path(self.build_lib), *([ROOT] if self.inplace else [])):
            (folder / name).unlink(missing_ok=True)
        self.extensions = [extension for extension in self.extensions if extension.name != KERNELS]

    def copy_extensions_to_source(self) -> None:
        """TRAP: overwriting a library in its place crashes the processes that have it loaded."""
        for extension in self.extensions:
            (ROOT / self.get_ext_filename(extension.name)).unlink(missing_ok=True)
        super().copy_extensions_to_source()

    def build_extensions(self) -> None:
        from build_tools import native, units
        native.generate_instances()
        parts = {}  # the long units first
        if self.cuda is not None:
            parts[KERNELS] = (native.kernel_units(self.cuda), native.kernel_libraries(self.cuda))
        parts[PLAN] = (native.plan_units(), [])
        objects = units.compile_units([unit for listed, _ in parts.values() for unit in listed])
        for extension in self.extensions:
            listed, libraries = parts[extension.name]
            target = Path(self.get_ext_fullpath(extension.name))
            native.link([objects[unit] for unit in listed], libraries, target)


def sources(*patterns: str) -> list[str]:
    """For the source distribution; what is compiled, and how, is said in build_tools/native.py."""
    return [str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)]


setup(
    ext_modules=[
        Extension(PLAN, sources('csrc/python/plan_module.cpp', *PLAIN), py_limited_api=True),
        Extension(KERNELS, sources('csrc/ops/*.cpp', *PLAIN), py_limited_api=True),
    ],
    cmdclass={'build_ext': BuildLibraries},
    options={'bdist_wheel': {'py_limited_api': 'cp310'}},
)
