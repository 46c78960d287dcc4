"""Attention on a cache starts while the launch before it still runs, as programmatic dependent
launches may: what that one writes at its end counts, not what was there before.
"""
from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.cache_cases import CacheCase, as_bits, call, copied, mixed
from tests.support.cache_oracle import check_same, run

triton = pytest.importorskip('triton', reason='it compiles the launch before; torch brings it')
from triton import language as tl  # noqa: E402
from triton.language.extra.cuda import gdc_launch_dependents, globaltimer  # noqa: E402

LATE_NS = 30_000
BLOCK = 4096
CASES = {
    'dense': CacheCase(mixed(8, 900), 1000, heads=(8, 2)),
    'paged': CacheCase(mixed(8, 900), 1000, page_size=16, heads=(8, 2)),
    'page_1': CacheCase(mixed(8, 900), 1000, page_size=1, heads=(8, 2)),
    'many': CacheCase(mixed(40, 300), 400, page_size=64, heads=(8, 2)),
    'most': CacheCase(mixed(70, 300), 400, page_size=64, heads=(8, 2)),
    'packed': CacheCase(mixed(8, 900, 3), 1000, page_size=64, heads=(8, 2), causal=True,
                        is_packed=True),
    'long': CacheCase(mixed(3, 900, 90), 1000, page_size=64, heads=(8, 2), causal=True),
    'e4m3': CacheCase(mixed(8, 900), 1024, page_size=64, heads=(8, 2), dtype='e4m3'),
    'latent': CacheCase(mixed(8, 900), 1024, page_size=64, heads=(16, 1), head_dim=64,
                        head_dim_v=512, latent=True),
}
WRITTEN = ('cache_seqlens', 'page_table', 'k_cache', 'v_cache', 'q', 'qv')


@triton.jit
def _copy_late(target, source, count, late_ns, block: tl.constexpr):
    gdc_launch_dependents()
    start = globaltimer()
    now = start
    while now - start < late_ns:
        now = globaltimer()
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


def copy_late(target: Tensor, source: Tensor) -> None:
    """A launch that lets the next one start, waits, and then copies."""
    words = [x.view(torch.uint8).view(torch.int32).flatten() for x in (target, source)]
    count = words[0].numel()
    _copy_late[(triton.cdiv(count, BLOCK),)](*words, count, LATE_NS, block=BLOCK)


@pytest.mark.parametrize('name', WRITTEN)
@pytest.mark.parametrize('case', CASES.values(), ids=CASES)
def test_what_the_launch_before_writes_last(case, name, cuda):
    arguments = case.arguments(cuda)
    if arguments.get(name) is None:
        pytest.skip(f'the case has no {name}')
    wanted, _ = run(case, arguments)
    late = copied(arguments) | {name: torch.empty_like(arguments[name])}
    for _ in range(3):
        as_bits(late[name]).zero_()
        torch.cuda.synchronize()
        copy_late(late[name], arguments[name])
        check_same(call(case, late), wanted)
