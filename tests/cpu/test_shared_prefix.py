"""shared_prefix of flash_attn_with_kvcache and shared_prefix_attn on CPU tensors: values against
float64 query by query, the same as without sharing, every error, torch.compile.
"""
from __future__ import annotations

import random
import re

import pytest
import torch
from hypothesis import given as drawn_from, strategies as st

from flash_attn3 import (PrefixLevel, can_use, env, flash_attn_func, flash_attn_with_kvcache,
                         merge_states, shared_prefix_attn)
from flash_attn3.api import kvcache

from tests.cpu.drawn import examples
from tests.cpu.test_kvcache import check
from tests.support.cache_cases import CacheCase, small
from tests.support.cache_oracle import places
from tests.support.lists import ints
from tests.support.prefix_levels import LevelCase, check_levels


# ------------------------------------------------------------------------------------------- values
def drawn(number: int) -> CacheCase:
    """Everything that goes with shared keys."""
    pick = random.Random(number)
    capacity, page_size = pick.choice([24, 40]), pick.choice([0, 0, 1, 4, 8])
    step = page_size or 1
    count = pick.randint(1, 16 // step) * step
    packed, appends = pick.random() < 0.4, pick.random() < 0.5
    batch, causal = pick.choice([1, 2, 3, 4]), pick.random() < 0.6
    most = pick.choice([1, 1, 2, 4])
    queries = tuple(pick.randint(0, 4) if packed else most for _ in range(batch))
    own_new = pick.randint(1, 4)
    new = tuple(pick.randint(0, 4) if packed else own_new for _ in range(batch))
    new = new if appends else (0,) * batch
    least = [max(count, count + rows * causal - more) for rows, more in zip(queries, new)]
    lengths = tuple(pick.randint(low, capacity - more) for low, more in zip(least, new))
    dtype = pick.choice(['fp32', 'fp32', 'fp64', 'bf16', 'fp16', 'e4m3'])
    options = pick.choice(
        [{}, {'softcap': 2.5}, {'num_splits': 3}, {'num_splits': 1}, {'split_size': 64},
         {'softmax_scale': 0.4}, {'pack_gqa': True}, {'sm_margin': 3}])
    head_dim, head_dim_v = pick.choice([(16, 16), (16, 8), (24, 40)])
    return small(
        lengths, queries, shared=count, new=new if appends else (), capacity=capacity,
        heads=pick.choice([(4, 4), (4, 2), (3, 1)]), head_dim=head_dim, head_dim_v=head_dim_v,
        dtype=dtype, page_size=page_size, batch_idx=not page_size and pick.random() < 0.5,
        is_packed=packed, new_packed=packed, causal=causal,
        rotary_columns=pick.choice([0, 6, 16]) if appends and dtype != 'e4m3' else 0,
        interleaved=pick.random() < 0.5, sinks='fp32' if pick.random() < 0.3 else '',
        descales=pick.random() < 0.7, **options)


@pytest.mark.parametrize('number', range(120))
def test_grid(number):
    """out, LSE and the caches. For all but the first sequence shared slots are NaN, and page ids of
    shared pages point nowhere.
    """
    check(drawn(number))


@pytest.mark.parametrize('page_size', [0, 4])
@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize('options', [{}, {'causal': True}, {'softcap': 3.0}], ids=str)
def test_as_without_sharing(options, packed, page_size):
    """The same keys in every row, in float64."""
    case = small((9, 9, 20), page_size=page_size, is_packed=packed, dtype='fp64', sinks='fp32',
                 **options)    # causal: a key of its own for each query
    given = case.arguments('cpu')
    (first_row, first_slot), *others = ((row[:8], slot[:8]) for row, slot in places(case, given))
    for name in ('k_cache', 'v_cache'):
        for own in others:
            given[name][own] = given[name][first_row, first_slot]
    plain = flash_attn_with_kvcache(**given)
    shared = flash_attn_with_kvcache(**given, shared_prefix=8)
    for one, other in zip(shared[:2], plain[:2]):
        torch.testing.assert_close(one, other)
    none = flash_attn_with_kvcache(**given, shared_prefix=0)
    assert all(torch.equal(one, other) for one, other in zip(none, plain))


@pytest.mark.parametrize('dtype', ['bf16', 'e4m3'])
def test_out_and_its_dtype(dtype):
    given = small((9, 9, 20), shared=8, dtype=dtype, lse=False).arguments('cpu')
    wanted = flash_attn_with_kvcache(**given)
    out = torch.full_like(wanted, 7).transpose(1, 2).contiguous().transpose(1, 2)
    assert flash_attn_with_kvcache(**given, out=out) is out and torch.equal(out, wanted)
    if dtype == 'e4m3':
        half = flash_attn_with_kvcache(**given, out_dtype=torch.float16)
        assert half.dtype == torch.float16
        into = torch.empty_like(half)
        assert torch.equal(flash_attn_with_kvcache(**given, out=into), half)


def test_batch_of_none_and_nothing_of_its_own():
    q, cache = torch.randn(0, 1, 2, 8), torch.randn(0, 4, 2, 8)
    assert flash_attn_with_kvcache(q, cache, cache, cache_seqlens=ints([]),
                                   shared_prefix=2).shape == q.shape
    check(small((8, 8, 8), shared=8))
    check(small((8, 8), shared=8, length_as='int'))


# ------------------------------------------------------------------------------------------- errors
def dense(new: tuple[int, ...] = (), page_size: int = 0, **changes) -> dict:
    """Three sequences, 8 shared keys."""
    return small((9, 10, 20), shared=8, new=new, page_size=page_size,
                 lse=False).arguments('cpu') | changes


def good(new: tuple[int, ...] = (), **changes) -> dict:
    """The same in pages of 4."""
    return dense(new, 4, **changes)


def paged_elsewhere(given: dict) -> dict:
    given['page_table'][0, 1] = 99
    return given


BAD = {
    'negative': (good, dict(shared_prefix=-4), 'shared_prefix to be an int of 0 or more, got -4'),
    'float': (good, dict(shared_prefix=4.0), 'shared_prefix to be an int of 0 or more, got 4.0'),
    'None': (good, dict(shared_prefix=None), 'shared_prefix to be an int of 0 or more, got None'),
    'flag': (good, dict(shared_prefix=True), 'shared_prefix to be an int of 0 or more, got True'),
    'part of a page': (good, dict(shared_prefix=6),
                       'shared_prefix to be a multiple of 4 from 0 to 24, the slots of a sequence'),
    'capacity': (good, dict(shared_prefix=28), 'shared_prefix to be a multiple of 4 from 0 to 24'),
    'dense capacity': (dense, dict(shared_prefix=25), 'shared_prefix to be from 0 to 24, the'),
    'window': (good, dict(window_size=(3, 0)), 'no window_size with shared_prefix'),
    'window to the right': (good, dict(window_size=(-1, 0)), 'no window_size with'),
    'chunks': (good, dict(attention_chunk=4), 'no attention_chunk with shared_prefix'),
    'leftpad': (good, dict(cache_leftpad=ints([0, 0, 0])), 'no cache_leftpad with shared_prefix'),
    'short number': (dense, dict(cache_seqlens=7),
                     'cache_seqlens to be at least shared_prefix, 8, got 7'),
    'causal number': (dense, dict(cache_seqlens=8, causal=True),
                      'at least as many keys after the shared ones as queries, 1, under causal, '
                      'got 0'),
    'short': (good, dict(cache_seqlens=ints([9, 7, 20])),
              'cache_seqlens[1] to be at least 8, the shared keys, got 7'),
    'causal': (good, dict(cache_seqlens=ints([9, 8, 20]), causal=True),
               'at least as many keys after the 8 shared ones as queries of sequence 1, 1, under '
               'causal'),
    'page of the first': (lambda *new: paged_elsewhere(good(*new)), {},
                          'page_table[0, 1] to be from 0 to'),
    'shape of out': (good, dict(out=torch.zeros(3, 1, 4, 8)), 'out to have the shape'),
    'dtype of out': (good, dict(out=torch.zeros(3, 1, 4, 16).half()), 'out.dtype to be that of q'),
    'rank of q': (good, dict(q=torch.zeros(3, 4, 16)), 'q to have the shape'),
    'rank of a cache': (good, dict(k_cache=torch.zeros(3, 4, 16)), 'k_cache to have the shape'),
}


@pytest.mark.parametrize('name', BAD)
def test_errors(name):
    make, changes, text = BAD[name]
    with pytest.raises(RuntimeError, match=r'flash_attn3\.\w+: expected ') as raised:
        flash_attn_with_kvcache(**make(**changes))
    assert text in str(raised.value)


@pytest.mark.parametrize('name', [name for name in BAD if 'causal' not in name])
def test_errors_before_an_append(name):
    """Nothing is written. What is appended counts for causal, so that those are fine here."""
    make, changes, text = BAD[name]
    given = make((1, 1, 1), **changes)
    before = {key: given[key].clone() for key in ('k_cache', 'v_cache')}
    with pytest.raises(RuntimeError, match=re.escape(text)):
        flash_attn_with_kvcache(**given)
    for key, x in before.items():
        assert torch.equal(given[key].nan_to_num(7), x.nan_to_num(7)), f'{key} was written'


def test_scales_have_to_be_the_same_for_all():
    given = small((9, 9, 20), shared=8, dtype='e4m3').arguments('cpu')
    for name in ('q_descale', 'k_descale', 'v_descale'):
        changed = given | {name: given[name].contiguous()}
        with pytest.raises(RuntimeError, match=f'{name} to be the same for all sequences, with '
                                               r'stride\(0\) == 0, got 2; hint: '):
            flash_attn_with_kvcache(**changed)


def test_can_use_knows_it():
    narrow = {name: x.bfloat16() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
              for name, x in good(window_size=(3, 0)).items()}
    reasons = can_use(**narrow)[1]
    assert any('no window_size with shared_prefix' in text for text in reasons)
    assert not any('shared' in text for text in can_use(**good())[1])


@pytest.mark.parametrize('changes, text', [
    (dict(cache_seqlens=ints([9, 7, 20])), 'cache_seqlens[1] to be at least 8'),
    (dict(page_table=ints([[0, 99, 2, 3, 4, 5]] * 3)), 'page_table[0, 1] to be from 0 to'),
    (dict(cache_seqlens=ints([9, 8, 20]), causal=True), 'keys after the 8 shared ones')])
def test_contents_on_a_gpu_where_asked_for(changes, text, monkeypatch):
    """As if these tensors were on one, with ops that read no contents."""
    given = good(**changes)
    given |= {name: given[name].bfloat16() for name in ('q', 'k_cache', 'v_cache')}
    lse = torch.zeros(3, 4, 1)

    def attend(q, *_):
        return q, lse.view(1, 4, 3) if q.size(0) == 1 else lse

    monkeypatch.setattr(kvcache, '_EAGER', (attend, None))
    monkeypatch.setattr(torch.Tensor, 'is_cuda', True)
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: False)
    monkeypatch.setattr('flash_attn3.ops.library.kernels_serve', lambda device: True)
    assert flash_attn_with_kvcache(**given).shape == given['q'].shape
    monkeypatch.setattr(env, 'CHECK_CONTENTS', True)
    with pytest.raises(RuntimeError, match=re.escape(text)):
        flash_attn_with_kvcache(**given)


