"""Upstream's own tests as we would write them: a sample of their grid
(tests/support/upstream_grid.py), by the functions that `import flash_attn_interface` gives once
`flash_attn3.compat` is installed.

Results and gradients are held to float64 and to the bar of tests/support/compare.py, which is no
looser than upstream's. What upstream's tests call and this package refuses is in REFUSED.
"""
from __future__ import annotations

import importlib
import itertools
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from flash_attn3 import can_use, compat
from flash_attn3.cpu.reference import Inputs
from flash_attn3.cpu.reference_fp8 import Scales

from tests.gpu import fp8_calls
from tests.gpu.test_combine import HALF_UNIT, SMALLEST, combined
from tests.support import cache_cases, cache_oracle, compare, general_oracle
from tests.support.cache_cases import E4M3, CacheCase
from tests.support.cases import DTYPES
from tests.support.general_cases import GeneralCase, Results, Tensors
from tests.support.lists import ints
from tests.support.upstream_calls import SCHEMAS
from tests.support.upstream_grid import (CACHE, COMBINE, CPU_SCORES, DENSE, LEAST, PACKED, Row,
                                         allows_cache, allows_dense, cache_case, general_case,
                                         name_of, sample, scores)

SMOKE = 8     # rows of each test
MOST_ON_CPU = 2 ** 21    # numbers that are combined
ROWS = {'dense': sample(DENSE, allows_dense, seed=1),
        'packed': sample(PACKED, allows_dense, seed=2),
        'cache': [row for seed in (3, 4) for row in sample(CACHE, allows_cache, seed)],
        'combine': sample(COMBINE, lambda row: True, seed=5)}


def each(name: str) -> pytest.MarkDecorator:
    marks = [pytest.mark.smoke]
    return pytest.mark.parametrize('row', [
        pytest.param(row, id=name_of(row), marks=marks[:number < SMOKE])
        for number, row in enumerate(ROWS[name])])


@pytest.fixture(scope='module', autouse=True)
def one_thread() -> Iterator[None]:
    """On the CPU: for these sizes threads take longer, much longer where cores are shared."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.fixture(scope='module')
def upstream() -> Iterator[types.ModuleType]:
    compat.install(force=True)
    try:
        yield importlib.import_module('flash_attn_interface')
    finally:
        compat.uninstall()


def fits(case: GeneralCase | CacheCase, device: torch.device) -> None:
    if device.type == 'cpu' and scores(case) > CPU_SCORES:
        pytest.skip('many scores: on a GPU')


def as_tensor(window: tuple[int, int]) -> Tensor | tuple[int, int]:
    """Upstream's tests give windows as tensors."""
    return window if window == (-1, -1) else torch.tensor(window)


# ------------------------------------------------------------------------------- dense and packed
def call(upstream: types.ModuleType, case: GeneralCase, row: Row, inputs: Inputs,
         lists: dict, **others) -> tuple[Tensor, Tensor]:
    function = upstream.flash_attn_varlen_func if case.is_packed else upstream.flash_attn_func
    return function(*inputs[:3], **lists, causal=case.causal, window_size=as_tensor(case.window),
                    attention_chunk=case.chunk, softcap=case.softcap, num_splits=row['splits'],
                    pack_gqa=case.pack_gqa, deterministic=case.deterministic,
                    return_attn_probs=True, **others)


def check_16_bit(upstream: types.ModuleType, case: GeneralCase, row: Row,
                 tensors: Tensors) -> None:
    """All inputs require a gradient, also where upstream has none."""
    leaves = Inputs(*(x.detach().requires_grad_() for x in tensors.inputs[:3]), None)
    out, lse = call(upstream, case, row, leaves, tensors.lists)
    gradients = [None] * 3
    if case.has_gradients:
        gradients = torch.autograd.grad(out, leaves[:3], tensors.dout)
    general_oracle.check(case, tensors, Results(out.detach(), lse.detach(), None, *gradients, None))


def check_e4m3(upstream: types.ModuleType, case: GeneralCase, row: Row, tensors: Tensors) -> None:
    """With scales by batch entry and KV head; the inputs require gradients, which there are not."""
    q, *_ = tensors.inputs
    generator = torch.Generator(q.device).manual_seed(case.seed)
    scales = Scales(*(2 * torch.rand(len(case.lengths), case.heads[1], generator=generator,
                                     device=q.device) for _ in 'qkv'))
    inputs = Inputs(*(x.to(E4M3).requires_grad_() for x in tensors.inputs[:3]), None)
    out, lse = call(upstream, case, row, inputs, tensors.lists, **fp8_calls.descales(scales))
    assert out.dtype == torch.bfloat16
    with pytest.raises(NotImplementedError, match='requires_grad=False with float8_e4m3fn'):
        out.sum().backward()
    plain = Inputs(*(x.detach() for x in inputs[:3]), None)
    fp8_calls.Call(case, plain, scales, tensors.lists).check((out.detach(), lse.detach()))


