"""Gradients of keys that each query chooses by index, on the GPU: against float64, with NaN in
every row that nobody has chosen. The CPU path: tests/cpu/test_chosen_gradients.py.
"""
from __future__ import annotations

import dataclasses

import pytest
import torch

from flash_attn3 import flash_attn_sparse_func

from tests.gpu.common import spoil_allocator
from tests.support import compare
from tests.support.chosen_cases import LATENT, ChosenCase, named
from tests.support.chosen_gradients import (check_gradients, expected, gradients_of, inputs_of,
                                            upstream_of)

SPARSE = dict(sparse=True, tokens=(33,), count=300, pages=40)
KINDS = {
    'latent': dict(LATENT, **SPARSE), 'latent_fp16': dict(LATENT, dtype='fp16', **SPARSE),
    'gqa_64': SPARSE, 'gqa_128': dict(SPARSE, head_dim=128, head_dim_v=128),
    'gqa_128_fp16': dict(SPARSE, head_dim=128, head_dim_v=128, dtype='fp16', heads=(32, 4)),
}
OPTIONS = {
    'plain': {}, 'one_key': dict(count=1), 'empty': dict(count=0), 'tile': dict(count=64),
    'counts': dict(counts=True), 'long': dict(count=2048, pages=80), 'alike': dict(alike=True),
    'sinks': dict(sinks=True), 'outside': dict(wild=True, counts=True),
    'one_query': dict(tokens=(1,), count=1000), 'no_query': dict(tokens=(0,)),
    'blocks_of_64': dict(block=64, count=9, wild=True), 'blocks_of_128': dict(
        block=128, page_size=128, count=3, counts=True),
}


def case_of(kind: str, **options) -> ChosenCase:
    return ChosenCase(**KINDS[kind] | options)


@pytest.mark.smoke
@pytest.mark.parametrize('option', OPTIONS)
@pytest.mark.parametrize('kind', KINDS)
def test_against_float64(kind, option, device):
    spoil_allocator(device)
    check_gradients(case_of(kind, **OPTIONS[option]), device)


@pytest.mark.parametrize('heads', [1, 8, 40, 64, 65, 128])
@pytest.mark.parametrize('kind', ['latent', 'latent_fp16'])
def test_heads(kind, heads, device):
    check_gradients(case_of(kind, heads=(heads, 1), counts=True), device)


@pytest.mark.parametrize('heads', [(1, 1), (8, 8), (14, 2), (160, 2)])
@pytest.mark.parametrize('kind', ['gqa_64', 'gqa_128'])
def test_heads_of_gqa(kind, heads, device):
    check_gradients(case_of(kind, heads=heads, counts=True), device)


@pytest.mark.parametrize('options', [{}, dict(counts=True), dict(sinks=True), dict(wild=True),
                                     dict(block=64, count=5)], ids=str)
@pytest.mark.parametrize('kind', ['gqa_64', 'gqa_128', 'gqa_128_fp16'])
def test_lists_by_head(kind, options, device):
    check_gradients(case_of(kind, by_head=True, **options), device)


@pytest.mark.parametrize('options', [{}, dict(sinks=True, counts=True), dict(heads=(128, 1))],
                         ids=str)
@pytest.mark.parametrize('kind', ['latent', 'latent_fp16'])
def test_latents_without_rotary_columns(kind, options, device):
    check_gradients(case_of(kind, **options), device, rotary=False)


def test_rows_of_576(device):
    """k and v are columns of one tensor, and the upstream gradient has strides of 0."""
    case = case_of('latent')
    given = inputs_of(case, device)
    rows = torch.cat([given['v'], given['k']], -1)
    given |= dict(v=rows[..., :512], k=rows[..., 512:])
    one = torch.ones((), device=device)
    upstream = one.bfloat16().expand(33, 16, 512), one.expand(16, 33)
    got = gradients_of(given, upstream)
    ref, pt = (expected(case, given, upstream, dtype) for dtype in (torch.float64, torch.bfloat16))
    for name, x in got.items():
        compare.check_close(x, ref[name], pt[name], f'd{name}')


@pytest.mark.parametrize('kind', KINDS)
def test_deterministic(kind, device):
    case = case_of(kind, counts=True, sinks=True)
    first, second = (check_gradients(case, device, deterministic=True) for _ in range(2))
    for name, x in first.items():
        compare.check_equal(x, second[name], f'd{name}')


