"""The ops on a KV cache themselves: opcheck, defaults, fakes, torch.compile, the fallback; which
arguments an eager call passes on.
"""
from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from flash_attn3 import flash_attn_with_kvcache
from flash_attn3.api import kvcache
from flash_attn3.cpu import fallback
from flash_attn3.ops import attend_cache, library
from flash_attn3.ops.attend_arguments import build, shortest

from tests.support.cache_cases import small
from tests.support.called_ops import compilations
from tests.support.lists import ints

OPS = torch.ops.flash_attn3
CASES = {
    'dense': small(queries=2, new=(2, 2, 2), causal=True, lse=False),
    'paged': small(new=(3, 3, 3), page_size=4, rotary_columns=8, sinks='fp32', lse=False),
    'packed': small(queries=(1, 0, 4), new=(3, 0, 1), is_packed=True, new_packed=True,
                    rotary_columns=8, interleaved=False, lse=False),
    'e4m3': small((5, 9), new=(1, 1), dtype='e4m3', page_size=8, lse=False),
    'idx': small((5, 9), new=(1, 1), dtype='bf16', batch_idx=True, leftpad=(2, 0), lse=False),
    'latent': small(queries=2, new=(2, 2, 2), heads=(4, 1), head_dim_v=24, latent=True,
                    page_size=4, rotary_columns=8, causal=True, lse=False),
}
# What opcheck can do with e4m3: its test_schema compares inputs by operations that e4m3 lacks.
ON_E4M3 = ('test_autograd_registration', 'test_faketensor', 'test_aot_dispatch_dynamic')
ALL = ('test_schema', *ON_E4M3)
each_case = pytest.mark.parametrize('name', CASES)


def without_nan(given: dict) -> dict:
    """opcheck compares with NaN as unequal."""
    return {name: x.nan_to_num() if isinstance(x, torch.Tensor) and x.is_floating_point()
            and x.itemsize > 1 else x.float().nan_to_num().to(x.dtype)
            if isinstance(x, torch.Tensor) and x.itemsize == 1 else x for name, x in given.items()}


def utils_of(given: dict) -> tuple[str, ...]:
    return ALL if given['q'].itemsize > 1 else ON_E4M3


def append_arguments(given: dict, **others) -> tuple:
    q, k_cache, v_cache, _, *own = attend_arguments(
        given | dict(appended=0 if 'cu_seqlens_k_new' in given else given['k'].size(1)), **others)
    rotary = attend_cache.Rotary(*map(given.get, ('rotary_cos', 'rotary_sin')),
                                 rotary_interleaved=given.get('rotary_interleaved', True))
    return (q, k_cache, v_cache, given['k'], given['v'], None, None, None, *rotary, *own)


def attend_arguments(given: dict, **others) -> tuple:
    own = attend_cache.Attend(**{name: given[name] for name in attend_cache.Attend._fields
                                 if name in given} | dict(sinks=given.get('s_aux')) | others)
    return given['q'], given['k_cache'], given['v_cache'], None, *own


@each_case
def test_opcheck_append(name):
    given = without_nan(CASES[name].arguments('cpu'))
    arguments = append_arguments(given, return_lse=True)
    opcheck(OPS.append_and_attend.default, arguments, test_utils=utils_of(given))
    out = torch.empty_like(OPS.append_and_attend(*arguments)[0])
    opcheck(OPS.append_and_attend.default, (*arguments[:5], out, *arguments[6:]),
            test_utils=utils_of(given))


@each_case
@pytest.mark.parametrize('others', [{}, {'return_lse': True, 'num_splits': 3}], ids=str)
def test_opcheck_attend(others, name):
    given = without_nan(CASES[name].arguments('cpu'))
    tensors_and_numbers = attend_arguments(given, **others)
    opcheck(OPS.attend_cache.default, tensors_and_numbers, test_utils=utils_of(given))
    largest = attend_cache.empty_rows(given['q']).fill_(7)
    opcheck(OPS.attend_cache.default, attend_arguments(given, **others, max_logits_out=largest),
            test_utils=utils_of(given))
    out = OPS.attend_cache(*tensors_and_numbers)[0]
    opcheck(OPS.attend_cache.default,
            (*tensors_and_numbers[:3], torch.empty_like(out), *tensors_and_numbers[4:]),
            test_utils=utils_of(given))


def test_schemas():
    attend, rotary = (list(x._field_defaults.items())
                      for x in (attend_cache.Attend, attend_cache.Rotary))
    for op, first, defaults, mutated in (
            (OPS.append_and_attend, 8, rotary + attend,
             ['k', 'v', 'out', 'k_scales', 'v_scales', 'max_logits_out']),
            (OPS.attend_cache, 4, attend, ['out', 'max_logits_out'])):
        listed = op.default._schema.arguments
        assert [(x.name, x.default_value) for x in listed[first:]] == defaults
        written = [x.name for x in listed if x.alias_info and x.alias_info.is_write]
        assert written == mutated


def test_packed_keys():
    """k and v without a cache: as flash_attn_varlen_func, whose splits these are."""
    q, k = torch.randn(6, 4, 16), torch.randn(11, 2, 16)
    of_q, of_k, used = ints([0, 2, 6]), ints([0, 4, 11]), ints([4, 3])
    own = attend_cache.Attend(cu_seqlens_q=of_q, cu_seqlens_k=of_k, seqused_k=used, max_seqlen_q=4,
                       causal=True, num_splits=2, return_lse=True)
    out, lse = OPS.attend_cache(q, k, k, None, *own)
    wanted, wanted_lse, _ = OPS.attend(q, k, k, None, of_q, of_k, None, used, 4, 7, None, None,
                                       True)
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)


