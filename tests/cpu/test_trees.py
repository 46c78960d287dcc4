"""Masks of bits over the last keys: core/tree_mask.h and flash_attn3/api/trees.py bit by bit;
attention with them against masked attention in float64.
"""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from flash_attn3 import flash_attn_with_kvcache, pack_tree_mask
from flash_attn3.api.trees import COLUMNS, unpacked

from tests.cpu.drawn import examples
from tests.host import _host

WORD = 2 ** 64 - 1


@given(st.integers(0, 2 ** 128 - 1), st.integers(-300, 300))
@examples(300)
def test_bits_from_a_column_on(bits, first):
    """Keys before the tree are visible, those after column 127 are not."""
    low, high = _host.tree_bits_from(bits & WORD, bits >> 64, first)
    for column in range(COLUMNS):
        place = column + first
        wanted = place < 0 or (place < COLUMNS and bits >> place & 1)
        assert (high << 64 | low) >> column & 1 == wanted


@given(st.integers(0, COLUMNS), st.integers(0, 5), st.integers(0, 2 ** 32))
def test_packed_bits(count, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    visible = torch.rand(rows, count, generator=generator) < 0.5
    packed = pack_tree_mask(visible)
    assert packed.shape == (rows, 4) and packed.dtype == torch.int32
    for row, words in zip(visible.tolist(), packed.tolist()):
        assert [words[j // 32] >> j % 32 & 1 for j in range(COLUMNS)] == \
            [*map(int, row), *[0] * (COLUMNS - count)]
    if rows == count:
        assert torch.equal(unpacked(packed), visible)


def call(batch=2, queries=5, length=12):
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, rows, heads, 16, dtype=torch.float64)
               for rows, heads in ((queries, 4), (20, 2), (20, 2)))
    visible = (torch.rand(batch, queries, queries) < 0.5) | torch.eye(queries, dtype=torch.bool)
    return dict(q=q, k_cache=k, v_cache=v, cache_seqlens=length), visible


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('length', [12, 5])
def test_values(length, causal):
    """A tree alone, and after other keys."""
    given, visible = call(length=length)
    out = flash_attn_with_kvcache(**given, causal=causal, tree_mask=pack_tree_mask(visible))
    mask = F.pad(visible & (visible.new_ones(5, 5).tril() | (not causal)), (length - 5, 0),
                 value=True)
    q, k, v = (x.transpose(1, 2) for x in (given['q'], given['k_cache'][:, :length],
                                           given['v_cache'][:, :length]))
    wanted = F.scaled_dot_product_attention(q, k, v, mask[:, None], enable_gqa=True)
    torch.testing.assert_close(out, wanted.transpose(1, 2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('change,text', [
    (lambda x: x.long(), 'tree_mask.dtype to be int32'),
    (lambda x: x[:1], r'tree_mask to have the shape \(2, 5, 4\)'),
    (lambda x: x[:, :, :3], r'tree_mask to have the shape'),
    (lambda x: x.to('meta'), 'tree_mask on the device of q'),
    (lambda x: x.repeat(1, 1, 2)[:, :, ::2], 'call tree_mask.contiguous()')])
def test_wrong_masks(change, text):
    """Nothing is appended before the error."""
    given, visible = call()
    before = given['k_cache'].clone()
    new = torch.ones(2, 5, 2, 16, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=text):
        flash_attn_with_kvcache(**given, k=new, v=new, tree_mask=change(pack_tree_mask(visible)))
    assert torch.equal(given['k_cache'], before)


def test_too_many_queries():
    given, _ = call(queries=129)
    given |= dict(k_cache=torch.zeros(2, 200, 2, 16).double(), cache_seqlens=200,
                  v_cache=torch.zeros(2, 200, 2, 16).double())
    with pytest.raises(RuntimeError, match='the seqlen of q to be from 0 to 128 with tree_mask'):
        flash_attn_with_kvcache(**given, tree_mask=torch.zeros(2, 129, 4, dtype=torch.int32))
    packed = dict(q=torch.zeros(130, 4, 16).double(),
                  cu_seqlens_q=torch.tensor([0, 129, 130], dtype=torch.int32))
    with pytest.raises(RuntimeError, match='at most 128 queries of a sequence .*got 129'):
        flash_attn_with_kvcache(**given | packed,
                                tree_mask=torch.zeros(130, 4, dtype=torch.int32))
    with pytest.raises(RuntimeError, match='pack_tree_mask: expected .*at most 128 tokens'):
        pack_tree_mask(torch.ones(1, 129, 129, dtype=torch.bool))
