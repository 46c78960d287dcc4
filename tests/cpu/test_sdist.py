"""`python -m build` without kernels: the source distribution has all files of the tree, and the
wheel that is built from it works in a clean environment. (tests/cpu/test_wheel.py has kernels.)
"""
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.checkout import copy_checkout, link_package, new_environment, run, site_packages

pytestmark = pytest.mark.slow

CHECK = '''
import torch, flash_attn3
q, k, v = (torch.arange(48.).sin().view(1, 3, 2, 8) + shift for shift in range(3))
leaves = [x.double().requires_grad_() for x in (q, k, v)]
out = flash_attn3.flash_attn_func(*leaves, causal=True)
expected = torch.nn.functional.scaled_dot_product_attention(
    *(x.transpose(1, 2) for x in leaves), is_causal=True).transpose(1, 2)
torch.testing.assert_close(out, expected)
gradients = [torch.autograd.grad(x.square().sum(), leaves) for x in (out, expected)]
torch.testing.assert_close(*gradients)
print(flash_attn3.__file__)
'''


@pytest.fixture(scope='module')
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkout, the source distribution and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp('build')
    checkout = copy_checkout(folder / 'checkout')
    # What a used tree has, and nobody may get.
    (checkout / 'flash_attn3/_C.abi3.so').write_bytes(b'of an earlier build')
    (checkout / 'third_party/cutlass').mkdir()
    (checkout / 'third_party/cutlass/fetched.h').touch()
    run([sys.executable, '-m', 'build', '--no-isolation', '--outdir', folder], checkout,
        FLASH_ATTN3_CPU_ONLY='1')
    return folder


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob('*') if path.is_file()}


def test_the_source_distribution_is_the_tree(built: Path, tmp_path: Path):
    """All of its files, nothing that was built or fetched, and what setuptools adds."""
    archive, = built.glob('*.tar.gz')
    with tarfile.open(archive) as tar:
        names = {member.name.partition('/')[2] for member in tar if not member.isdir()}
    added = {name for name in names if name in ('PKG-INFO', 'setup.cfg')
             or name.startswith('flash_attn3.egg-info/')}
    assert names - added == files_of(copy_checkout(tmp_path / 'checkout'))


def test_the_wheel_has_the_whole_package(built: Path, tmp_path: Path):
    """Files that are no Python too, and of native code the planner alone, under the limited API."""
    wheel, = built.glob('*.whl')
    assert re.fullmatch(r'flash_attn3-[\d.]+-cp310-abi3-linux_\w+\.whl', wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith('flash_attn3/')}
    package = files_of(copy_checkout(tmp_path / 'checkout') / 'flash_attn3')
    assert names == {f'flash_attn3/{name}' for name in package} | {'flash_attn3/_plan.abi3.so'}


def test_the_wheel_in_a_clean_environment(built: Path, tmp_path: Path):
    """Values and gradients, from outside the tree; the doctor says what is missing."""
    wheel, = built.glob('*.whl')
    python = new_environment(tmp_path / 'environment')
    link_package('torch', site_packages(python))
    run([python, '-m', 'pip', 'install', '--quiet', '--no-index', wheel], tmp_path)
    printed = run([python, '-c', CHECK], tmp_path, PYTHONPATH='')
    assert str(tmp_path / 'environment') in printed
    done = subprocess.run([python, '-m', 'flash_attn3.doctor', '--json'], cwd=tmp_path, text=True,
                          env=os.environ | {'PYTHONPATH': ''}, capture_output=True)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert 'does not exist' in report['flash_attn3']['problem'] and not report['ok']