# ------------------------------------------------------------------------------------------ tracing
@pytest.mark.parametrize('dynamic', [False, True])
@each_case
def test_compiled_with_append(name, dynamic):
    """One graph; the caches are written in place."""
    def step(given: dict) -> tuple:
        return flash_attn_with_kvcache(**given | dict(return_softmax_lse=True,
                                                     return_max_logits=True))

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend='aot_eager', dynamic=dynamic)
    given, same = CASES[name].arguments('cpu'), CASES[name].arguments('cpu')
    with torch.no_grad():
        got, wanted = compiled(given), step(same)
    for ours, theirs in zip(got, wanted, strict=True):
        assert torch.equal(ours, theirs)
    for key in ('k_cache', 'v_cache'):
        assert torch.equal(given[key].float().nan_to_num(7), same[key].float().nan_to_num(7))


def test_compiled_once_for_all_lengths():
    """A number as length is a SymInt."""
    def step(q, k, v, length):
        return flash_attn_with_kvcache(q, k, v, cache_seqlens=length)

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend('aot_eager')
    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=True)
    q, k, v = (torch.randn(1, rows, 2, 8) for rows in (1, 32, 32))
    for length in (3, 4, 7, 30):
        assert torch.equal(compiled(q, k, v, length), step(q, k, v, length))
    assert compilations(counter) == 1


def test_compiled_layers_of_one_cache():
    """K and V of two layers are views of one tensor, which each layer writes a part of."""
    def model(q, both, k, lengths):
        for layer in range(2):
            q = flash_attn_with_kvcache(q, both[layer, 0], both[layer, 1], k, k,
                                        cache_seqlens=lengths, causal=True)
        return q

    torch._dynamo.reset()
    q, k, both = torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 8), torch.randn(2, 2, 2, 16, 2, 8)
    same = both.clone()
    compiled = torch.compile(model, fullgraph=True, backend='aot_eager')
    assert torch.equal(compiled(q, both, k, ints([3, 9])), model(q, same, k, ints([3, 9])))
    assert torch.equal(both, same)


def test_fakes_on_cuda():
    with FakeTensorMode():
        q, k = (torch.empty(2, rows, 4, 64, dtype=torch.bfloat16, device='cuda')
                for rows in (1, 128))
        out, lse = OPS.attend_cache(q, k, k, return_lse=True)
        assert out.shape == q.shape and lse.shape == (2, 4, 1) and lse.dtype == torch.float32
        assert OPS.attend_cache(q, k, k)[1].shape == (0,)
        e4m3 = [x.to(torch.float8_e4m3fn) for x in (q, k, k)]
        assert OPS.attend_cache(*e4m3)[0].dtype == torch.bfloat16
        assert OPS.attend_cache(*e4m3, float16_out=True)[0].dtype == torch.float16


# -------------------------------------------------------------------------------- the way of a call
class Counted:
    """An op that notes how many arguments it gets."""

    def __init__(self, op):
        self.op, self.counts = op, []

    def __call__(self, *arguments):
        self.counts.append(len(arguments))
        return self.op(*arguments)


@pytest.mark.parametrize('options, last', [
    ({}, 'cu_seqlens_k_new'), ({'causal': True}, 'causal'),
    ({'softmax_scale': 0.5}, 'softmax_scale'), ({'window_size': (3, 0)}, 'window_right'),
    ({'return_softmax_lse': True}, 'return_lse'), ({'num_splits': 2}, 'num_splits'),
    ({'pack_gqa': True}, 'pack_gqa'), ({'max_seqlen_q': 4}, 'cu_seqlens_k_new'),
    ({'latent': True}, 'qv'), ({'return_max_logits': True}, 'max_logits_out')], ids=str)
def test_trailing_defaults_are_dropped(options, last, monkeypatch):
    attend = Counted(OPS.attend_cache.default)
    monkeypatch.setattr(kvcache, '_EAGER', (attend, *kvcache._EAGER[1:]))
    options = dict(options)
    case = small(heads=(4, 1), latent=options.pop('latent', False), lse=False)
    flash_attn_with_kvcache(**case.arguments('cpu') | options)
    assert attend.counts == [4 + attend_cache.Attend._fields.index(last) + 1]


def test_arguments_in_the_order_of_the_list():
    taken = list(inspect.signature(build).parameters)
    fields, defaults = attend_cache.Attend._fields, attend_cache.Attend._field_defaults
    assert {*fields} - {*taken} == {'cu_seqlens_k', 'seqused_q', 'seqused_k', 'max_seqlen_k',
                                    'max_logits_out'}
    assert attend_cache.Attend(*build(*taken))._asdict() == defaults | dict(zip(taken, taken))


@pytest.mark.parametrize('given, count', [
    ({}, 7), ({'window_left': 3}, 11), ({'tree_mask': 'bits'}, 30), ({'float16_out': True}, 33)],
    ids=str)
def test_shortest(given, count):
    own = attend_cache.Attend(**given)
    assert shortest(own) == own[:count] and len(shortest(own)) == count


@each_case
def test_devices_without_kernels(name, monkeypatch):
    """The plain functions, with one warning: as if the CPU were such a device."""
    monkeypatch.setattr(library, 'SERVED_DEVICES', set())
    monkeypatch.setattr(library, 'kernels_serve', lambda device: False)
    monkeypatch.setattr(torch.Tensor, 'is_cuda', True)
    monkeypatch.setattr(fallback, '_warned_devices', set())
    given, same = CASES[name].arguments('cpu'), CASES[name].arguments('cpu')
    with pytest.warns(UserWarning, match='flash_attn_with_kvcache: expected a Hopper') as raised:
        got = flash_attn_with_kvcache(**given)
    assert raised[0].filename == __file__
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert torch.equal(got, flash_attn_with_kvcache(**same))
