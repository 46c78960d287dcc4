"""explain() and can_use() of calls on a KV cache, and of num_splits."""
from __future__ import annotations

import runpy
import sys

import pytest
import torch

from flash_attn3 import _plan, can_use, explain

from tests.support.cache_cases import small
from tests.support.described import describe_sizes

SHAPES = (4, 1, 32, 128), (4, 16384, 8, 128)
ON_CPU = 'flash_attn3.can_use: expected q on a CUDA device, got cpu'


def explained(capsys, *shapes, **arguments) -> dict[str, str]:
    explain(*shapes, **arguments)
    return {line[:14].strip(): line[15:] for line in capsys.readouterr().out.splitlines()}


def call(*, splits: dict | None = None, **others) -> dict:
    q, k = (describe_sizes(shape, 'bfloat16') for shape in SHAPES)
    return dict(q=q, k=k, v=k, sm_count=132, **(splits or {}), **others)


def test_plan():
    facts = _plan.plan_cache(**call())
    assert facts['name'] == 'FwdBf16D128CacheDecode' and facts['pack'] == 4
    assert (facts['splits'], facts['split_count']) == ('even', 0)
    assert facts['grid'] % facts['lanes'] == 0 and facts['slots'] == 2 * facts['grid']
    assert 0.9 < facts['grid'] / (132 * facts['ctas_per_sm']) <= 1
    assert facts['parts_bytes'] == facts['slots'] * 8 * (128 + 2 * 8) * 4
    assert (facts['batch'], facts['capacity'], facts['page_size']) == (4, 16384, 16384)


def test_plan_with_other_splits():
    parts = _plan.plan_cache(**call(splits={'num_splits': 3}))
    assert (parts['splits'], parts['split_count']) == ('parts', 3)
    size = _plan.plan_cache(**call(splits={'split_size': 1000}))
    assert size['splits'] == 'size'
    assert size['split_count'] == -(-1000 // size['tile_n'])


def test_plan_gives_the_error():
    for wrong, text in ((dict(splits={'num_splits': 300}), 'num_splits to be from 0'),
                        (dict(sm_count=0), 'sm_count to be 1 or more')):
        given = call(**{name: x for name, x in wrong.items() if name == 'splits'}) | {
            name: x for name, x in wrong.items() if name != 'splits'}
        assert text in _plan.plan_cache(**given)['reason']


def test_explain_a_dense_cache(capsys):
    rows = explained(capsys, *SHAPES, cache=True)
    assert rows['variant'].startswith('FwdBf16D128Cache')
    assert rows['keys'] == '4 sequence(s), 16384 slots a sequence'
    assert rows['splits'].startswith('even')
    read = 4 * 16384 * 8 * 256 * 2
    assert rows['bytes'] == f'{read / 1e6:.4g} MB: K and V of full caches'
    assert rows['expected'].startswith(f'{read / 4e6 + 6:.3g} us, an estimate')
    assert 'gradients' not in rows
    half = explained(capsys, *SHAPES, cache_seqlens=8192)
    assert half['bytes'] == f'{read / 2e6:.4g} MB: K and V of full caches'


def test_explain_pages_and_packed_queries(capsys):
    rows = explained(capsys, (9, 32, 128), (5000, 64, 8, 128), page_table=(4, 256), num_splits=3,
                     cu_seqlens_q=[0, 1, 2, 3, 9], max_seqlen_q=6, causal=True, softcap=2.0,
                     cache_leftpad=True, cache_seqlens=torch.zeros(4), s_aux=torch.zeros(32))
    assert rows['variant'].startswith('FwdBf16D128CacheDecode')
    assert rows['keys'] == '4 sequence(s), pages of 64, 256 a sequence'
    assert rows['splits'].startswith('at most 3 part(s)')
    tensors = [torch.empty(shape, dtype=torch.float16, device='meta') for shape in SHAPES]
    rows = explained(capsys, *tensors, cache=True, split_size=512)
    assert rows['variant'].startswith('FwdFp16D128Cache')
    assert rows['splits'] == 'parts of 512 keys'


def test_explain_prompts_with_steps_beside_them(capsys):
    rows = explained(capsys, (516, 32, 128), (5000, 64, 8, 128), page_table=(5, 256),
                     cu_seqlens_q=[0, 1, 2, 3, 4, 516], max_seqlen_q=512, causal=True,
                     cache_seqlens=torch.zeros(5))
    assert rows['variant'].startswith('FwdBf16D128CacheLong')
    assert ' and FwdBf16D128CacheDecode' in rows['variant']


def test_explain_says_why_there_is_no_kernel(capsys):
    explain((4, 1, 32, 100), (4, 64, 8, 100), cache=True)
    assert capsys.readouterr().out.startswith(
        'no kernel: flash_attn3.flash_attn_with_kvcache: expected')
    with pytest.raises(TypeError, match="unexpected argument 'pages'"):
        explain(*SHAPES, cache=True, pages=3)


@pytest.mark.parametrize('options, text', [
    (['--page-size', '64'], 'pages of 64, 256 a sequence'),
    (['--packed', '--split-size', '700'], '16384 slots a sequence'), ([], 'even')])
def test_command_line(options, text, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', [
        'explain', '--cache', '--batch', '4', '--seqlen-q', '1', '--seqlen-k', '16384',
        '--heads', '32', '--heads-k', '8', '--causal', *options])
    runpy.run_module('flash_attn3.explain', run_name='__main__')
    out = capsys.readouterr().out
    assert out.startswith('variant        FwdBf16D128Cache') and text in out