# ------------------------------------------------------------------------------------------- levels
@st.composite
def level_cases(draw) -> LevelCase:
    """A tree: each level divides the groups of the one before, or not."""
    batch = draw(st.integers(1, 5))
    depth = draw(st.integers(0, 3))
    counts = st.integers(0, 11)
    groups, shared = [], []
    for _ in range(depth):
        cuts = sorted(draw(st.sets(st.integers(1, batch - 1)))) if batch > 1 else []
        ends = [0, *cuts, batch]
        groups.append(tuple(b - a for a, b in zip(ends, ends[1:])))
        shared.append(tuple(draw(counts) for _ in groups[-1]))
    packed, causal = draw(st.booleans()), draw(st.booleans())
    rows = draw(st.integers(1, 3))
    queries = [draw(st.integers(0, 3)) if packed else rows for _ in range(batch)]
    if packed and sum(queries) == 0:
        queries[0] = 1
    own = [count * (causal and depth > 0) + draw(counts) for count in queries]
    return LevelCase(
        tuple(groups), tuple(shared), tuple(zip(queries, own)), draw(st.sampled_from([1, 3, 8])),
        draw(st.sampled_from([(4, 4), (4, 2), (3, 1)])), 16,
        draw(st.sampled_from(['fp32', 'fp64', 'fp64'])), packed, causal,
        draw(st.sampled_from([0.0, 2.5])), draw(st.booleans()), draw(st.booleans()),
        seed=draw(st.integers(0, 99)))


