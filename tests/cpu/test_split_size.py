"""split_size of flash_attn_func and flash_attn_varlen_func: kernels with one width of K tiles,
errors, and on the CPU the results and gradients of a call without it.
"""
from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.library import opcheck

from flash_attn3 import _plan, can_use, explain, flash_attn_func, quantize_fp8
from flash_attn3.api import interface
from flash_attn3.ops.dense_and_varlen import Execution
from flash_attn3.tools import planning

from tests.bits import runner
from tests.bits.draw import FEATURES, LAYOUTS, draw_of
from tests.bits.ways import Computed, Ways, check, noise
from tests.cpu.test_general_op import inputs
from tests.cpu.test_splits import OPTIONS, dense, function_of, packed
from tests.support.described import describe_sizes

SPLIT_SIZE = 20
SIZED = Execution(split_size=SPLIT_SIZE)
LONGEST, DRAWS = 40, 16
HEAD_DIMS = [(dim, dim) for dim in range(8, 257, 8)] + [(192, 128)]
# What no kernel without a cache has an own variant for, and what has one.
KINDS = {'full': {}, 'causal': {'causal': True}, 'softcap': {'causal': True, 'softcap': 9.0},
         'window': {'causal': True, 'window_left': 100}, 'chunk': {'attention_chunk': 300}}


# ------------------------------------------------------------------------------------------ kernels
def shapes(queries: int, keys: int, dims: tuple[int, int], dtype: str) -> dict:
    found = zip('qkv', ((queries, 8, dims[0]), (keys, 2, dims[0]), (keys, 2, dims[1])))
    return {name: describe_sizes((2, *shape), dtype) for name, shape in found}


def plans(dims: tuple[int, int], dtype: str, mask: dict, split_size: int) -> list[dict]:
    """Of whole prompts, short and long, and on a cache with few queries and many."""
    options = dict(mask, split_size=split_size, sm_count=132, l2_bytes=50 << 20)
    on_cache = {name: x for name, x in options.items() if name != 'l2_bytes'}
    return [*(_plan.plan_forward(**shapes(count, count, dims, dtype), **options)
              for count in (1, 300, 4096, 16384)),
            *(_plan.plan_cache(**shapes(count, 4096, dims, dtype), **on_cache)
              for count in (1, 8, 17, 300, 4096))]