@pytest.mark.parametrize('options', [{}, dict(wild=True, counts=True, count=130),
                                     dict(block=64, count=2)], ids=str)
@pytest.mark.parametrize('kind', KINDS)
def test_the_op(kind, options, device):
    """After another forward."""
    case = case_of(kind, **dict(tokens=(3,), count=70, pages=4) | options)
    arguments = case.arguments(device)
    ref, _, _ = case.expected(arguments)
    _, given = named(case, arguments)
    dtype = given['q'].dtype
    upstream = upstream_of(case, given)
    dq, dk, dv, dqv, _ = torch.ops.flash_attn3.bwd_chosen(
        *upstream, given['q'], given['k'], given['v'], ref.out.to(dtype), ref.lse.float(),
        given.get('qv'), given['indices'][:, None], given.get('index_counts'), case.block,
        case.scale)
    exact, pt = (expected(case, given, upstream, x) for x in (torch.float64, dtype))
    for name, x in dict(q=dq, k=dk, v=dv, qv=dqv).items():
        if name in exact:
            compare.check_close(x, exact[name], pt[name], f'd{name}')


@pytest.mark.parametrize(('number', 'change', 'text'), [
    (0, lambda x: x[:5], 'dout of shape'), (1, lambda x: x[:, :5], 'dlse of shape'),
    (2, lambda x: x[..., :32], 'q of shape'), (4, lambda x: x.float(), 'v of shape'),
    (5, lambda x: x[:, :1], 'out of shape'), (8, lambda x: x.long(), 'indices of shape'),
    (9, lambda x: x[:1], 'index_counts of shape'), (10, lambda _: 2, 'index_block to be 1, 64')],
    ids=lambda x: x if isinstance(x, str) else '')
def test_bad_input_of_the_op(number, change, text, kernels):
    case = case_of('gqa_64', counts=True)
    given = inputs_of(case, kernels)
    lse = torch.zeros(8, 33, device=kernels)
    arguments = [*upstream_of(case, given), given['q'], given['k'], given['v'],
                 torch.zeros_like(given['q']), lse, None, given['indices'][:, None],
                 given['index_counts'], 1, case.scale]
    arguments[number] = change(arguments[number])
    with pytest.raises(RuntimeError, match=f'bwd_chosen: expected {text}'):
        torch.ops.flash_attn3.bwd_chosen(*arguments)


def test_head_dims_without_kernels(device):
    check_gradients(case_of('gqa_64', head_dim=96, head_dim_v=96), device)


def test_memory(cuda):
    """The float32 sums of keys, and nothing of a size of the chosen pairs."""
    case = case_of('latent', tokens=(512,), heads=(128, 1), count=2048, pages=64)
    given = inputs_of(case, cuda)
    upstream = upstream_of(case, given)
    gradients_of(given, upstream)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    got = gradients_of(given, upstream)
    torch.cuda.synchronize()
    results = sum(x.nbytes for x in got.values())
    used = torch.cuda.max_memory_allocated() - before - results
    assert used < 64 * 64 * 576 * 4 + 512 * 128 * (512 * 2 + 16) + (8 << 20)


@pytest.mark.parametrize('kind', ['latent', 'gqa_128'])
def test_a_graph(kind, cuda):
    """Captured once, replayed with other lists."""
    case = case_of(kind, counts=True, wild=True)
    given = inputs_of(case, cuda)
    leaves = {name: given[name].requires_grad_() for name in ('q', 'k', 'v')}
    dout, _ = upstream_of(case, given)

    def step() -> tuple:
        out, _ = flash_attn_sparse_func(**given)
        return torch.autograd.grad(out, [*leaves.values()], dout)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for seed in (1, 2):
        other = inputs_of(dataclasses.replace(case, seed=seed), cuda)
        for name in [name for name, x in given.items() if isinstance(x, torch.Tensor)]:
            given[name].detach().copy_(other[name])
        graph.replay()
        wanted = (expected(case, given, (dout, None), dtype)
                  for dtype in (torch.float64, torch.bfloat16))
        ref, pt = wanted
        for name, x in zip(leaves, results):
            compare.check_close(x, ref[name], pt[name], f'd{name}')
