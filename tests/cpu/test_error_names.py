"""Errors name the public function that was called, also where it calls another one."""
from __future__ import annotations

import inspect

import pytest
import torch

import flash_attn3
from flash_attn3 import PrefixLevel, distributed
from tests.support.lists import ints

Q, K = torch.zeros(2, 8, 4, 64).bfloat16(), torch.zeros(2, 8, 2, 64).bfloat16()
ENDS = ints([0, 8, 16])
DENSE = dict(q=Q, k=K, v=K)
PACKED = {name: x.flatten(0, 1) for name, x in DENSE.items()}
VARLEN = PACKED | dict(cu_seqlens_q=ENDS, cu_seqlens_k=ENDS, max_seqlen_q=8, max_seqlen_k=8)
LEVELS = [PrefixLevel(ints([[0]]), 4, ints([0, 2])), PrefixLevel(ints([[0], [1]]), 4, ENDS // 8)]
# Arguments that a function takes.
GOOD = {
    'flash_attn_func': DENSE, 'flash_attn_fp8_func': DENSE,
    'flash_attn_varlen_func': VARLEN, 'flash_attn_varlen_fp8_func': VARLEN,
    'flash_attn_qkvpacked_func': dict(qkv=Q, num_heads_q=2),
    'flash_attn_completions_func': PACKED | dict(cu_seqlens=ENDS, cu_trees=ints([0, 2])),
    'flash_attn_sparse_func': PACKED | dict(indices=ints([[0]] * 16)),
    'flash_attn_with_kvcache': dict(q=Q[:, :1], k_cache=K, v_cache=K),
    'shared_prefix_attn': dict(q=Q[:, 0], k_cache=K, v_cache=K, levels=LEVELS),
    'ring_attention': DENSE, 'ulysses_attention': DENSE}
NUMBERS = dict(softcap=-1.0, sm_margin=-1, window_size=3, num_splits=-1, attention_chunk=-1,
               seed=-1, index_block=3)
MODULES = flash_attn3, distributed


def function_of(name):
    return next(getattr(module, name) for module in MODULES if hasattr(module, name))


def wrong_calls(name):
    """Good arguments with one that is wrong: a tensor of another rank, number of heads or dtype, a
    number out of its range.
    """
    taken = inspect.signature(function_of(name)).parameters
    for argument, x in GOOD[name].items():
        if isinstance(x, torch.Tensor):
            yield f'{argument} of another rank', {argument: x[None, None]}
            yield f'{argument} of int16', {argument: x.short()}
        if argument == 'q':
            yield 'three heads', {argument: x[..., :3, :]}
    for argument, x in NUMBERS.items():
        if argument in taken:
            yield argument, {argument: x}


CALLS = {f'{name}, {what}': (name, change) for name in GOOD for what, change in wrong_calls(name)}


def test_all_functions_are_here():
    """Of attention: the others call none of these."""
    public = {name for module in MODULES for name in module.__all__
              if name.startswith(('flash_attn_', 'shared_')) or name.endswith('_attention')}
    assert public == {*GOOD} | {'flash_attn_combine'}


@pytest.mark.filterwarnings('ignore:.*flash_attn_completions_func:DeprecationWarning')
@pytest.mark.parametrize('requires_grad', [False, True])
@pytest.mark.parametrize('name, change', CALLS.values(), ids=CALLS)
def test_the_name(name, change, requires_grad):
    given = GOOD[name] | change
    if requires_grad:
        given = {name: x.clone().requires_grad_() if isinstance(x, torch.Tensor)
                 and x.is_floating_point() else x for name, x in given.items()}
    with pytest.raises(RuntimeError) as error:
        function_of(name)(**given)
    assert str(error.value).startswith(f'flash_attn3.{name}: expected ')
    assert error.value.__cause__ is None and error.traceback[-1].path.name != 'test_error_names.py'


@pytest.mark.parametrize('name, change, text', [
    ('flash_attn_fp8_func', dict(k=None), 'k to be a tensor, got NoneType'),
    ('flash_attn_fp8_func', dict(softmax_scale='wide'), "softmax_scale to be a number, got 'wide'"),
    ('flash_attn_varlen_fp8_func', dict(sm_margin=1.5), 'sm_margin to be an integer, got 1.5'),
    ('flash_attn_with_kvcache', dict(v_cache=None), 'v_cache to be a tensor, got NoneType'),
    ('flash_attn_with_kvcache', dict(k_cache=[1]), 'k_cache to be a tensor, got list')],
    ids=lambda x: x if isinstance(x, str) else next(iter(x)))
def test_wrong_types(name, change, text):
    with pytest.raises(RuntimeError, match=f'^flash_attn3.{name}: expected {text}$'):
        function_of(name)(**GOOD[name] | change)


def test_can_use_names_a_wrong_type():
    assert flash_attn3.can_use(Q)[1][0] == (
        'flash_attn3.flash_attn_func: expected k to be a tensor, got NoneType')