def serves(facts: dict, dims: tuple[int, int]) -> bool:
    return facts['head_dim'] >= dims[0] and facts['head_dim_v'] >= dims[1]


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16'])
@pytest.mark.parametrize('dims', HEAD_DIMS, ids=str)
def test_one_width_of_k_tiles(dims, dtype):
    """For each mask, length and layout. Parts have equally many K tiles, too."""
    found = [facts for mask in KINDS.values() for facts in plans(dims, dtype, mask, 1000)]
    assert all(serves(facts, dims) for facts in found)
    (tile_n,) = {facts['tile_n'] for facts in found}
    assert tile_n == (64 if dims[1] > 128 else 128)
    counts = {facts['split_count'] for facts in found if 'split_count' in facts}
    assert counts == {-(-1000 // tile_n)}


@pytest.mark.parametrize('dims', [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize('mask', KINDS.values(), ids=KINDS)
def test_variants_that_fold(mask, dims):
    """Without a cache a kernel that folds, on a cache never the decode kernel."""
    found = plans(dims, 'bfloat16', mask, 1000)
    assert all(facts['name'].endswith('Folded') for facts in found[:4])
    assert all('Cache' in facts['name'] and 'Decode' not in facts['name'] for facts in found[4:])
    without = plans(dims, 'bfloat16', mask, 0)
    assert not any('Folded' in facts['name'] for facts in without)


# ---------------------------------------------------------------------------------- memory of parts
MOST_PART_BYTES = 2 << 30


def plan_of_pages(heads: tuple[int, int], keys: int, is_packed: bool, **numbers) -> dict:
    """Of 256 sequences that may have so many keys each, with 2048 packed queries or 64 each."""
    pages = 4096, 16, heads[1], 128
    queries = (2048,) if is_packed else (256, 64)
    sizes = {'q': (*queries, heads[0], 128), 'k': pages, 'v': pages}
    lists = {'cache_seqlens': (256,), 'page_table': (256, keys // 16)}
    if is_packed:
        lists['cu_seqlens_q'] = (257,)
        numbers['max_seqlen_q'] = 2048
    return _plan.plan_cache(**{name: describe_sizes(x, 'bfloat16') for name, x in sizes.items()},
                            **{name: describe_sizes(x, 'int32') for name, x in lists.items()},
                            sm_count=132, **numbers)


@pytest.mark.parametrize('split', [{'split_size': 2048}, {'num_splits': 64}], ids=str)
@pytest.mark.parametrize('is_packed', [True, False])
@pytest.mark.parametrize('heads', [(32, 8), (8, 1), (6, 6), (12, 4)], ids=str)
def test_parts_of_groups_of_heads(heads, is_packed, split):
    """Groups of heads are launched one after the other if parts need more memory than a launch may
    have; an even split has few parts.
    """
    for keys in (4096, 1 << 15, 1 << 17):
        facts = plan_of_pages(heads, keys, is_packed, **split)
        groups = facts['head_groups']
        assert heads[0] % groups == 0 and (heads[1] % groups == 0 or groups % heads[1] == 0)
        assert facts['parts_bytes'] <= MOST_PART_BYTES
    assert groups > 1
    assert plan_of_pages(heads, 4096, is_packed, split_size=4096)['head_groups'] == 1
    assert plan_of_pages(heads, 1 << 17, is_packed)['head_groups'] == 1


# --------------------------------------------------------------------------------------- max_logits
@pytest.mark.parametrize('lse', [False, True])
@pytest.mark.parametrize('requires_grad', [False, True])
@pytest.mark.parametrize('options', OPTIONS, ids=str)
@pytest.mark.parametrize('make', [dense, packed])
def test_max_logits_come_from_another_call(make, options, requires_grad, lse):
    """So that those of out and LSE have the arguments of a call without them."""
    given = make(requires_grad=requires_grad, **options)
    asked = dict(return_max_logits=True, return_attn_probs=lse)
    wanted = function_of(given)(**given, **asked)
    got = function_of(given)(**given, **asked, split_size=SPLIT_SIZE)
    for x, y in zip(got, wanted, strict=True):
        assert x.dtype == y.dtype and x.requires_grad == y.requires_grad
        torch.testing.assert_close(x, y)
    if requires_grad:
        leaves = [x for x in given.values() if isinstance(x, torch.Tensor) and x.requires_grad]
        for x, y in zip(*(torch.autograd.grad(results[0].sum(), leaves)
                          for results in (got, wanted))):
            torch.testing.assert_close(x, y)


def test_calls_for_max_logits(monkeypatch):
    given, calls = dense(), []
    monkeypatch.setattr(interface, '_general_attention', lambda tensors, general, execution, _: (
        calls.append((execution, tensors[3])) or (None, None, len(calls))))
    out = torch.empty_like(given['q'])
    assert flash_attn_func(**given, out=out, return_max_logits=True, split_size=64) == (None, 2)
    (first, its_out), (second, no_out) = calls
    assert (first.split_size, first.return_max_logits) == (64, False) and its_out is out
    assert (second.split_size, second.return_max_logits) == (0, True) and no_out is None


def test_max_logits_compiled():
    given = dense(dtype=torch.float32, requires_grad=True)
    asked = dict(return_max_logits=True, split_size=SPLIT_SIZE)
    compiled = torch.compile(lambda **given: flash_attn_func(**given, **asked),
                             backend='aot_eager', fullgraph=True)
    results = []
    for function in (compiled, lambda **given: flash_attn_func(**given, **asked)):
        out, max_logits = function(**given)
        assert not max_logits.requires_grad
        results.append([out, max_logits, *torch.autograd.grad(out.square().sum(), given.values())])
    torch.testing.assert_close(*results)


def test_plans_of_max_logits(capsys):
    """The kernel of out is that of a call without max_logits, and both are in the install."""
    explain((1, 300, 4, 128), (1, 300, 4, 128), causal=True, split_size=256,
            return_max_logits=True)
    rows = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines() if line)
    assert rows['variant'].split()[0] == 'FwdBf16D128CausalFolded'
    assert rows['max_logits'] == 'by another call, without parts'
    call = {name: torch.zeros(1, 300, 4, 128).bfloat16() for name in 'qkv'}
    found = planning._plans_of('flash_attn_func', (*call.values(), None), dict(
        causal=True, split_size=256, return_max_logits=True), None, 1)
    assert [facts['name'][:18] for facts in found] == ['FwdBf16D128CausalF', 'FwdBf16D128General']


# ------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize('make', [dense, packed])
@pytest.mark.parametrize('changes, text', [
    ({'split_size': -1}, 'split_size to be 0 (none) or more, got -1'),
    ({'split_size': 64.0}, 'split_size to be 0 (none) or more, got 64.0'),
    ({'split_size': 64, 'num_splits': 2}, 'split_size of 0 with num_splits=2, got 64'),
    ({'split_size': 64, 'num_splits': -1}, 'num_splits to be from 0 (by plan) to 256, got -1')])
def test_wrong_calls(make, changes, text):
    given = make()
    function = function_of(given)
    for requires_grad in (False, True):
        given['q'].requires_grad_(requires_grad)
        with pytest.raises(RuntimeError) as error:
            function(**given, **changes)
        assert str(error.value) == f'flash_attn3.{function.__name__}: expected {text}'


@pytest.mark.parametrize('num_splits', [0, 1])
def test_a_client_may_give_one_part_or_leave_it_to_the_plan(num_splits):
    given = dense()
    wanted = flash_attn_func(**given, split_size=SPLIT_SIZE)
    got = flash_attn_func(**given, split_size=SPLIT_SIZE, num_splits=num_splits)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize('make', [dense, packed])
def test_fp8_is_refused(make):
    given = make(dtype=torch.bfloat16)
    for name in 'qkv':
        if make is dense:
            given[name], given[f'{name}_descale'] = quantize_fp8(given[name])[:2]
        else:
            given[name] = given[name].to(torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match='expected split_size of 0 with float8_e4m3fn, got 64'):
        function_of(given)(**given, split_size=64)


def test_can_use_takes_it():
    """And says what the call says."""
    given = dense(dtype=torch.bfloat16)
    _, (problem, _) = can_use(**given, split_size=64, num_splits=2)
    assert problem.endswith('expected split_size of 0 with num_splits=2, got 64')
    _, problems = can_use(**given, split_size=64)
    assert problems == ['flash_attn3.can_use: expected q on a CUDA device, got cpu']


# --------------------------------------------------------------------------------------- on the CPU
def results(given: dict, **options) -> list[torch.Tensor]:
    """out, lse and gradients."""
    out, lse = function_of(given)(**given, **options, return_attn_probs=True)
    leaves = [x for x in given.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    if not leaves:
        return [out, lse]
    seen = lse.isfinite()
    return [out, lse, *torch.autograd.grad((out * out).sum() + lse[seen].sum(), leaves)]


@pytest.mark.parametrize('options', OPTIONS, ids=str)
@pytest.mark.parametrize('requires_grad', [False, True])
@pytest.mark.parametrize('make', [dense, packed])
def test_as_without_parts(make, requires_grad, options):
    given = make(requires_grad=requires_grad, **options)
    for got, wanted in zip(results(given, split_size=SPLIT_SIZE, deterministic=True),
                           results(given), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize('requires_grad', [False, True])
@pytest.mark.parametrize('make', [dense, packed])
def test_compiled(make, requires_grad, fresh_compiler):
    given = make(requires_grad=requires_grad, causal=True)
    compiled = torch.compile(function_of(given), backend='aot_eager', fullgraph=True)
    for split_size in (SPLIT_SIZE, 2 * SPLIT_SIZE):
        got = compiled(**given, split_size=split_size)
        torch.testing.assert_close(got, function_of(given)(**given, split_size=split_size))


@pytest.mark.parametrize('kind', ['dense', 'packed'])
@pytest.mark.parametrize('requires_grad', [False, True])
def test_opcheck(requires_grad, kind):
    tensors, general = inputs(kind, requires_grad=requires_grad)
    opcheck(torch.ops.flash_attn3.fwd_general.default, (*tensors, *general, *SIZED))
    if not requires_grad:
        opcheck(torch.ops.flash_attn3.attend.default, (*tensors, None, *general, *SIZED[:-1]))


# ------------------------------------------------------------------------------------- tests/bits
@pytest.mark.parametrize('number', range(DRAWS))
def test_draws_compute_one_function(number):
    """Each way to compute a prompt, in float64. A GPU compares the bits."""
    draw = draw_of(0, number, LONGEST)
    check(dataclasses.replace(draw, head_dim=16, head_dim_v=8), torch.device('cpu'), False)


def test_draws_are_varied_and_repeatable():
    draws = [draw_of(0, number) for number in range(300)]
    assert draws == [draw_of(0, number) for number in range(300)]
    assert {draw.feature for draw in draws} == set(FEATURES)
    for feature in FEATURES:
        ways = [way for draw in draws if draw.feature == feature for way in draw.ways]
        assert {way.layout for way in ways} == set(LAYOUTS)
        assert {way.pack_gqa for way in ways} == {None, True, False}
        assert {way.is_packed for way in ways if way.is_cache} == {False, True}
    several = sum(draw.length > 2 * draw.split_size for draw in draws)
    assert several > 50, 'prompts with more than two parts'


def test_worker_processes_find_the_draws():
    alone = list(runner.results(0, 'cpu', range(2), jobs=1))
    assert list(runner.results(0, 'cpu', range(2), jobs=2)) == alone


def test_a_wrong_bit_is_found(monkeypatch):
    """As a line that repeats the draw."""
    draw = draw_of(0, 0, LONGEST)
    piece = Ways.piece
    monkeypatch.setattr(Ways, 'piece', lambda *given: Computed(
        *(x + 1e-3 for x in piece(*given))))
    with pytest.raises(AssertionError, match=r'Draw\(seed=0, number=0, .*Way\(layout='):
        check(draw, torch.device('cpu'), has_bits=False)


def test_noise_is_about_normal():
    x = noise((200, 300), 'some name', torch.device('cpu')).double()
    assert abs(x.mean()) < 0.02 and abs(x.std() - 1) < 0.02 and 3 < x.abs().max() < 4
    assert torch.equal(x.float(), noise((200, 300), 'some name', torch.device('cpu')))
    assert not torch.equal(x.float(), noise((200, 300), 'another', torch.device('cpu')))
