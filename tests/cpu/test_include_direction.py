"""Includes go one way (csrc/README.md): each folder only reads those named here, and torch, CUTLASS
and CUDA come in by one door each.
"""
from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC, HOST = ROOT / 'csrc', ROOT / 'tests/host'
MAY_INCLUDE = {
    'core': {'core'},
    'config': {'config', 'core'},
    'device': {'device', 'config', 'core'},
    'launch': {'launch', 'config', 'core'},
    'forward': {'forward', 'launch', 'device', 'config', 'core'},
    'decode': {'decode', 'forward', 'launch', 'device', 'config', 'core'},
    'mla': {'mla', 'forward', 'launch', 'device', 'config', 'core'},
    'backward': {'backward', 'launch', 'device', 'config', 'core'},
    'schedule': {'schedule', 'launch', 'device', 'config', 'core'},
    'quantize': {'quantize', 'launch', 'device', 'config', 'core'},
    'kvcache': {'kvcache', 'launch', 'device', 'config', 'core'},
    'combine': {'combine', 'launch', 'device', 'config', 'core'},
    'mask': {'mask', 'launch', 'device', 'config', 'core'},
    'chosen': {'chosen', 'launch', 'device', 'config', 'core'},
    'call': {'call', 'config', 'core'},
    'plan': {'plan', 'call', 'config', 'core'},
    'checks': {'checks', 'plan', 'call', 'config', 'core'},
    # The host side of schedule, quantize, kvcache, combine, mask and chosen.
    'ops': {'ops', 'checks', 'plan', 'call', 'schedule', 'quantize', 'kvcache', 'combine', 'mask',
            'chosen', 'config', 'core'},
    'python': {'python', 'checks', 'plan', 'call', 'config', 'core'},
    # The module of the tests shows the layouts that kernels use.
    'tests': {'checks', 'plan', 'call', 'schedule', 'forward', 'backward', 'kvcache', 'device',
              'config', 'core'},
}
GENERATED = {'fwd_variants.h': {'plan', 'python', 'tests'}, 'fwd_built.inc': {'ops', 'python'},
             'fwd_registry.inc': {'ops'}, 'bwd_variants.h': {'plan', 'python', 'tests'},
             'bwd_built.inc': {'ops', 'python'}, 'bwd_registry.inc': {'ops'},
             'attention_arguments.h': {'call', 'ops'}, 'attention_ops.h': {'ops'}}
FILES = [path for folder in (CSRC, HOST) for path in sorted(folder.rglob('*'))
         if path.suffix in ('.h', '.cpp', '.cu', '.inc')]


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^">]+)[">]', path.read_text(), re.MULTILINE)


def ids(path: Path) -> str:
    return path.relative_to(CSRC if CSRC in path.parents else ROOT).as_posix()


def folder_of(path: Path) -> str:
    return ids(path).split('/')[0]


def included(path: Path, name: str) -> Path | None:
    """The file of ours that the compiler reads, or None."""
    return next((found for found in (path.parent / name, CSRC / name) if found.exists()), None)


def test_every_folder_is_listed():
    assert {folder_of(path) for path in FILES} == set(MAY_INCLUDE)


@pytest.mark.parametrize('path', FILES, ids=ids)
def test_own_includes(path: Path):
    folder = folder_of(path)
    for name in includes(path):
        first, _, rest = name.partition('/')
        if rest and (CSRC / first).is_dir():
            assert first in MAY_INCLUDE[folder], f'{folder}/ must not include {name}'
            assert (CSRC / name).exists(), f'{name} does not exist'
        if name in GENERATED:
            assert folder in GENERATED[name], f'{folder}/ must not include {name}'


@pytest.mark.parametrize('path', FILES, ids=ids)
def test_foreign_includes(path: Path):
    folder = folder_of(path)
    for name in includes(path):
        first = name.split('/')[0]
        if first in ('torch', 'ATen', 'c10'):
            assert folder == 'ops', 'torch stays in ops/: its headers cost nvcc 16 to 90 s'
            stable = name.startswith(('torch/csrc/stable/', 'torch/csrc/inductor/aoti_torch/c/',
                                      'torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h',
                                      'torch/headeronly/'))
            assert stable, f'{name} is not part of the stable ABI'
        if first in ('cute', 'cutlass'):
            assert ids(path) == 'device/cute.h', 'CUTLASS comes in through device/cute.h alone'
        if first.startswith(('cuda', 'driver_types')):
            assert folder in ('launch', 'device', 'forward', 'backward', 'ops'), (
                f'{folder}/ is free of CUDA')


def test_include_cycles():
    """Every header can be read before those that include it."""
    graph = {path: [found for name in includes(path) if (found := included(path, name))]
             for path in FILES}
    done: set[Path] = set()
    while ready := [path for path, needs in graph.items() if path not in done
                    and done.issuperset(needs)]:
        done.update(ready)
    assert done == set(graph), f'in a cycle: {sorted(map(ids, set(graph) - done))}'