@examples(60)
@drawn_from(level_cases())
def test_levels(case):
    check_levels(case, 'cpu')


TWO = LevelCase(((3,),), ((10,),), ((1, 5), (1, 0), (1, 7)), page_size=4, heads=(4, 2), head_dim=16,
                dtype='fp32')


def test_levels_and_shared_prefix_agree():
    """The same pages both ways."""
    given = small((9, 10, 20), shared=8, page_size=4, dtype='fp64').arguments('cpu')
    wanted = flash_attn_with_kvcache(**given)
    table, lengths = given['page_table'], given['cache_seqlens']
    levels = [(table[:1], 8, ints([0, 3])), (table[:, 2:], lengths - 8)]
    got = shared_prefix_attn(given['q'], given['k_cache'], given['v_cache'], levels,
                             return_softmax_lse=True)
    for one, other in zip(got, wanted):
        torch.testing.assert_close(one, other)


def test_out_of_levels():
    given = TWO.build('cpu').arguments
    wanted = shared_prefix_attn(**given)
    out = torch.full_like(wanted, 7)
    assert shared_prefix_attn(**given, out=out) is out and torch.equal(out, wanted)
    one = given | dict(levels=given['levels'][-1:])
    wanted = shared_prefix_attn(**one).clone()
    assert shared_prefix_attn(**one, out=out) is out and torch.equal(out, wanted)