def check_general(upstream: types.ModuleType, row: Row, device: torch.device) -> None:
    case = general_case(row)
    fits(case, device)
    check = check_e4m3 if row['dtype'] == 'e4m3' else check_16_bit
    with compare.naming(case):
        check(upstream, case, row, case.tensors(device))


@each('dense')
def test_output(row, upstream, device):
    check_general(upstream, row, device)


@each('packed')
def test_varlen_output(row, upstream, device):
    """Sequences of no length, and rows that do not count, included."""
    check_general(upstream, row, device)


@pytest.mark.parametrize('name, axes, apart', [
    ('dense', DENSE, {('dtype', 'dims')}), ('packed', PACKED, {('dtype', 'dims')}),
    ('cache', CACHE, {('lengths', 'page')}), ('combine', COMBINE, set())])
def test_the_sample(name, axes, apart):
    """Every two values of two axes meet, but for some of the named axes; each value is there LEAST
    times.
    """
    values = Counter(value for row in ROWS[name] for value in row.items())
    assert len(values) == sum(map(len, axes.values())) and min(values.values()) >= LEAST
    for a, b in itertools.combinations(axes, 2):
        met = {(row[a], row[b]) for row in ROWS[name]}
        assert (len(met) < len(axes[a]) * len(axes[b])) == ((a, b) in apart), (a, b)