# ----------------------------------------------------------------------------------------- can_use
def given(**others) -> dict:
    return small(dtype='bf16', head_dim=64, new=(1, 1, 1)).arguments('cpu') | others


@pytest.mark.parametrize('change, text', [
    ({}, None), ({'causal': True, 'softcap': 3.0, 'window_size': (4, 0)}, None),
    ({'k': None, 'v': None}, None),
    ({'return_softmax_lse': True, 'num_splits': 1, 'max_seqlen_q': 1}, None),
    ({'num_splits': 257}, 'flash_attn_with_kvcache: expected num_splits to be from 0'),
    ({'k': None}, 'flash_attn_with_kvcache: expected k with v'),
    ({'cache_seqlens': 24}, 'flash_attn_with_kvcache: expected the number of new keys to be'),
    ({'cache_seqlens': None}, 'flash_attn_with_kvcache: expected cache_seqlens with appended'),
    ({'qv': torch.ones(1)}, 'flash_attn_with_kvcache: expected qv to have the shape'),
    ({'rotary_cos': torch.ones(9, 4)},
     'flash_attn_with_kvcache: expected rotary_sin with rotary_cos'),
    ({'out_dtype': torch.float16}, 'flash_attn_with_kvcache: expected out_dtype'),
    ({'window_size': 3}, 'flash_attn_with_kvcache: expected window_size'),
    ({'k_descale': torch.ones(3, 2)},
     'flash_attn_with_kvcache: expected k_cache of float8_e4m3fn with k_descale')], ids=str)
def test_can_use(change, text):
    is_fine, reasons = can_use(**given(**change))
    assert not is_fine and reasons[-1] == ON_CPU
    if text is None:
        assert reasons == [ON_CPU]
    else:
        assert reasons[0].startswith(f'flash_attn3.{text}')


def test_can_use_by_place_and_with_gradients():
    arguments = given()
    q, k_cache, v_cache = (arguments[name] for name in ('q', 'k_cache', 'v_cache'))
    assert can_use(q, k_cache, v_cache, cache_seqlens=3) == (False, [ON_CPU])
    reasons = can_use(q.requires_grad_(), k_cache, v_cache, cache_seqlens=3)[1]
    assert reasons[0].startswith(
        'flash_attn3.flash_attn_with_kvcache: expected requires_grad=False')
    with pytest.raises(TypeError, match="unexpected argument 'pages'"):
        can_use(**arguments, pages=3)


@pytest.mark.parametrize('num_splits, text', [
    (0, None), (1, None), (7, None), (-1, 'num_splits to be from 0'), (999, 'num_splits to be')])
def test_can_use_num_splits(num_splits, text):
    q, k = (torch.zeros(1, rows, 2, 64, dtype=torch.bfloat16) for rows in (1, 4096))
    reasons = can_use(q, k, k, num_splits=num_splits)[1]
    assert reasons == [ON_CPU] if text is None else text in reasons[0]
