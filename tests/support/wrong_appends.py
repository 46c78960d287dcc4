"""Calls that append and that no device takes, and what holds after them: caches and scales are as
they were.
"""
from __future__ import annotations

import re

import pytest
import torch

from flash_attn3 import flash_attn_with_kvcache

from tests.support.cache_cases import as_bits

# Wrong with whatever else.
WRONG_NUMBERS = {
    'num_splits of -1': dict(num_splits=-1), 'num_splits of 257': dict(num_splits=257),
    'split_size with num_splits': dict(split_size=64, num_splits=2),
    'split_size of -1': dict(split_size=-1, num_splits=0),
    'chunk of -1': dict(attention_chunk=-1), 'scale of 0': dict(softmax_scale=0.0),
    'infinite scale': dict(softmax_scale=float('inf')), 'softcap of -1': dict(softcap=-1.0),
    'window of -2': dict(window_size=(-2, 0)), 'sm_margin of 1000': dict(sm_margin=1000),
    'shared_prefix of -1': dict(shared_prefix=-1), 'k alone': dict(v=None),
    'v alone': dict(k=None),
}


def wrong_calls(given: dict) -> dict[str, dict]:
    """Changes that no call takes, by name."""
    q, k, v = given['q'], given['k'], given['v']
    like_out = q.new_empty((*q.shape[:-1], given['v_cache'].size(-1)), dtype=torch.bfloat16)
    wrong = WRONG_NUMBERS | {
        'q of int32': dict(q=q.float().int()), 'head dim of q': dict(q=q[..., :-8]),
        'rank of q': dict(q=q[0]),
        'out of another shape': dict(out=like_out[..., :-8]),
        'out of float32': dict(out=like_out.float()),
        'tree of int64': dict(tree_mask=torch.zeros((*q.shape[:-2], 4), dtype=torch.int64,
                                                    device=q.device)),
        'sinks of all heads but one': dict(s_aux=torch.zeros(q.size(-2) - 1, device=q.device)),
        'lengths of int64': dict(cache_seqlens=given['cache_seqlens'].long()),
        'lengths of another batch': dict(cache_seqlens=given['cache_seqlens'][:1]),
        'no lengths': dict(cache_seqlens=None),
        'descale of q': dict(q_descale=torch.ones(97, 1, device=q.device)),
        'a word as descale': dict(v_descale='1'),
        'heads of k': dict(k=k[..., :0, :]),
        'rows of v': dict(v=v[:0]), 'dtype of k': dict(k=k.float().int(), v=v.float().int()),
        'rotary_cos alone': dict(rotary_cos=torch.ones(99, 16, device=q.device, dtype=q.dtype),
                                 rotary_sin=None),
        'rank of rotary_cos': dict.fromkeys(('rotary_cos', 'rotary_sin'),
                                            torch.ones(99, device=q.device).to(q.dtype)),
        'metadata of float32': dict(scheduler_metadata=torch.zeros(1, device=q.device)),
        'longer prefix than the cache': dict(shared_prefix=1 << 20),
    }
    if q.itemsize > 1:
        if given['k_cache'].size(-2) > 1:
            wrong['heads that do not divide'] = dict(q=torch.cat([q, q[..., :1, :]], -2))
        wrong['q of another 16 bits, rotated'] = dict(
            q=q.half(), **dict.fromkeys(('rotary_cos', 'rotary_sin'), torch.ones(
                99, 16, device=q.device, dtype=torch.float16)))
    if given['k_cache'].itemsize > 1:
        wrong['k_descale of 16 bits'] = dict(k_descale=torch.ones(2, 2, device=q.device))
        wrong['k_descale that is a number'] = dict(k_descale=0.5)
    if (qv := given.get('qv')) is not None:
        wrong |= {'head dim of qv': dict(qv=qv[..., :256]), 'rows of qv': dict(qv=qv[:0]),
                  'softcap with qv': dict(softcap=2.0), 'qv of float32': dict(qv=qv.float())}
    elif q.itemsize > 1:
        wrong['qv for two KV heads'] = dict(qv=like_out.to(q.dtype))
    if 'page_table' in given:
        wrong['table of int64'] = dict(page_table=given['page_table'].long())
    if q.dim() == 4:
        wrong['batch of q'] = dict(q=q[:0])
    if q.dim() == 3:
        wrong['packed q without a batch'] = dict(cu_seqlens_q=None)
        wrong['packed q and a prefix, without a batch'] = dict(cu_seqlens_q=None, shared_prefix=16)
    return wrong


WRITTEN = 'k_cache', 'v_cache', 'k_descale', 'v_descale'


def bits_of(given: dict) -> dict:
    return {name: as_bits(given[name]).clone() for name in WRITTEN
            if isinstance(given.get(name), torch.Tensor)}


def expect_untouched(given: dict, before: dict, what: str) -> None:
    for name, bits in before.items():
        assert torch.equal(as_bits(given[name]), bits), f'{what}: {name} was written'


def expect_refused(given: dict, what: str, change: dict, function=flash_attn_with_kvcache) -> None:
    before = bits_of(given)
    with pytest.raises((RuntimeError, NotImplementedError)) as raised:
        function(**given | change)
    assert re.search(r'flash_attn3\.\w+: expected ', str(raised.value)), f'{what}: {raised.value}'
    expect_untouched(given, before, what)
