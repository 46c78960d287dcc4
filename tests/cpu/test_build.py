"""The build: what is cached under which key, how many jobs run, where nvcc comes from, and what is
said when something is missing.
"""
from __future__ import annotations

import dataclasses
import os
import re
import sys
import zipfile
from pathlib import Path

import pytest

import third_party.fetch
from build_tools import native, toolchain, units
from tests.support.checkout import copy_checkout, link_package, new_environment, run, site_packages

pytestmark = pytest.mark.slow

BUILD_LINE = re.compile(r'flash_attn3.build: (\d+) units, (\d+) from the cache')


@pytest.fixture
def own_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of three files, and a cache, for build_tools/units.py."""
    root = tmp_path / 'repository'
    (root / 'csrc').mkdir(parents=True)
    (root / 'csrc' / 'a.h').write_text('#include "b.h"\n')
    (root / 'csrc' / 'b.h').write_text('int const kNumber = 1;\n')
    (root / 'csrc' / 'a.cpp').write_text('#include <vector>\n#include "a.h"\n'
                                         'int f() { return kNumber; }\n')
    (root / 'csrc' / 'other.h').write_text('\n')
    for name, path in (('ROOT', root), ('BUILD', root / 'build'), ('LOGS', root / 'build/logs')):
        monkeypatch.setattr(units, name, path)
    monkeypatch.setenv('FLASH_ATTN3_CACHE_DIR', str(tmp_path / 'cache'))
    return root


def unit_of(root: Path) -> units.Unit:
    return units.Unit(root / 'csrc' / 'a.cpp', (toolchain.find_cxx(),), ('-std=c++20', '-O1'),
                      (root / 'csrc',), (), ('compiler 1',))


# ---------------------------------------------------------------------------------- cache
def test_included_files_are_followed(own_root: Path):
    found = units.included_files(own_root / 'csrc' / 'a.cpp', [own_root / 'csrc'])
    assert [path.name for path in found] == ['a.cpp', 'a.h', 'b.h']


def test_key_follows_content_flags_and_versions(own_root: Path):
    unit = unit_of(own_root)
    first = units.key(unit)
    assert units.key(dataclasses.replace(unit, flags=('-std=c++20', '-O2'))) != first
    assert units.key(dataclasses.replace(unit, versions=('compiler 2',))) != first
    (own_root / 'csrc' / 'other.h').write_text('int unrelated;\n')
    os.utime(own_root / 'csrc' / 'b.h', (1, 1))
    assert units.key(unit) == first
    text = (own_root / 'csrc' / 'b.h').read_text()
    (own_root / 'csrc' / 'b.h').write_text(f'  // A comment.\n{text.rstrip()}  // Another one.\n')
    assert units.key(unit) == first
    (own_root / 'csrc' / 'b.h').write_text(text + 'char const* kPage = "https://one";\n')
    with_string = units.key(unit)
    (own_root / 'csrc' / 'b.h').write_text(text + 'char const* kPage = "https://two";\n')
    assert len({units.key(unit), with_string, first}) == 3
    (own_root / 'csrc' / 'b.h').write_text('int const kNumber = 2;\n')
    assert units.key(unit) != first


def test_a_unit_is_compiled_once(own_root: Path, capfd: pytest.CaptureFixture):
    first = units.compile_units([unit_of(own_root)])
    assert BUILD_LINE.search(capfd.readouterr().out).groups() == ('1', '0')
    os.utime(own_root / 'csrc' / 'a.cpp')
    assert units.compile_units([unit_of(own_root)]) == first
    assert BUILD_LINE.search(capfd.readouterr().out).groups() == ('1', '1')
    (own_root / 'csrc' / 'b.h').write_text('int const kNumber = 2;\n')
    assert units.compile_units([unit_of(own_root)]) != first
    assert BUILD_LINE.search(capfd.readouterr().out).groups() == ('1', '0')


def test_an_error_is_shown_and_leaves_no_object(own_root: Path, capfd: pytest.CaptureFixture):
    (own_root / 'csrc' / 'b.h').write_text('int const kNumber = missing_name;\n')
    with pytest.raises(toolchain.BuildError, match='a unit did not compile'):
        units.compile_units([unit_of(own_root)])
    assert 'missing_name' in capfd.readouterr().out
    assert not list(units.cache_folder().glob('*.o'))


def test_objects_that_nobody_used_for_a_month_go(own_root: Path):
    old = units.cache_folder() / 'old.o'
    old.touch()
    os.utime(old, (1, 1))
    objects = units.compile_units([unit_of(own_root)])
    assert not old.exists() and all(path.exists() for path in objects.values())


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv('FLASH_ATTN3_CACHE_DIR', raising=False)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'xdg'))
    assert units.cache_folder() == tmp_path / 'xdg' / 'flash_attn3'
    (tmp_path / 'file').touch()
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
    assert units.cache_folder() == units.BUILD / 'cache'


def test_keys_are_the_same_in_every_clone(tmp_path: Path):
    """A fresh clone finds in the cache what another one compiled."""
    script = ('from build_tools import native, units; native.generate_instances(); '
              'cuda = native.toolchain.find_cuda(); '
              'print(*map(units.key, native.kernel_units(cuda) + native.plan_units()))')
    printed = [run([sys.executable, '-c', script], copy_checkout(tmp_path / name)).splitlines()[-1]
               for name in ('one', 'other')]
    assert printed[0] == printed[1] and len(printed[0].split()) > 4


# ----------------------------------------------------------------------------------- jobs
@pytest.mark.parametrize(('cores', 'gib', 'jobs'), [(2, 23, 2), (16, 16, 6), (8, 1, 1)])
def test_jobs_by_cores_and_memory(monkeypatch: pytest.MonkeyPatch, cores: int, gib: int, jobs: int):
    monkeypatch.delenv('MAX_JOBS', raising=False)
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: range(cores))
    monkeypatch.setattr(units, '_available_bytes', lambda: gib * 2**30)
    assert units.max_jobs() == jobs


def test_max_jobs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv('MAX_JOBS', '7')
    assert units.max_jobs() == 7
    for text in ('0', '-1', 'many'):
        monkeypatch.setenv('MAX_JOBS', text)
        with pytest.raises(toolchain.BuildError, match=f"expected MAX_JOBS >= 1, got '{text}'"):
            units.max_jobs()


# ------------------------------------------------------------------------------ compilers
@pytest.fixture
def no_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No nvcc in CUDA_HOME, on PATH, or fetched before."""
    monkeypatch.delenv('CUDA_HOME', raising=False)
    folders = [folder for folder in os.environ['PATH'].split(':')
               if not (Path(folder) / 'nvcc').exists()]
    monkeypatch.setenv('PATH', ':'.join(folders))
    monkeypatch.setattr(third_party.fetch, 'ROOT', tmp_path)
    return tmp_path


