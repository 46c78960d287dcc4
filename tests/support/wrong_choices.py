"""Calls with chosen keys that no device takes: each tensor and number of a call, made wrong."""
from __future__ import annotations

import torch
from torch import Tensor

from tests.support.cache_cases import as_bits

NUMBERS = ('softmax_scale', 'softcap', 'num_splits', 'split_size', 'sm_margin',
           'return_softmax_lse', 'index_block')


def wrong_calls(given: dict) -> dict[str, dict]:
    """Changes by name. given: the arguments of flash_attn_with_kvcache or flash_attn_sparse_func.
    """
    wrong = {f'a word as {name}': {name: 'a'} for name in NUMBERS if name in given}
    for name, x in given.items():
        if not isinstance(x, Tensor):
            continue
        bits = as_bits(x)
        shapes = {'two dimensions more': bits[None, None]}
        if name != 'cu_seqlens_q':    # a batch of one sequence more has a right shape
            shapes['row more'] = torch.cat([bits, bits[:1]])
        if x.dim() > 1 and x.shape[0] != x.shape[1]:    # as many elements
            shapes['swap of its sizes'] = bits.reshape(x.shape[1], x.shape[0], *x.shape[2:])
        others = {what: other.view(x.dtype) for what, other in shapes.items()} | {
            'list': [[1.0]], 'copy on meta': x.to('meta')}
        if x.dtype == torch.int32:
            others |= {'int64': x.long(), 'float32': x.float()}
        # A call on a cache may do without indices.
        if name in ('q', 'k_cache', 'v_cache', 'k', 'v') or (name == 'indices' and 'k' in given):
            others['None'] = None
        wrong |= {f'{what} for {name}': {name: other} for what, other in others.items()}
    if given['q'].dim() == 4:
        wrong['packed sequences of dense q'] = {'cu_seqlens_q': torch.zeros(
            2, dtype=torch.int32, device=given['q'].device)}
    return wrong