@pytest.mark.parametrize('name', ['dense', 'packed'])
def test_the_kernels_take_all(name):
    """By the rules for a Hopper GPU, asked on tensors without data."""
    for row in ROWS[name]:
        case = general_case(row)
        dtype = E4M3 if row['dtype'] == 'e4m3' else DTYPES[row['dtype']]
        rows, batch, heads = case.rows(), len(case.lengths), case.heads
        q, k, v = (torch.empty(
            *((rows[i],) if case.is_packed else (batch, rows[i] // batch)), heads[i], columns,
            dtype=dtype, device='meta', requires_grad=case.has_gradients)
            for i, columns in ((0, case.head_dim), (1, case.head_dim), (1, case.columns_v)))
        lists = {n: x.to('meta') if isinstance(x, Tensor) else x
                 for n, x in case.lists('cpu').items()}
        _, reasons = can_use(
            q, k, v, causal=case.causal, window_size=case.window, attention_chunk=case.chunk,
            softcap=case.softcap, num_splits=row['splits'], pack_gqa=case.pack_gqa,
            deterministic=case.deterministic, **lists)
        assert all('on a CUDA device' in reason for reason in reasons), f'{case}: {reasons}'


# ---------------------------------------------------------------------------------------- caches
@each('cache')
def test_kvcache(row, upstream, device, monkeypatch):
    """Results, and the whole cache after the call."""
    def on_cache(*, window_size, **given):
        return upstream.flash_attn_with_kvcache(window_size=as_tensor(window_size), **given)

    case = cache_case(row)
    fits(case, device)
    monkeypatch.setattr(cache_cases, 'flash_attn_with_kvcache', on_cache)
    cache_oracle.check_case(case, device)


@pytest.mark.parametrize('page_size', [0, 1, 128])
@pytest.mark.parametrize('causal', [False, True])
def test_kvcache_with_qv(causal, page_size, upstream, device, monkeypatch):
    monkeypatch.setattr(cache_cases, 'flash_attn_with_kvcache', upstream.flash_attn_with_kvcache)
    cache_oracle.check_case(CacheCase(
        ((3, 339), (3, 20), (3, 384)), 512, page_size, head_dim=64, head_dim_v=512, heads=(6, 1),
        latent=True, causal=causal, new=(3,) * 3, rotary=0.5), device)


# ---------------------------------------------------------------------------------------- combine
@each('combine')
def test_combine(row, upstream, device):
    """Partial results in odd strides; some parts have no key."""
    parts, count, dim = row['parts'], row['rows'], row['dim']
    if device.type == 'cpu' and parts * count * dim > MOST_ON_CPU:
        pytest.skip('many numbers: on a GPU')
    batch, heads = 3, 2
    out = torch.randn(2 * parts, batch, heads, count, dim, device=device).transpose(2, 3)[:parts]
    lse = torch.randn(parts, batch, 2 * heads, count, device=device).transpose(2, 3)[..., :heads]
    lse[parts // 2:, :batch // 3] = -torch.inf
    dtype = getattr(torch, row['dtype'])
    got, got_lse = upstream.flash_attn_combine(out, lse, out_dtype=dtype)
    wanted, wanted_lse, size = combined(out, lse)
    assert got.dtype == dtype and got.shape == wanted.shape and got_lse.shape == wanted_lse.shape
    torch.testing.assert_close(got_lse.double(), wanted_lse, rtol=1e-6, atol=2e-6)
    bound = wanted.abs() * HALF_UNIT[dtype] + size * 4e-6 + SMALLEST[dtype]
    assert ((got.double() - wanted).abs() <= bound).all()


# ------------------------------------------------------------------------------------ determinism
@pytest.mark.parametrize('mask', ['full', 'causal', 'local'])
@pytest.mark.parametrize('head_dim', [32, 64, 96, 128, 192, 256])
def test_the_same_bits(head_dim, mask, upstream, device):
    """Many repeats, with dq too: deterministic."""
    rows, repeats = (1024, 100) if device.type == 'cuda' else (70, 3)
    case = GeneralCase(((rows, rows + 1),) * 2, head_dim, heads=(6, 2), is_packed=False,
                       causal=mask == 'causal', window=(rows // 3, 5) if mask == 'local' else
                       (-1, -1), deterministic=True, dlse=False)
    tensors = case.tensors(device)
    leaves = Inputs(*(x.requires_grad_() for x in tensors.inputs[:3]), None)
    first = None
    for _ in range(repeats):
        out, lse = call(upstream, case, {'splits': 1}, leaves, {})
        results = out, lse, *torch.autograd.grad(out, leaves[:3], tensors.dout)
        first = first or results
        for name, *values in zip(('out', 'lse', 'dq', 'dk', 'dv'), results, first):
            compare.check_equal(*(x.detach() for x in values), name)


@pytest.mark.parametrize('mask', ['full', 'causal', 'local'])
def test_backward_by_window_size(mask, upstream, device):
    """What upstream's tests of determinism call: four results, the gradients among them; the bits
    of the two numbers.
    """
    case = GeneralCase(((113, 211),) * 2, 64, heads=(6, 2), is_packed=False, dlse=False,
                       causal=mask == 'causal', window=(70, 20) if mask == 'local' else (-1, -1),
                       deterministic=True)
    tensors = case.tensors(device)
    q, k, v, _ = tensors.inputs
    out, lse = call(upstream, case, {'splits': 1}, tensors.inputs, {})

    def backward(**window) -> tuple[Tensor, ...]:
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        results = upstream._flash_attn_backward(
            tensors.dout, q, k, v, out, lse, *[None] * 6, *gradients, 64 ** -0.5, case.causal,
            softcap=0.0, deterministic=True, **window)
        if 'window_size' in window:
            assert all(x is y for x, y in zip(results, gradients)) and results[3].numel() == 0
        return gradients

    got = backward(window_size=as_tensor(case.window))
    general_oracle.check(case, tensors, Results(out, lse, None, *got, None))
    left, right = case.window
    for name, *values in zip(('dq', 'dk', 'dv'), got, backward(window_size_left=left,
                                                               window_size_right=right)):
        compare.check_equal(*values, name)


# ---------------------------------------------------------------------------------------- schemas
def test_schemas(upstream):
    """They grow by defaults alone. Upstream's test has eight results of bwd, its sources five."""
    for text in SCHEMAS:
        name = text.partition('(')[0].removeprefix('flash_attn_3::')
        own = getattr(upstream.flash_attn_3_gpu, name).default._schema
        assert own.is_backward_compatible_with(torch._C.parse_schema(text))
        if name == 'bwd':
            eight = text.replace('Tensor, Tensor)', 'Tensor, Tensor, Tensor, Tensor, Tensor)')
            assert not own.is_backward_compatible_with(torch._C.parse_schema(eight))


# -------------------------------------------------------------------------------- what is refused
class Refused(NamedTuple):
    """A call of upstream's tests that is an error here, and why."""
    reason: str
    call: Callable[[types.ModuleType, torch.device], object]
    text: str
    error: type[Exception] = RuntimeError


def dense(device: torch.device, dtype: torch.dtype = torch.bfloat16,
          columns: int = 64) -> list[Tensor]:
    return [torch.zeros(2, 8, 2, n, dtype=torch.bfloat16, device=device).to(dtype)
            for n in (64, 64, columns)]


def packed_qv(upstream: types.ModuleType, device: torch.device) -> object:
    q, k, v = (x.flatten(0, 1) for x in dense(device, columns=256))
    starts = ints([0, 8, 16], device)
    return upstream.flash_attn_varlen_func(q, k, v, starts, starts, 8, 8, qv=v)


REFUSED = {
    'qv': Refused(
        'scores of two products are for caches', lambda upstream, device: upstream.flash_attn_func(
            *dense(device, columns=512), qv=dense(device, columns=512)[2]),
        'qv to be None', NotImplementedError),
    'qv-packed': Refused('as qv', packed_qv, 'qv to be None', NotImplementedError),
    'qv-heads': Refused(
        'the latent part of MLA has one KV head',
        lambda upstream, device: upstream.flash_attn_with_kvcache(
            *dense(device, columns=512), qv=dense(device, columns=512)[2]),
        'the heads of k_cache to be 1 with qv'),
}


@pytest.mark.parametrize('name', REFUSED)
def test_refused(name, upstream, device):
    refused = REFUSED[name]
    with pytest.raises(refused.error, match=f'expected {refused.text}'):
        refused.call(upstream, device)