def test_the_compiler_of_the_package_index_compiles_a_kernel(no_nvcc: Path):
    cuda = toolchain.find_cuda()
    assert cuda.nvcc == no_nvcc / 'build/cuda/bin/nvcc' and cuda.version.startswith('13.0.')
    source = no_nvcc / 'kernel.cu'
    source.write_text('#include <cuda/std/utility>\n__global__ void f(int* p) { *p = 1; }\n'
                      'void launch(int* p) { f<<<1, 1>>>(p); }\n'
                      'int main() { launch(nullptr); return cudaDeviceSynchronize() ? 0 : 1; }\n')
    run([cuda.nvcc, '-ccbin', toolchain.find_cxx(), *native.NVCC_FLAGS, '-c', source], no_nvcc)
    native.link([no_nvcc / 'kernel.o'], [f'-L{cuda.library_dir}', '-lcudart_static', '-ldl', '-lrt',
                                         '-lpthread'], no_nvcc / 'kernel.so')
    assert b'sm_90a' in (no_nvcc / 'kernel.so').read_bytes()


def test_without_nvcc_and_index_the_install_is_for_the_cpu(
        no_nvcc: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
    monkeypatch.setenv('PIP_NO_INDEX', '1')
    monkeypatch.setenv('PIP_FIND_LINKS', str(no_nvcc))
    monkeypatch.setattr(native, 'cutlass_include', lambda: no_nvcc)
    assert native.find_cuda() is None
    said = capfd.readouterr().out
    assert 'installing without kernels, for CPU tensors only: ' in said
    assert 'found none in CUDA_HOME, on PATH or in the package index' in said
    assert 'hint: install CUDA 13.0 and set CUDA_HOME' in said


def test_an_old_nvcc_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    nvcc = tmp_path / 'bin' / 'nvcc'
    nvcc.parent.mkdir()
    nvcc.write_text('#!/bin/sh\necho "Cuda compilation tools, release 11.8, V11.8.89"\n'
                    f'echo "#$ TOP={tmp_path}/bin/.."\n')
    nvcc.chmod(0o755)
    monkeypatch.setenv('CUDA_HOME', str(tmp_path))
    with pytest.raises(toolchain.BuildError, match='expected nvcc 12.8 or later, got 11.8.89'):
        toolchain.find_cuda()


def test_a_broken_nvcc_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / 'bin').mkdir()
    (tmp_path / 'bin' / 'nvcc').write_text('#!/bin/sh\nexit 1\n')
    (tmp_path / 'bin' / 'nvcc').chmod(0o755)
    monkeypatch.setenv('CUDA_HOME', str(tmp_path))
    with pytest.raises(toolchain.BuildError, match='expected a working nvcc, got .*/bin/nvcc'):
        toolchain.find_cuda()


