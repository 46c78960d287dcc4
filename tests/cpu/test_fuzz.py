"""tests/fuzz on the CPU: its cases pass, are varied and repeatable; wrong results are found."""
from __future__ import annotations

import dataclasses

import pytest
import torch

from flash_attn3 import AttentionMask

from tests.fuzz import __main__ as command
from tests.fuzz.cache_call import CacheCall
from tests.fuzz.call import Call
from tests.fuzz.chosen_call import ChosenCall
from tests.fuzz.draw import case_of
from tests.fuzz.fp8_call import Fp8Call
from tests.fuzz.mask_call import MAKERS, MaskCall
from tests.support import cache_cases, general_cases, mask_cases
from tests.support.cache_cases import CacheCase
from tests.support.general_cases import GeneralCase
from tests.support.mask_cases import MaskCase

DRAWN = [case_of(1, number) for number in range(2500)]
CACHES = [case for case in DRAWN if isinstance(case, CacheCall)]
OTHERS = [case for case in DRAWN if isinstance(case, Call | Fp8Call)]
CHOSEN = [case.case for case in DRAWN if isinstance(case, ChosenCall)]
MASKS = [case for case in DRAWN if isinstance(case, MaskCall)]


def test_sixty_cases(capsys):
    assert command.main('--cases 60 --seed 1 --device cpu --jobs 1'.split()) == 0
    assert capsys.readouterr().out.startswith('60 of 60 cases (')


def test_a_failure_is_a_line_that_repeats_it(monkeypatch, capsys):
    run = general_cases.run
    monkeypatch.setattr(general_cases, 'run', lambda *args, **changes: run(
        *args, **changes)._replace(out=args[1].inputs.q.new_zeros(args[1].dout.shape)))
    assert command.main('--cases 12 --seed 1 --device cpu --jobs 1'.split()) == 1
    line, *_ = capsys.readouterr().out.splitlines()
    assert line.startswith('FAILED --seed 1 --case ') and 'GeneralCase(' in line
    number = line.split('--case ')[1].split(':')[0]
    assert command.main(['--seed', '1', '--case', number, '--device', 'cpu']) == 1
    assert 'out: max error' in capsys.readouterr().err


@pytest.mark.parametrize('changes', [
    {'causal': True}, {'window': (20, 3)}, {'chunk': 40}, {'softcap': 1.0}, {'sinks': 'fp32'},
    {'used': ((90, 100), (30, 128))}], ids=lambda changes: next(iter(changes)))
def test_an_ignored_argument_is_found(changes, monkeypatch):
    """Each case is held to the result of its own arguments, and not to that of a plain call."""
    plain = GeneralCase(((100, 130), (64, 128)), gradients=False)
    call = Call(dataclasses.replace(plain, **changes), 'varlen', ('', '', ''))
    call.check('cpu')
    forward = general_cases.forward
    monkeypatch.setattr(general_cases, 'forward', lambda case, tensors, **more: forward(
        plain, tensors._replace(lists=plain.lists('cpu'), inputs=tensors.inputs._replace(
            s_aux=None))))
    with pytest.raises(AssertionError):
        call.check('cpu')


def test_the_cases_are_varied():
    """Each feature is in many of them, and in many together with each other."""
    features = {'packed': lambda x: x.case.is_packed, 'causal': lambda x: x.case.causal,
                'window': lambda x: x.case.window != (-1, -1), 'chunk': lambda x: x.case.chunk > 0,
                'softcap': lambda x: x.case.softcap > 0, 'sinks': lambda x: x.case.sinks != '',
                'gqa': lambda x: x.case.heads[0] != x.case.heads[1],
                'values': lambda x: x.case.columns_v != x.case.head_dim,
                'fp16': lambda x: x.case.dtype == 'fp16',
                'gradients': lambda x: x.case.gradients,
                'layouts': lambda x: any(x.layouts)}
    for name, one in features.items():
        for other_name, other in features.items():
            together = sum(one(case) and other(case) for case in OTHERS)
            assert together >= 20, f'{name} with {other_name}: {together}'
    kinds = [getattr(case, 'function', 'fp8') for case in DRAWN]
    assert min(map(kinds.count, ('dense', 'varlen', 'qkvpacked', 'fp8', 'cache'))) > 150
    for rare in (lambda x: x.out, lambda x: x.case.used, lambda x: any(x.case.behind),
                 lambda x: getattr(x, 'interleaved', ''), lambda x: 0 in x.case.lengths[0]):
        assert sum(map(bool, map(rare, OTHERS))) >= 20
    assert len(set(map(str, DRAWN))) == len(DRAWN)
    assert DRAWN[:50] == [case_of(1, number) for number in range(50)]


