"""The wheel, built as a user builds it, installed into clean environments and used from outside the
checkout: with the torch of constraints.txt and with the newest torch of the package index.

The first environment takes its torch from the running one by links. The second is a real
installation, CUDA packages and all: pip keeps them in its cache.
"""
from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from tests.support.checkout import (ROOT, copy_checkout, link_package, new_environment, run,
                                    site_packages)

pytestmark = pytest.mark.slow

CHECK = '''
import math, sys, torch, flash_attn3
q, k, v = (torch.arange(24.).sin().view(1, 3, 1, 8) + shift for shift in range(3))
out = flash_attn3.flash_attn_func(q, k, v, causal=True)
expected = torch.nn.functional.scaled_dot_product_attention(
    *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
assert torch.allclose(out, expected, atol=1e-6), out - expected
cuda = torch._C._dispatch_has_kernel_for_dispatch_key
for op in ('fwd', '_fwd', '_fwd_no_lse', 'attend', 'attend_cache', 'bwd', 'bwd_out'):
    assert cuda(f'flash_attn3::{op}', 'CPU'), op
    assert cuda(f'flash_attn3::{op}', 'CUDA'), op
assert len(flash_attn3.built_variants()) == int(sys.argv[1]), flash_attn3.built_variants()
print(torch.__version__, flash_attn3.__file__)
'''
# Symbols that any Linux has: versioned ones of the C and C++ run-time libraries, weak hooks.
SYSTEM_SYMBOL = re.compile(r'@(GLIBC|GLIBCXX|CXXABI|GCC)_|^_ITM_|^__gmon_start__$|^__cxa_finalize$')


@pytest.fixture(scope='module')
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, so that what that lacks shows."""
    folder = tmp_path_factory.mktemp('wheel')
    checkout = copy_checkout(folder / 'checkout')
    run([sys.executable, '-m', 'build', '--no-isolation', '--outdir', folder], checkout)
    built, = folder.glob('*.whl')
    return built


def undefined_symbols(library: Path) -> list[str]:
    output = run(['nm', '-D', '--undefined-only', library], library.parent)
    return [line.split()[-1] for line in output.splitlines()]


def use_from_outside(python: Path, wheel: Path, folder: Path) -> str:
    """Installs the wheel and calls it; gives the torch version and where the package lies."""
    from csrc.plan.variants import BACKWARD, FORWARD
    run([python, '-m', 'pip', 'install', '--quiet', wheel], folder)
    return run([python, '-c', CHECK, str(len(FORWARD + BACKWARD))], folder, PYTHONPATH='')


def test_tag_and_contents(wheel: Path):
    assert re.fullmatch(r'flash_attn3-[\d.]+-cp310-abi3-linux_\w+\.whl', wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if '.dist-info/' not in name}
        metadata = archive.read(next(name for name in archive.namelist()
                                     if re.fullmatch(r'flash_attn3-[^/]*/METADATA', name))).decode()
        shim = {Path(name).name for name in archive.namelist()
                if name.startswith('flash_attn3/_shim/flash_attn_3-3.0.0.dist-info/')}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / 'flash_attn3').rglob('*.py')}
    assert files == modules | {'flash_attn3/_C.abi3.so', 'flash_attn3/_plan.abi3.so',
                               'flash_attn3/_kernel/metadata.json'}
    assert shim == {'INSTALLER', 'METADATA', 'top_level.txt'}
    assert 'License-Expression: BSD-3-Clause' in metadata
    assert 'Requires-Dist: torch>=2.10' in metadata
    assert 'Requires-Python: >=3.10' in metadata


def test_libraries_need_torch_only_through_the_stable_abi(wheel: Path, tmp_path: Path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    foreign = [name for name in undefined_symbols(tmp_path / 'flash_attn3/_C.abi3.so')
               if not SYSTEM_SYMBOL.search(name)]
    assert foreign and all(name.startswith(('aoti_torch_', 'torch_')) for name in foreign), foreign
    foreign = [name for name in undefined_symbols(tmp_path / 'flash_attn3/_plan.abi3.so')
               if not SYSTEM_SYMBOL.search(name)]
    assert foreign and all(name.startswith(('Py', '_Py')) for name in foreign), foreign


def test_with_the_torch_of_the_constraints(wheel: Path, tmp_path: Path):
    python = new_environment(tmp_path / 'environment')
    link_package('torch', site_packages(python))
    printed = use_from_outside(python, wheel, tmp_path)
    assert printed.startswith(torch.__version__) and str(tmp_path) in printed


@pytest.mark.long
def test_with_the_newest_torch(wheel: Path, tmp_path: Path):
    python = new_environment(tmp_path / 'environment')
    run([python, '-m', 'pip', 'install', '--quiet', '--upgrade', 'torch', 'numpy'], tmp_path)
    printed = use_from_outside(python, wheel, tmp_path)
    version = tuple(map(int, re.match(r'(\d+)\.(\d+)', printed).groups()))
    assert version > tuple(map(int, torch.__version__.split('.')[:2])) and str(tmp_path) in printed
    subprocess.run(['rm', '-rf', tmp_path / 'environment'], check=True)