def test_a_wrong_cutlass_dir_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv('CUTLASS_DIR', str(tmp_path))
    with pytest.raises(third_party.fetch.FetchError, match='expected CUTLASS_DIR to be a CUTLASS'):
        third_party.fetch.cutlass_include()


def test_a_wheel_with_another_hash_is_refused(tmp_path: Path):
    pins = tmp_path / 'pins.txt'
    pins.write_text(f'nvidia-cuda-crt==13.0.88 --hash=sha256:{"0" * 64}\n')
    with pytest.raises(third_party.fetch.FetchError, match='HASHES'):
        third_party.fetch.fetch(pins, 'nvidia/', tmp_path / 'target')
    assert not (tmp_path / 'target').exists()


def test_a_wrong_selection_of_variants_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv('FLASH_ATTN3_VARIANTS', 'FwdBf16D63*')
    with pytest.raises(toolchain.BuildError, match='expected FLASH_ATTN3_VARIANTS'):
        native.generate_instances()


# --------------------------------------------------------------------------- installation
def test_a_cpu_only_wheel_computes(tmp_path: Path):
    """FLASH_ATTN3_CPU_ONLY=1, in a tree that was built with kernels before."""
    checkout = copy_checkout(tmp_path / 'checkout')
    (checkout / 'flash_attn3' / '_C.abi3.so').write_bytes(b'of an earlier build')
    run([sys.executable, '-m', 'build', '--wheel', '--no-isolation', '--outdir', tmp_path],
        checkout, FLASH_ATTN3_CPU_ONLY='1')
    wheel, = tmp_path.glob('*.whl')
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if name.endswith('.so')]
    assert libraries == ['flash_attn3/_plan.abi3.so']
    python = new_environment(tmp_path / 'environment')
    link_package('torch', site_packages(python))
    run([python, '-m', 'pip', 'install', '--quiet', wheel], tmp_path)
    script = ('import torch, flash_attn3; v = torch.eye(4).view(1, 4, 1, 4); q = v * 0; '
              'print(flash_attn3.flash_attn_func(q, q, v).flatten().tolist())')
    printed = run([python, '-c', script], tmp_path, PYTHONPATH='').splitlines()[-1]
    assert printed == str([0.25] * 16)


def test_an_editable_install_uses_the_tree(tmp_path: Path):
    checkout = copy_checkout(tmp_path / 'checkout')
    python = new_environment(tmp_path / 'environment')
    for name in ('torch', 'setuptools', 'ninja'):
        link_package(name, site_packages(python))
    run([python, '-m', 'pip', 'install', '--quiet', '--no-build-isolation', '--editable', checkout],
        tmp_path, FLASH_ATTN3_VARIANTS='FwdBf16D128Causal')
    script = 'import flash_attn3; print(flash_attn3.__file__, flash_attn3.built_variants())'
    printed = run([python, '-c', script], tmp_path, PYTHONPATH='').splitlines()[-1]
    assert printed == f"{checkout}/flash_attn3/__init__.py ['FwdBf16D128Causal']"