def test_the_caches_are_varied():
    """Each feature is in many of them; those that go together, in some together."""
    features = {'paged': lambda x: x.page_size, 'packed': lambda x: x.is_packed,
                'new': lambda x: x.new, 'rotary': lambda x: x.rotary, 'pads': lambda x: x.leftpad,
                'rows': lambda x: x.batch_idx, 'window': lambda x: x.window != (-1, -1),
                'chunk': lambda x: x.chunk, 'sinks': lambda x: x.sinks,
                'layout': lambda x: x.layout, 'softcap': lambda x: x.softcap,
                'fp8': lambda x: x.dtype == 'e4m3',
                'splits': lambda x: x.num_splits > 1, 'parts': lambda x: x.split_size,
                'metadata': lambda x: x.metadata, 'number': lambda x: x.length_as == 'int'}
    apart = {('paged', 'rows'), ('rotary', 'fp8'), ('splits', 'parts')}
    for name, one in features.items():
        for other_name, other in features.items():
            if {(name, other_name), (other_name, name)} & apart:
                continue
            together = sum(bool(one(x.case) and other(x.case)) for x in CACHES)
            assert together >= 4, f'{name} with {other_name}: {together}'


def test_the_choices_are_varied():
    for one in (lambda x: x.latent, lambda x: x.kv8, lambda x: x.by_head, lambda x: x.block > 1,
                lambda x: x.counts, lambda x: x.sinks, lambda x: x.sparse, lambda x: x.split_size):
        assert 10 <= sum(map(bool, map(one, CHOSEN))) <= len(CHOSEN) - 10


def test_the_masks_are_varied():
    assert {case.maker for case in MASKS} == {'', *MAKERS}
    for one in (lambda x: x.case.intervals, lambda x: x.case.blocks, lambda x: x.gradients,
                lambda x: x.case.is_packed, lambda x: x.case.s_aux, lambda x: x.case.softcap,
                lambda x: x.case.intervals and x.case.blocks, lambda x: x.deterministic):
        assert 10 <= sum(map(bool, map(one, MASKS))) <= len(MASKS) - 10


@pytest.mark.parametrize('maker', ['', *MAKERS])
def test_another_mask_is_found(maker, monkeypatch):
    """Each case is held to its own mask, in the forward and in the gradients."""
    case = MaskCase(((130, 130),), intervals='' if maker else 'two', dtype='fp32')
    call = MaskCall(case, maker, True, True, False, 0)
    call.check('cpu')
    everything = torch.tensor([[[0, 130]]] * 130, dtype=torch.int32)
    run = mask_cases.call
    monkeypatch.setattr(mask_cases, 'call', lambda case, given, **changes: run(
        case, given._replace(mask=AttentionMask.from_intervals(everything)), **changes))
    with pytest.raises(AssertionError, match='out: '):
        call.check('cpu')


@pytest.mark.parametrize('changes', [
    {'causal': True}, {'window': (20, 3)}, {'chunk': 40}, {'softcap': 1.0}, {'sinks': 'fp32'},
    {'leftpad': (40, 7)}, {'batch_idx': True}, {'interleaved': False}, {'own_positions': True}],
    ids=lambda changes: next(iter(changes)))
def test_an_ignored_argument_of_a_cache_is_found(changes, monkeypatch):
    plain = CacheCase(((5, 130), (5, 90)), new=(5, 5), rotary=1.0)
    case = dataclasses.replace(plain, **changes)
    names = {'sinks': 's_aux', 'window': 'window_size', 'chunk': 'attention_chunk',
             'leftpad': 'cache_leftpad', 'batch_idx': 'cache_batch_idx',
             'interleaved': 'rotary_interleaved', 'own_positions': 'rotary_seqlens'}
    ignored = next(iter(changes))
    ignored = names.get(ignored, ignored)
    CacheCall(case).check('cpu')
    function = cache_cases.flash_attn_with_kvcache
    monkeypatch.setattr(cache_cases, 'flash_attn_with_kvcache', lambda **given: function(
        **{name: x for name, x in given.items() if name != ignored}))
    with pytest.raises((AssertionError, RuntimeError)):    # a cache of more rows is refused
        CacheCall(case).check('cpu')
