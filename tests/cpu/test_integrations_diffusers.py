"""The backend `flex` of diffusers, by an emulated registry: which calls are ours, and that it is
given back. The client itself: tests/cpu/client_contracts.py.
"""
from __future__ import annotations

import enum
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from flash_attn3 import AttentionMask
from flash_attn3.integrations import _base, diffusers

from tests.support.lists import ints


class Name(str, enum.Enum):
    FLEX = 'flex'
    NATIVE = 'native'


def theirs(query: Tensor, *_, **options) -> str:
    return 'theirs'


@pytest.fixture
def backends(monkeypatch):
    registry = types.SimpleNamespace(_backends={Name.FLEX: theirs, Name.NATIVE: None})
    module = types.ModuleType('diffusers.models.attention_dispatch')
    module.AttentionBackendName, module._AttentionBackendRegistry = Name, registry
    for name in ('diffusers', 'diffusers.models'):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(_base, 'version_of', lambda _: '0.42.1')
    diffusers.enable_flex()
    yield registry._backends
    diffusers.disable_flex()
    assert registry._backends == {Name.FLEX: theirs, Name.NATIVE: None}


def drawn(queries: int, keys: int, heads_k: int = 2) -> list[Tensor]:
    return [torch.randn(2, rows, heads, 8) for rows, heads in (
        (queries, 4), (keys, heads_k), (keys, heads_k))]


def expected(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options).transpose(1, 2)


def nabla(heads: int, tiles: int) -> tuple[BlockMask, Tensor]:
    """Full blocks of 64 for each head, without a mask_mod, as Kandinsky makes them."""
    shown = torch.rand(2, heads, tiles, tiles) < 0.5
    shown |= torch.eye(tiles, dtype=torch.bool)
    order = shown.int().argsort(dim=-1, descending=True).int()
    count = shown.sum(-1).int()
    mask = BlockMask.from_kv_blocks(torch.zeros_like(count), order, count, order, BLOCK_SIZE=64,
                                    mask_mod=None)
    return mask, shown.repeat_interleave(64, 2).repeat_interleave(64, 3)


def test_masks_that_are_ours(backends):
    attend = backends[Name.FLEX]
    q, k, v = drawn(192, 192)
    mask, shown = nabla(4, 3)
    torch.testing.assert_close(attend(query=q, key=k, value=v, attn_mask=mask, enable_gqa=True,
                                      is_causal=False, return_lse=False, _parallel_config=None),
                               expected(q, k, v, attn_mask=shown))
    prefix = create_block_mask(lambda b, h, query, key: (key < 50) | (key <= query), None, None,
                               192, 192, 'cpu')
    wanted = expected(q, k, v, scale=0.3, attn_mask=torch.ones(192, 192).tril().bool()
                      | (torch.arange(192) < 50))
    for one in (prefix, AttentionMask.prefix_lm(ints([50, 50]), 192)):
        got = attend(q, k, v, attn_mask=one, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(attend(q, k, v, is_causal=True, enable_gqa=True),
                               expected(q, k, v, is_causal=True))
    q, k, v = drawn(5, 7)
    torch.testing.assert_close(attend(q, k, v, enable_gqa=True), expected(q, k, v))


@pytest.mark.parametrize('options', [
    dict(attn_mask=torch.ones(2, 7).bool()), dict(is_causal=True), dict(return_lse=True),
    dict(_parallel_config=object()),
    dict(attn_mask=AttentionMask.documents(ints([0, 5]), 5), is_causal=True)], ids=' '.join)
def test_other_calls_stay(backends, options):
    assert backends[Name.FLEX](*drawn(5, 7), **options) == 'theirs'


def test_shared_heads_must_be_asked_for(backends):
    with pytest.raises(RuntimeError, match='4 heads in key, as in query, or enable_gqa=True'):
        backends[Name.FLEX](*drawn(5, 7))


def test_other_versions_are_refused(backends, monkeypatch):
    diffusers.disable_flex()
    monkeypatch.delitem(backends, Name.FLEX)
    with pytest.raises(RuntimeError, match='with the attention backend flex, got native'):
        diffusers.enable_flex()
    backends[Name.FLEX] = theirs
    monkeypatch.setattr(_base, 'version_of', lambda _: '0.35.0')
    with pytest.raises(RuntimeError, match='expected diffusers 0.42 or later, got 0.35.0'):
        diffusers.enable_flex()
