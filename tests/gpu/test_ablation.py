"""The kernels of benchmarks/ablation.py, which are in no install: each is built here as a library
of its own and held to the bar of tests/support/compare.py.

Lengths that fill no tile, grouped heads, tiles without a visible key between others, and more tiles
than CTAs. The first test of a dtype compiles for half a minute or more; later runs take the objects
from the cache.
"""
from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable

import pytest

from benchmarks import ablation, candidates
from benchmarks.ablation import FULL
from build_tools import toolchain
from build_tools.toolchain import BuildError
from third_party.fetch import FetchError, cutlass_include

from tests.support import compare
from tests.support.cases import Case, Kind

ROWS = {(row.name, 128): row for row in ablation.rows_of(128) if row.name != FULL}

CASES = [Case(1, 1), Case(63, 63), Case(129, 129), Case(200, 333), Case(333, 200),
         Case(1, 333, heads_q=6, heads_k=2), Case(63, 129, heads_q=8, heads_k=1),
         Case(200, 333, heads_q=14, heads_k=2), Case(300, 10, batch=20, heads_q=8, heads_k=8),
         Case(700, 700, batch=5, heads_q=13, heads_k=13)]

every_row = pytest.mark.parametrize('name, head_dim', ROWS, ids=str)
every_dtype = pytest.mark.parametrize('dtype', ['bf16', 'fp16'])
every_mask = pytest.mark.parametrize('causal', [False, True], ids=['full', 'causal'])


@functools.cache
def missing_compiler() -> str:
    """Why no library can be built here, or ''."""
    try:
        toolchain.find_cuda()
        cutlass_include()
    except (BuildError, FetchError) as error:
        return str(error)
    return ''


@functools.cache
def libraries(dtype: str) -> dict[str, pathlib.Path]:
    wanted = [ablation.candidate(row, head_dim) for (_, head_dim), row in ROWS.items()]
    return candidates.build(wanted, dtype)


@pytest.fixture
def forward_of(cuda) -> Callable:
    """forward_of(name, case): function(q, k, v) that gives (out, lse)."""
    if reason := missing_compiler():
        pytest.skip(f'needs nvcc and the CUTLASS headers: {reason}')

    def find(name: str, case: Case) -> Callable:
        library = ablation.candidate(ROWS[name, case.head_dim], case.head_dim).name
        return candidates.forward_of(libraries(case.dtype)[library], case.causal)
    return find


@every_row
@every_dtype
@every_mask
@pytest.mark.parametrize('sizes', CASES, ids=Case.sizes)
def test_agrees_with_the_reference(name, head_dim, dtype, causal, sizes, forward_of, cuda):
    case = sizes.of(Kind(dtype, head_dim, causal))
    tensors = case.tensors(cuda)
    out, lse = forward_of(name, case)(*tensors)
    compare.check_forward(out, lse, tensors, causal)
