"""return_max_logits on a cache and in parts, on the CPU path, and what does not go with it. Cases
of the kernels: tests/gpu/test_cache_max_logits.py.
"""
from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from flash_attn3 import (can_use, flash_attn_func, flash_attn_sparse_func, flash_attn_varlen_func,
                         flash_attn_with_kvcache, invariant)

from tests.support import compare
from tests.support.cache_cases import small
from tests.support.cache_oracle import check_case
from tests.support.lists import ints

OPS = torch.ops.flash_attn3
LATENT = dict(head_dim=16, head_dim_v=32, heads=(4, 1), latent=True)
CASES = {
    'dense': small(queries=2, causal=True), 'fp64': small(queries=2, dtype='fp64'),
    'paged': small(new=(3, 3, 3), page_size=4, rotary_columns=8, sinks='fp32', softcap=3.0),
    'packed': small(queries=(2, 0, 5), is_packed=True, window=(4, 0)),
    'e4m3': small((5, 9), dtype='e4m3', page_size=8), 'kv8': small(kv8=True),
    'trees': small((9, 17), queries=4, tree=True), 'no LSE': small(lse=False),
    'latent': small(**LATENT), 'latent kv8': small(**LATENT, kv8=True), 'out': small(out=True)}


@pytest.mark.parametrize('name', CASES)
def test_against_float64(name):
    check_case(dataclasses.replace(CASES[name], max_logits=True), 'cpu')


def test_num_splits_and_gradients():
    """Parts give the largest scores of one pass; they have no gradient."""
    q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 40, 2, 16)
    starts = [ints([0, rows, 2 * rows]) for rows in (5, 40)]
    for call, inputs in ((flash_attn_func, (q, k, k)), (
            lambda *x, **options: flash_attn_varlen_func(*x, *starts, 5, 40, **options),
            [x.flatten(0, 1) for x in (q, k, k)])):
        _, wanted = call(*inputs, causal=True, return_max_logits=True)
        for number in (0, 3):
            leaves = [x.clone().requires_grad_() for x in inputs]
            out, lse, got = call(*leaves, causal=True, num_splits=number, return_attn_probs=True,
                                 return_max_logits=True)
            assert not got.requires_grad and lse.requires_grad
            compare.check_equal(got, wanted, 'max_logits')
            out.sum().backward()
            assert all(x.grad is not None for x in leaves)


def test_a_query_without_keys():
    q, k = torch.randn(3, 2, 16), torch.randn(4, 2, 16)
    indices = torch.tensor([[0, 3], [-1, -1], [2, -1]], dtype=torch.int32)
    out, got = flash_attn_sparse_func(q, k, k, indices, return_max_logits=True)
    scores = torch.einsum('qhd,khd->hqk', q, k) / 4
    torch.testing.assert_close(got[:, 0], scores[:, 0, [0, 3]].amax(-1))
    assert (got[:, 1] == -math.inf).all() and (out[1] == 0).all()


def test_shared_prefix_does_not_go_with_it():
    """Nothing is written, and can_use says so."""
    q, k = (torch.randn(2, rows, 2, 16).bfloat16() for rows in (1, 16))
    before, text = k.clone(), 'expected no shared_prefix with return_max_logits, got both'
    arguments = dict(q=q, k_cache=k, v_cache=k.clone(), cache_seqlens=9, shared_prefix=4,
                     return_max_logits=True)
    for new in ({}, dict(k=q, v=q)):
        with pytest.raises(RuntimeError, match=text):
            flash_attn_with_kvcache(**arguments, **new)
    assert torch.equal(k, before)
    _, reasons = can_use(**arguments)
    assert any(text in reason for reason in reasons)


def test_split_size_and_invariant():
    q, k = torch.randn(2, 1, 2, 16), torch.randn(2, 16, 2, 16)
    wanted = flash_attn_with_kvcache(q, k, k, return_max_logits=True)
    with invariant(64):
        got = flash_attn_with_kvcache(q, k, k, return_max_logits=True)
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize('shape, dtype, text', [
    ((2, 1, 2), torch.float32, r'max_logits_out to have the shape \(2, 2, 1\)'),
    ((2, 2, 1), torch.bfloat16, 'max_logits_out.dtype to be float32')], ids=str)
def test_a_wrong_tensor(shape, dtype, text):
    q, k = torch.randn(2, 1, 2, 16), torch.randn(2, 16, 2, 16)
    with pytest.raises(RuntimeError, match=text):
        OPS.attend_cache(q, k, k, max_logits_out=torch.empty(shape, dtype=dtype))