def test_a_dense_cache_as_pages():
    """Pages as long as its rows."""
    cache = torch.randn(4, 9, 2, 16)
    q = torch.randn(3, 1, 4, 16)
    out = shared_prefix_attn(q, cache, cache, [
        PrefixLevel(ints([[3]]), ints([9]), ints([0, 3])),
        PrefixLevel(ints([[0], [1], [2]]), ints([9, 9, 9]))])
    keys = torch.cat([cache[3:].expand(3, -1, -1, -1), cache[:3]], 1)
    torch.testing.assert_close(out, flash_attn_func(q, keys, keys))


def changed_level(number: int, **changes) -> dict:
    given = TWO.build('cpu').arguments
    given['levels'][number] = given['levels'][number]._replace(**changes)
    return given


@pytest.mark.parametrize('make, text', [
    (lambda: TWO.build('cpu').arguments | dict(levels=[]), 'one to 4 levels, got 0'),
    (lambda: TWO.build('cpu').arguments | dict(levels=TWO.arguments['levels'] * 3),
     'one to 4 levels, got 6'),
    (lambda: TWO.build('cpu').arguments | dict(levels=[3]), 'levels[0] to be a PrefixLevel'),
    (lambda: TWO.build('cpu').arguments | dict(levels=[(ints([[0]]),)]), 'levels[0] to be a Pre'),
    (lambda: changed_level(0, page_table=ints([0])), 'levels[0].page_table to be a tensor of 2'),
    (lambda: changed_level(1, seqlens=None), 'levels[1].seqlens to be a tensor of 1 dimensions'),
    (lambda: changed_level(1, seqlens=-1), 'levels[1].seqlens to be 0 or more, got -1'),
    (lambda: changed_level(0, cu_seqlens_q=3), 'levels[0].cu_seqlens_q to be a tensor of 1'),
    (lambda: changed_level(0, cu_seqlens_q=ints([0, 2])), 'levels[0].cu_seqlens_q to end at 3'),
    (lambda: changed_level(0, cu_seqlens_q=ints([0, 4])), 'cu_seqlens_q[1], the end'),
    (lambda: changed_level(0, seqlens=ints([99])), 'cache_seqlens[0] to be from 0 to'),
    (lambda: changed_level(0, page_table=ints([[0, 0, 99]])), 'page_table[0, 2] to be from 0 to'),
    (lambda: changed_level(0, page_table=ints([[0], [0]])), 'page_table to have the shape'),
    (lambda: changed_level(0) | dict(causal=True),
     'levels[1].seqlens[1] to be at least 1, the queries, under causal, got 0'),
    (lambda: changed_level(0) | dict(q=torch.zeros(3, 4, 16)), 'levels[1].cu_seqlens_q to be'),
    (lambda: changed_level(0) | dict(q=torch.zeros(3, 16)), 'q to have 4 dimensions'),
    (lambda: changed_level(0) | dict(out=torch.zeros(3, 1, 4, 8)), 'out to be (3, 1, 4, 16)'),
    (lambda: changed_level(0) | dict(q_descale=torch.ones(2)), 'q_descale to have 2 dimensions'),
    (lambda: changed_level(0) | dict(q_descale=torch.ones(3, 2)), 'q_descale to be the same'),
    (lambda: changed_level(0) | dict(q_descale=torch.ones(1, 2)), 'float8_e4m3fn with q_descale'),
    (lambda: changed_level(0) | dict(s_aux=torch.ones(3)), 's_aux to have the shape'),
    (lambda: changed_level(0) | dict(num_splits=-1), 'num_splits to be from 0'),
])
def test_errors_of_levels(make, text):
    with pytest.raises(RuntimeError, match=r'flash_attn3\.\w+: expected ') as raised:
        shared_prefix_attn(**make())
    assert text in str(raised.value)


