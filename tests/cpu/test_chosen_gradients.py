"""Gradients of flash_attn_sparse_func on the CPU path, against float64 autograd; the op
`bwd_chosen`; what has no derivative.
"""
from __future__ import annotations

import dataclasses

import pytest
import torch

from flash_attn3 import flash_attn_sparse_func
from flash_attn3.ops import chosen_gradients

from tests.support import compare
from tests.support.chosen_cases import LATENT, ChosenCase
from tests.support.chosen_gradients import (check_gradients, gradients_of, inputs_of, upstream_of)

SMALL = dict(tokens=(7,), count=20, pages=3, page_size=16, dtype='fp32', sparse=True)
BLOCKS = dict(page_size=128, pages=2, count=3)
CASES = {
    'gqa_64': {}, 'gqa_128': dict(head_dim=128, head_dim_v=128, heads=(4, 1)),
    'other_head_dims': dict(head_dim=24, head_dim_v=40), 'by_head': dict(by_head=True),
    'counts': dict(counts=True), 'counts_by_head': dict(counts=True, by_head=True, sinks=True),
    'sinks': dict(sinks=True, counts=True), 'alike': dict(alike=True), 'scale': dict(
        softmax_scale=0.7), 'one_key': dict(count=1), 'one_query': dict(tokens=(1,)),
    'no_index': dict(count=0, sinks=True), 'no_row': dict(pages=0), 'no_query': dict(tokens=(0,)),
    'blocks_of_64': dict(BLOCKS, block=64, counts=True),
    'blocks_of_128': dict(BLOCKS, block=128, by_head=True),
    'latent': LATENT | dict(heads=(5, 1)), 'latent_sinks': LATENT | dict(sinks=True, counts=True),
    'latent_small': dict(heads=(4, 1), head_dim=16, head_dim_v=32, latent=True, alike=True),
    'latent_blocks': LATENT | BLOCKS | dict(block=64, counts=True),
}
CASES = {name: ChosenCase(**SMALL | own) for name, own in CASES.items()}


@pytest.fixture(autouse=True)
def few_rows_at_a_time(monkeypatch):
    """So that several parts add up."""
    monkeypatch.setattr(chosen_gradients, '_CHUNK_BYTES', 300_000)


@pytest.mark.parametrize('case', CASES.values(), ids=CASES)
def test_against_float64(case):
    check_gradients(case, 'cpu')
    check_gradients(case, 'cpu', with_lse=False)


@pytest.mark.parametrize('dtype', ['bf16', 'fp16'])
@pytest.mark.parametrize('name', ['gqa_64', 'sinks', 'latent', 'blocks_of_64'])
def test_16_bits(name, dtype):
    check_gradients(dataclasses.replace(CASES[name], dtype=dtype, tokens=(33,)), 'cpu')


@pytest.mark.parametrize('name', ['latent', 'latent_sinks', 'latent_blocks'])
def test_latents_without_rotary_columns(name):
    check_gradients(CASES[name], 'cpu', rotary=False)


@pytest.mark.parametrize('name', ['gqa_64', 'latent_sinks', 'by_head'])
def test_the_same_bits_each_time(name):
    given = inputs_of(CASES[name], 'cpu')
    upstream = upstream_of(CASES[name], given)
    first, second = (gradients_of(given, upstream, deterministic=True) for _ in range(2))
    for key, x in first.items():
        compare.check_equal(x, second[key], f'd{key}')


def test_only_what_asks_has_a_gradient():
    given = inputs_of(CASES['latent_sinks'], 'cpu')
    given['v'].requires_grad_()
    out = flash_attn_sparse_func(**given | dict(return_softmax_lse=False))
    out.sum().backward()
    assert given['v'].grad is not None and given['q'].grad is None
    assert given['v'].grad.isfinite().all()


def test_parameters():
    """A subclass of Tensor, which the function checks more closely."""
    given = inputs_of(CASES['gqa_64'], 'cpu')
    q = torch.nn.Parameter(given['q'])
    out, _ = flash_attn_sparse_func(**given | dict(q=q))
    out.sum().backward()
    assert q.grad.shape == q.shape


def test_no_second_derivatives():
    given = inputs_of(CASES['gqa_64'], 'cpu')
    q = given['q'].requires_grad_()
    out, _ = flash_attn_sparse_func(**given)
    dq, = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match='flash_attn_sparse_func: expected first deriv'):
        dq.sum().backward()


def test_no_forward_mode():
    given = inputs_of(CASES['gqa_64'], 'cpu')
    with pytest.raises(NotImplementedError, match='reverse-mode derivatives only'):
        torch.func.jvp(lambda q: flash_attn_sparse_func(**given | dict(q=q))[0],
                       (given['q'],), (given['q'],))


def arguments_of_op(name: str) -> tuple:
    case = CASES[name]
    given = inputs_of(case, 'cpu')
    out, lse = flash_attn_sparse_func(**given)
    indices = given['indices'] if given['indices'].dim() == 3 else given['indices'][:, None]
    return (*upstream_of(case, given), given['q'], given['k'], given['v'], out, lse,
            given.get('qv'), indices, given.get('index_counts'), case.block, case.scale)


@pytest.mark.parametrize('name', ['counts', 'by_head', 'latent_blocks'])
def test_opcheck(name):
    arguments = [torch.where(x.isnan(), 0, x) if isinstance(x, torch.Tensor)
                 and x.is_floating_point() and x.dim() == 3 else x for x in arguments_of_op(name)]
    torch.library.opcheck(torch.ops.flash_attn3.bwd_chosen.default, arguments)


def test_compiled():
    """One graph, with the gradients of an eager call."""
    given = inputs_of(CASES['latent_sinks'], 'cpu')
    upstream = upstream_of(CASES['latent_sinks'], given)
    wanted = gradients_of(given, upstream)
    leaves = {name: given[name].detach().requires_grad_() for name in wanted}
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_sparse_func, backend='aot_eager', fullgraph=True)
    results = compiled(**given | leaves)
    for name, x in zip(leaves, torch.autograd.grad(results, [*leaves.values()], upstream)):
        torch.testing.assert_close(x, wanted[name], msg=name)


def test_memory_is_linear_in_the_tokens(monkeypatch):
    """The plain path never holds more gathered rows than its bound, or those of a query."""
    sizes = []
    gather = chosen_gradients._parts

    def parts(own):
        for part in gather(own):
            sizes.append(part.slots.numel() * own.k.size(1) * (own.k.size(2) + own.v.size(2)) * 4)
            yield part

    monkeypatch.setattr(chosen_gradients, '_parts', parts)
    case = dataclasses.replace(CASES['gqa_64'], tokens=(100,))
    given = inputs_of(case, 'cpu')
    gradients_of(given, upstream_of(case, given))
    assert len(sizes) > 5 and max(sizes) <= 300_000
