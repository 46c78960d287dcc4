"""Calls in which no query sees a key: out is 0, the LSE -inf, or the sink if there is one, whatever
the function and however the call comes to have no keys; a sink's gradient is that of its LSE.
"""
from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flash_attn3 import (PrefixLevel, flash_attn_combine, flash_attn_fp8_func, flash_attn_func,
                         flash_attn_varlen_fp8_func, flash_attn_varlen_func,
                         flash_attn_with_kvcache, merge_states, shared_prefix_attn)

HEADS, HEADS_K, DIM = 4, 2, 64
E4M3 = torch.float8_e4m3fn
with_and_without_sinks = pytest.mark.parametrize('has_sinks', [True, False], ids=['sinks', 'none'])


def made(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.bfloat16
         ) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def ints(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def sinks_of(has_sinks: bool, device: torch.device) -> Tensor | None:
    return torch.randn(HEADS, device=device) if has_sinks else None


def check(out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
    """lse: (batch, heads, seqlen) or (heads, total)."""
    assert (out == 0).all()
    assert lse.shape == (*out.shape[:-3], out.size(-2), out.size(-3))
    wanted = lse.new_full(lse.shape, -math.inf) if sinks is None else (
        sinks.detach()[:, None].expand(lse.shape))
    torch.testing.assert_close(lse.detach(), wanted, rtol=1e-6, atol=1e-6)


def check_gradients(out: Tensor, lse: Tensor, inputs: list[Tensor], sinks: Tensor | None) -> None:
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    wanted = inputs if sinks is None else [*inputs, sinks]
    gradients = torch.autograd.grad((out, lse), wanted, (dout, dlse))
    for gradient, x in zip(gradients, inputs):
        assert gradient.shape == x.shape and (gradient == 0).all()
    if sinks is not None:
        rows = [dim for dim in range(dlse.dim()) if dim != dlse.dim() - 2]
        torch.testing.assert_close(gradients[-1], dlse.sum(rows), rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------- without a cache
@pytest.mark.smoke
@pytest.mark.parametrize('num_splits', [0, 1, 3])
@pytest.mark.parametrize('features', [{}, {'causal': True}, {'softcap': 5.0}], ids=str)
@with_and_without_sinks
def test_dense(has_sinks, features, num_splits, device):
    q, k, v = (made((2, rows, heads, DIM), device).requires_grad_()
               for rows, heads in ((5, HEADS), (0, HEADS_K), (0, HEADS_K)))
    sinks = sinks_of(has_sinks, device)
    sinks = None if sinks is None else sinks.requires_grad_()
    with torch.no_grad():
        check(*flash_attn_func(q, k, v, return_attn_probs=True, s_aux=sinks,
                               num_splits=num_splits, **features), sinks)
    results = flash_attn_func(q, k, v, return_attn_probs=True, s_aux=sinks, num_splits=num_splits,
                              **features)
    check(*results, sinks)
    check_gradients(*results, [q, k, v], sinks)


@pytest.mark.smoke
@with_and_without_sinks
def test_max_logits(has_sinks, device):
    """They are of keys alone."""
    q, k = made((2, 5, HEADS, DIM), device), made((2, 0, HEADS_K, DIM), device)
    sinks = sinks_of(has_sinks, device)
    *results, max_logits = flash_attn_func(q, k, k, return_attn_probs=True, s_aux=sinks,
                                           return_max_logits=True)
    check(*results, sinks)
    assert (max_logits == -math.inf).all()


@pytest.mark.smoke
@pytest.mark.parametrize('num_splits', [0, 1, 3])
@pytest.mark.parametrize('keys', [0, 7], ids=['no_tensor', 'unused'])
@with_and_without_sinks
def test_packed(has_sinks, keys, num_splits, device):
    """Rows of no sequence have no sink either; with splits it is PyTorch that clears them."""
    behind = 0 if num_splits == 3 and device.type == 'cpu' else 2
    q, k, v = (made((rows, heads, DIM), device).requires_grad_()
               for rows, heads in ((7 + behind, HEADS), (keys, HEADS_K), (keys, HEADS_K)))
    sinks = sinks_of(has_sinks, device)
    sinks = None if sinks is None else sinks.requires_grad_()
    starts_q, starts_k = ints([0, 4, 4, 7], device), ints([0, 0, 0, 0], device)

    def run() -> tuple[Tensor, Tensor]:
        return flash_attn_varlen_func(q, k, v, starts_q, starts_k, 4, 4, return_attn_probs=True,
                                      s_aux=sinks, num_splits=num_splits)

    with torch.no_grad():
        out, lse = run()
    check(out[:7], lse[:, :7], sinks)
    check(out[7:], lse[:, 7:], None)
    out, lse = run()
    check(out[:7], lse[:, :7], sinks)
    check_gradients(out[:7], lse[:, :7], [q, k, v], sinks)


@pytest.mark.parametrize('block_scales', [True, False])
@with_and_without_sinks
def test_fp8(has_sinks, block_scales, device):
    sinks = sinks_of(has_sinks, device)
    q, k = made((2, 5, HEADS, DIM), device), made((2, 0, HEADS_K, DIM), device)
    options = dict(return_attn_probs=True, s_aux=sinks, block_scales=block_scales)
    check(*flash_attn_fp8_func(q, k, k, **options), sinks)
    starts = [ints(list(values), device) for values in ((0, 5, 10), (0, 0, 0))]
    check(*flash_attn_varlen_fp8_func(q.flatten(0, 1), k.flatten(0, 1), k.flatten(0, 1), *starts, 5,
                                      5, **options), sinks)


# ---------------------------------------------------------------------------------------- a cache
def caches_of(kind: str, device: torch.device, dims: tuple[int, int], heads_k: int,
              dtypes: tuple[torch.dtype, torch.dtype]) -> dict:
    """The caches of two sequences without keys, and what says that they have none."""
    shape, given = {
        'no_slots': ((2, 0), {}),
        'no_slots_by_number': ((2, 0), {'cache_seqlens': 0}),
        'no_slots_by_list': ((2, 0), {'cache_seqlens': ints([0, 0], device)}),
        'no_pages': ((0, 16), {'page_table': torch.zeros(2, 0, dtype=torch.int32, device=device)}),
        'no_pages_but_ids': ((0, 16), {'page_table': ints([5, -1, 7, 1 << 30], device).view(2, 2),
                                       'cache_seqlens': ints([0, 0], device)}),
        'no_ids': ((3, 16), {'page_table': torch.zeros(2, 0, dtype=torch.int32, device=device)}),
        'unused_slots': ((2, 40), {'cache_seqlens': ints([0, 0], device)}),
        'unused_pages': ((3, 16), {'page_table': ints([0, -1, 7, 1], device).view(2, 2),
                                   'cache_seqlens': 0}),
        'padding': ((2, 40), {'cache_seqlens': ints([3, 40], device),
                              'cache_leftpad': ints([3, 40], device)}),
    }[kind]
    k, v = (made((*shape, heads_k, dim), device, dtype) for dim, dtype in zip(dims, dtypes))
    return {'k_cache': k, 'v_cache': v, **given}


KINDS = ['no_slots', 'no_slots_by_number', 'no_slots_by_list', 'no_pages', 'no_pages_but_ids',
         'no_ids', 'unused_slots', 'unused_pages', 'padding']
every_kind = pytest.mark.parametrize('kind', KINDS)


@pytest.mark.smoke
@every_kind
@pytest.mark.parametrize('options', [
    {}, {'num_splits': 1}, {'num_splits': 3, 'causal': True}, {'split_size': 64},
    {'softcap': 5.0, 'window_size': (3, 0)}], ids=str)
@pytest.mark.parametrize('queries', [1, 70])
@with_and_without_sinks
def test_cache(has_sinks, queries, options, kind, device):
    sinks = sinks_of(has_sinks, device)
    arguments = caches_of(kind, device, (DIM, DIM), HEADS_K, (torch.bfloat16,) * 2)
    q = made((2, queries, HEADS, DIM), device)
    out, lse, *_ = flash_attn_with_kvcache(q, **arguments, **options, s_aux=sinks,
                                           return_softmax_lse=True)
    check(out, lse, sinks)
    given = torch.full_like(out, 7.0)
    assert flash_attn_with_kvcache(q, **arguments, **options, s_aux=sinks, out=given) is given
    assert (given == 0).all()


@pytest.mark.smoke
@every_kind
@pytest.mark.parametrize('starts', [[0, 1, 2], [0, 70, 71], [0, 0, 5]], ids=str)
@with_and_without_sinks
def test_cache_with_packed_queries(has_sinks, starts, kind, device):
    sinks = sinks_of(has_sinks, device)
    q = made((starts[-1], HEADS, DIM), device)
    out, lse, *_ = flash_attn_with_kvcache(
        q, **caches_of(kind, device, (DIM, DIM), HEADS_K, (torch.bfloat16,) * 2), s_aux=sinks,
        cu_seqlens_q=ints(starts, device), max_seqlen_q=70, return_softmax_lse=True)
    check(out, lse, sinks)


@every_kind
@pytest.mark.parametrize('dtypes', [(torch.bfloat16, E4M3), (E4M3, E4M3)], ids=['kv8', 'fp8'])
@with_and_without_sinks
def test_cache_of_e4m3(has_sinks, dtypes, kind, device):
    sinks = sinks_of(has_sinks, device)
    of_q, of_cache = dtypes
    out, lse, *_ = flash_attn_with_kvcache(
        made((2, 3, HEADS, DIM), device, of_q),
        **caches_of(kind, device, (DIM, DIM), HEADS_K, (of_cache,) * 2), k_descale=2.0,
        v_descale=2.0, s_aux=sinks, return_softmax_lse=True)
    check(out, lse, sinks)


@pytest.mark.smoke
@every_kind
@pytest.mark.parametrize('of_values', [torch.bfloat16, E4M3], ids=['bf16', 'kv8'])
@with_and_without_sinks
def test_latent_cache(has_sinks, of_values, kind, device):
    sinks = sinks_of(has_sinks, device)
    arguments = caches_of(kind, device, (64, 512), 1, (torch.bfloat16, of_values))
    scale = None if of_values != E4M3 else torch.ones(*arguments['v_cache'].shape[:2], 4,
                                                      device=device)
    out, lse, *_ = flash_attn_with_kvcache(
        made((2, 3, HEADS, 64), device), qv=made((2, 3, HEADS, 512), device), **arguments,
        v_descale=scale, s_aux=sinks, return_softmax_lse=True)
    check(out, lse, sinks)


@pytest.mark.smoke
@pytest.mark.parametrize('kind', [kind for kind in KINDS if kind not in ('no_slots', 'no_pages',
                                                                         'no_ids')])
@with_and_without_sinks
def test_append_of_no_rows(has_sinks, kind, device):
    """With rotary, which turns the queries."""
    sinks = sinks_of(has_sinks, device)
    new = made((2, 0, HEADS_K, DIM), device)
    cos, sin = (made((64, 16), device) for _ in range(2))
    for rotary in ({}, {'rotary_cos': cos, 'rotary_sin': sin}):
        out, lse, *_ = flash_attn_with_kvcache(
            made((2, 3, HEADS, DIM), device), k=new, v=new, s_aux=sinks, return_softmax_lse=True,
            **caches_of(kind, device, (DIM, DIM), HEADS_K, (torch.bfloat16,) * 2), **rotary)
        check(out, lse, sinks)


# ------------------------------------------------------------------------------------------- levels
@pytest.mark.parametrize('pages', [0, 3])
@with_and_without_sinks
def test_levels(has_sinks, pages, device):
    """The sink enters once."""
    sinks = sinks_of(has_sinks, device)
    k, v = (made((pages, 16, HEADS_K, DIM), device) for _ in range(2))
    tables = [torch.zeros(groups, 1, dtype=torch.int32, device=device) for groups in (1, 2)]
    levels = [PrefixLevel(tables[0], 0, ints([0, 4], device)), PrefixLevel(tables[1], 0)]
    check(*shared_prefix_attn(made((2, 2, HEADS, DIM), device), k, v, levels, s_aux=sinks,
                              return_softmax_lse=True), sinks)


@with_and_without_sinks
def test_parts(has_sinks, device):
    """Merged with a part that has no sink."""
    sinks = sinks_of(has_sinks, device)
    q, k = made((2, 5, HEADS, DIM), device), made((2, 0, HEADS_K, DIM), device)
    parts = [flash_attn_func(q, k, k, return_attn_probs=True, s_aux=one) for one in (sinks, None)]
    outs, lses = zip(*parts)
    check(*merge_states(outs, lses), sinks)
    out, lse = flash_attn_combine(torch.stack(outs), torch.stack(lses).mT)
    check(out, lse.mT, sinks)