def test_gradients_are_refused():
    given = TWO.build('cpu').arguments
    given['q'].requires_grad_()
    with pytest.raises(RuntimeError, match='shared_prefix_attn: expected requires_grad=False'):
        shared_prefix_attn(**given)
    with pytest.raises(RuntimeError, match='flash_attn_with_kvcache: expected requires_grad=False'):
        flash_attn_with_kvcache(**good(q=good()['q'].requires_grad_()))


# ------------------------------------------------------------------------------------------ tracing
@pytest.mark.parametrize('dynamic', [False, True])
def test_compiled(dynamic):
    """Both functions, each as one graph."""
    given, same = (small((9, 10, 20), shared=8, new=(2, 2, 2), page_size=4, rotary_columns=8,
                         causal=True).arguments('cpu') for _ in range(2))
    levels = TWO.build('cpu').arguments

    def step(given: dict, levels: dict) -> tuple:
        return (*flash_attn_with_kvcache(**given)[:2],
                *shared_prefix_attn(**levels, return_softmax_lse=True))

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend='aot_eager', dynamic=dynamic)
    with torch.no_grad():
        got, wanted = compiled(given, levels), step(same, levels)
    for one, other in zip(got, wanted):
        assert torch.equal(one, other)
    assert torch.equal(given['k_cache'].nan_to_num(7), same['k_cache'].nan_to_num(7))


# ------------------------------------------------------------------------------------ merge_states
def test_gradients_of_keys_that_two_sequences_share():
    """merge_states of the shared keys, all queries as one sequence, and of each on its own:
    gradients of q, of the shared keys, to which both sequences add, and of the others.
    """
    q, own = (torch.randn(2, rows, 2, 8, dtype=torch.float64, requires_grad=True)
              for rows in (3, 4))
    shared = torch.randn(1, 6, 2, 8, dtype=torch.float64, requires_grad=True)
    part, lse = flash_attn_func(q.reshape(1, 6, 2, 8), shared, shared, return_attn_probs=True)
    parts = [(part.view(2, 3, 2, 8), lse.view(2, 2, 3).transpose(0, 1)),
             flash_attn_func(q, own, own, causal=True, return_attn_probs=True)]
    out, lse = merge_states(*zip(*parts))
    keys = torch.cat([shared.expand(2, -1, -1, -1), own], 1)
    wanted, wanted_lse = flash_attn_func(q, keys, keys, causal=True, return_attn_probs=True)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    for got, want in zip(torch.autograd.grad((out, lse), (q, shared, own), (dout, dlse)),
                         torch.autograd.grad((wanted, wanted_lse), (q, shared, own),
                                             (dout, dlse))):
        torch.testing.assert_close(got, want)
